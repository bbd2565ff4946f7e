"""Fleets, the clock, the ledger by cause; devices that fail or come late."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.core.errors import ShoalError
from shoal.core.ledger import Deadlines
from shoal.core.streams import RandomStreams
from shoal.fleet.fleets import FLEET_FORMS, parse_fleet
from shoal.fleet.profile import DeviceProfile

TINY: dict[str, Any] = dict(devices=8, sample=4, rounds=3, split="iid", batch=64)
LONGER: dict[str, Any] = TINY | {"rounds": 6}


def fleet(text: str, devices: int = 20, rounds: int = 30):
    return parse_fleet(text, RandomStreams(3), devices, rounds)


# profiles and fleets --------------------------------------------------------------------------------------------------


def test_times_are_bytes_over_links_and_operations_over_speed():
    profile = DeviceProfile(macs=2e6, down=8.0, up=4.0)
    assert profile.estimate_times(down=3_000_000, macs=10_000_000, up=1_000_000) == (3.0, 5.0, 2.0)
    assert profile.estimate_times(3_000_000, 10_000_000, 1_000_000).total == 10.0
    assert DeviceProfile(seconds=7.5).estimate_times(0, 10**15, 0).compute == 7.5


def test_energy_is_joules_per_operation_and_per_byte():
    assert DeviceProfile(joules_mac=2e-9, joules_byte=1e-6).estimate_joules(1000, 10**9, 500) == pytest.approx(
        2.0 + 0.0015
    )


@pytest.mark.parametrize(("seconds", "rounds", "published"), [(4.0, 130, 1075), (7.25, 109, 1258), (6.75, 107, 1182)])
def test_the_clock_agrees_with_the_three_checks_of_fedbr(seconds, rounds, published):
    """FedAvg, FedMLB and MOON on even devices: 42.65e6 bytes each way at 160 Mbit/s and the method's compute time."""
    even = fleet(f"fedbr-even:{seconds}")
    spent = sum(even.get_profile(0, t).estimate_times(42_650_000, 0, 42_650_000).total for t in range(rounds))
    assert spent == pytest.approx(published, rel=0.01)


def test_5g_is_the_link_of_fedbiad():
    assert (fleet("5g").get_profile(0, 0).down, fleet("5g").get_profile(0, 0).up) == (110.6, 14.0)


def test_ranges_are_drawn_anew_every_ten_rounds():
    ranges = fleet("fedbr:2.0:10.0")
    profiles = [[ranges.get_profile(d, t) for d in range(300)] for t in (0, 9, 10)]
    assert profiles[0] == profiles[1] != profiles[2]
    links, seconds = [p.down for p in profiles[0]], [p.seconds or 0 for p in profiles[0]]
    assert 40 <= min(links) < 50 and 270 < max(links) <= 280 and np.mean(links) == pytest.approx(160, rel=0.05)
    assert 2 <= min(seconds) and max(seconds) <= 10 and np.mean(seconds) == pytest.approx(6, rel=0.07)


def test_a_device_keeps_its_tier():
    tiers = fleet("tiers:2:1:0.5")
    speeds = [tiers.get_profile(d, 0).macs for d in range(200)]
    assert speeds == [tiers.get_profile(d, 17).macs for d in range(200)] and set(speeds) == {2e9, 1e9, 0.5e9}


def test_devices_may_be_away():
    moody = fleet("5g?0.3", devices=2000)
    there = moody.get_available_mask(4)
    assert there is not None and there.mean() == pytest.approx(0.3, abs=0.05)
    later = moody.get_available_mask(5)
    assert later is not None and not np.array_equal(there, later) and moody.get_profile(0, 0).down == 110.6
    history = shoal.run(fleet="uniform?0.5", **TINY).history
    assert all(0 < len(devices) <= 4 for devices in history["devices"])


@pytest.mark.parametrize(
    "text", ["uniform:0", "uniform:x", "fedbr:1:2:3", "tiers:-1", "5g:1", "5g?0", "5g?2", "5g?x", "fedbr:nan"]
)
def test_a_fleet_that_cannot_be_read_is_refused(text):
    with pytest.raises(ShoalError, match="cannot be read") as error:
        fleet(text)
    assert "Write" in error.value.advice


def test_seconds_of_fedbr_in_the_wrong_order_are_refused_and_not_all_the_larger():
    with pytest.raises(ShoalError, match="fedbr:LOW:HIGH"):
        parse_fleet("fedbr:10:5", RandomStreams(0), 3, 1)
    slow = parse_fleet("fedbr:8", RandomStreams(0), 3, 1)
    assert slow.get_profile(0, 0).estimate_times(0, 1, 0).compute == 8.0


def test_an_unknown_fleet_suggests_the_nearest():
    with pytest.raises(ShoalError, match="fedbr"):
        fleet("fedrb")


@given(st.sampled_from(sorted(FLEET_FORMS)) | st.text(max_size=8), st.text(max_size=12))
def test_any_text_is_a_fleet_or_refused(name, rest):
    try:
        fleet(f"{name}:{rest}").get_profile(0, 0).estimate_times(1, 1, 1)
    except ShoalError:
        pass


# traces ---------------------------------------------------------------------------------------------------------------


def test_a_trace_by_round(tmp_path):
    lines = ["device,round,macs,down,up,available"]
    lines += [f"{d},{t},{(d + 1) * 1e6},{10 + t},5,{int(d != 1 or t != 2)}" for d in range(3) for t in range(4)]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    trace = fleet(f"trace:{tmp_path}/trace.csv", devices=3, rounds=4)
    assert trace.get_profile(1, 2) == DeviceProfile(2e6, 12.0, 5.0)
    there = [trace.get_available_mask(t) for t in range(4)]
    assert [None if a is None else a.tolist() for a in there][2] == [True, False, True]


def test_a_trace_for_the_whole_run(tmp_path):
    (tmp_path / "trace.csv").write_text("device,seconds\n0,2.5\n1,3.5\n")
    trace = fleet(f"trace:{tmp_path}/trace.csv", devices=2, rounds=99)
    assert trace.get_profile(1, 98).seconds == 3.5 and trace.get_available_mask(5) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no column"),
        ("phone,macs\n0,1\n", "no column"),
        ("device,round,macs\n0,0,1\n0,1,1\n", "no row for device 0 in round 2"),
        ("device,macs\n1,5\n", "no row for device 0"),
        ("device,macs\n0,fast\n", "macs in line 2"),
        ("device,macs\n0,0\n", "macs in line 2"),
        ("device,macs\nzero,5\n", "device in line 2"),
        ("device,macs\n-1,5\n", "device in line 2"),
        ("device,down\n0,nan\n", "down in line 2"),
        ("device,down\n0,\n", "down in line 2 is empty"),
        ("device,down\n0\n", "line 2 has 1 cells and there are 2 columns"),
        ("device,down\n0,5,6\n", "line 2 has 3 cells and there are 2 columns"),
        ("device,dwon\n0,5\n", "line 1, column 2: .*'dwon'.*Did you mean 'down'"),
        ("device,down,\n0,5,\n", "line 1, column 3: there is no column called ''"),
        ("device,down,down\n0,5,6\n", "line 1, column 3: down is there twice"),
        ("device,down\n0,5\n\n0,5\n", "lines 2 and 4 are both about device 0"),
        ("device,round\n0,0\n0,1\n0,1\n", "lines 3 and 4 are both about device 0 in round 1"),
        ("device,available\n0,0.5\n", "available in line 2 is '0.5'. It must be 0 or 1"),
        ("device,memory\n0,0\n", "memory in line 2"),
        ("device,down\n0,1e-300\n", "down in line 2"),
        ("device,down\n0,1_000\n", "down in line 2"),
        ("device,down\n٣,5\n", "device in line 2"),
        ("device,down\n" + "9" * 5000 + ",5\n", "device in line 2"),
        ('device,down\n0,"5\n', "cannot be read"),
    ],
)
def test_a_bad_trace_is_refused(tmp_path, text, found):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ShoalError, match=found) as error:
        fleet(f"trace:{tmp_path}/trace.csv", devices=1, rounds=3)
    assert error.value.kind.name == "no-data"


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ShoalError, match="cannot be read"):
        fleet(f"trace:{tmp_path}/nowhere.csv")


def test_a_trace_saved_by_a_spreadsheet_is_read(tmp_path):
    (tmp_path / "trace.csv").write_text("\ufeffdevice, down\r\n0, 5.5\r\n\r\n", newline="")
    assert fleet(f"trace:{tmp_path}/trace.csv", devices=1).get_profile(0, 3).down == 5.5


NAMES = ("macs", "down", "up", "seconds", "joules_mac", "joules_byte", "memory")
NUMBER = st.floats(1e-9, 1e18)


@st.composite
def traces(draw):
    """A whole trace as a table of texts, and the number of devices and rounds in it."""
    devices, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    columns = draw(st.permutations(["device", "round", *draw(st.sets(st.sampled_from(NAMES), min_size=1))]))
    keys = draw(st.permutations([(d, t) for d in range(devices) for t in range(rounds)]))
    cells = [[{"device": str(d), "round": str(t)}.get(c) or repr(draw(NUMBER)) for c in columns] for d, t in keys]
    return [list(columns), *cells], devices, rounds


def write(path, table) -> str:
    path.write_text("".join(",".join(row) + "\n" for row in table))
    return f"trace:{path}"


@given(traces())
def test_a_whole_trace_is_read_cell_by_cell(tmp_path_factory, made):
    table, devices, rounds = made
    trace = fleet(write(tmp_path_factory.mktemp("trace") / "t.csv", table), devices, rounds)
    for row in table[1:]:
        cells = dict(zip(table[0], row))
        profile = trace.get_profile(int(cells["device"]), int(cells["round"]))
        assert all(getattr(profile, name) == float(cells[name]) for name in NAMES if name in cells)


@given(traces(), st.data())
def test_a_trace_with_one_mistake_is_refused_with_its_line(tmp_path_factory, made, data):
    (head, *rows), devices, rounds = made
    at = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.integers(0, len(head) - 1))
    line, row = at + 2, rows[at]
    mistake = data.draw(st.sampled_from(["empty", "short", "long", "unknown", "twice", "repeated", "text"]))
    if mistake == "empty":
        row[column], says = "", f"{head[column]} in line {line} is empty"
    elif mistake == "text":
        row[column], says = "fast", f"{head[column]} in line {line} is 'fast'"
    elif mistake == "short":
        del row[column]
        says = f"line {line} has"
    elif mistake == "long":
        row.insert(column, "1")
        says = f"line {line} has"
    elif mistake == "unknown":
        head.insert(column, "colour")
        says = f"line 1, column {column + 1}"
    elif mistake == "twice":
        head.append(head[column])
        says = f"line 1, column {len(head)}"
    else:
        rows.append(list(row))
        says = f"lines {line} and {len(rows) + 1}"
    with pytest.raises(ShoalError, match=says):
        fleet(write(tmp_path_factory.mktemp("trace") / "t.csv", [head, *rows]), devices, rounds)


@given(traces(), st.data())
def test_a_trace_with_any_letter_changed_is_read_or_refused(tmp_path_factory, made, data):
    table, devices, rounds = made
    text = "".join(",".join(row) + "\n" for row in table)
    at = data.draw(st.integers(0, len(text)))
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    letter = data.draw(st.characters(codec="utf-8"))
    path.write_text(text[:at] + letter + text[at + data.draw(st.integers(0, 3)) :], encoding="utf-8")
    try:
        trace = fleet(f"trace:{path}", devices, rounds)
    except ShoalError as error:
        assert error.kind.name == "no-data"
    else:
        assert all(
            trace.get_profile(d, t).estimate_times(1, 1, 1).total > 0 for d in range(devices) for t in range(rounds)
        )


# patience -------------------------------------------------------------------------------------------------------------


def test_who_is_late_and_when_the_round_ends():
    times = {0: 1.0, 1: 2.0, 2: 5.0, 3: 9.0}
    assert Deadlines().find_late_devices(times, 4, 4) == (set(), 9.0)
    assert Deadlines(deadline=5.0).find_late_devices(times, 4, 4) == ({3}, 5.0)
    assert Deadlines(over_select=1.0).find_late_devices(times, 2, 4) == ({2, 3}, 2.0)
    assert Deadlines(over_select=1.0, deadline=1.5).find_late_devices(times, 2, 4) == ({1, 2, 3}, 1.5)
    # somebody never answers: the server waits until the deadline, if there is one
    assert Deadlines(deadline=20.0).find_late_devices(times, 5, 5) == (set(), 20.0)
    assert Deadlines().find_late_devices(times, 5, 5) == (set(), 9.0)
    assert Deadlines(deadline=3.0).find_late_devices({}, 2, 2) == (set(), 3.0)
    assert Deadlines(over_select=0.3).count_devices_to_ask(10) == 13


def test_devices_that_fail_are_named_and_cost_only_the_downlink():
    history = shoal.run("scaffold", failures=0.5, **LONGER).history
    for row in history.rows:
        failed = [d["device"] for d in row.get("dropped", [])]
        assert all(d["why"] == "it failed" for d in row.get("dropped", []))
        assert row["bytes_up"] * len(row["devices"]) == row["bytes_down"] * (len(row["devices"]) - len(failed))
    assert any(row.get("dropped") for row in history.rows)


def test_a_round_in_which_all_fail_is_void():
    result = shoal.run(failures=1.0, **TINY)
    assert all(row["void"] and row["sim_seconds"] == 0 for row in result.history.rows)
    assert all((result.params[k] == v).all() for k, v in result.net.initial.items())


def test_late_replies_are_left_out_and_the_round_ends_in_time():
    slow = shoal.run(fleet="tiers", **TINY)
    seconds = sorted(row["sim_seconds"] for row in slow.history.rows)
    hasty = shoal.run(fleet="tiers", deadline=seconds[-1] * 0.9, **TINY)
    assert max(row["sim_seconds"] for row in hasty.history.rows) <= seconds[-1] * 0.9
    assert any(d["why"] == "it was late" for row in hasty.history.rows for d in row.get("dropped", []))
    # what a late device sends is still sent
    assert hasty.history["bytes_up"] == slow.history["bytes_up"]


def test_over_selection_asks_more_and_takes_the_fastest():
    history = shoal.run(fleet="tiers", over_select=0.5, **TINY).history
    assert [len(d) for d in history["devices"]] == [6] * 3
    assert all(len(row.get("dropped", [])) == 2 for row in history.rows)


# the ledger by cause --------------------------------------------------------------------------------------------------


def test_bytes_and_seconds_are_told_by_cause():
    for row in shoal.run("scaffold+fednova", fleet="tiers", **TINY).history.rows:
        model = 4 * 9610 * 4
        assert row["bytes_by"] == {
            "down": {"model": model, "scaffold": model},
            "up": {"model": model, "scaffold": model, "fednova": 4 * 4},
        }
        assert row["bytes_up"] == sum(row["bytes_by"]["up"].values())
        assert sum(row["seconds_by"].values()) == pytest.approx(row["sim_seconds"])


def test_energy_is_counted_where_a_profile_states_it(tmp_path):
    lines = ["device,joules_mac,joules_byte", *(f"{d},1e-9,1e-7" for d in range(8))]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    row = shoal.run(fleet=f"trace:{tmp_path}/trace.csv", **TINY).history.rows[0]
    assert row["joules"] == pytest.approx(row["macs_work"] * 1e-9 + (row["bytes_down"] + row["bytes_up"]) * 1e-7)
    assert "joules" not in shoal.run(**TINY).history.rows[0]


@pytest.mark.parametrize("method", ["fedavg", "uniform", "uniform(share=0.5)", "weighted"])
def test_every_selection_lives_with_devices_that_are_away(method):
    history = shoal.run(method, fleet="uniform?0.05", **LONGER).history
    assert any(row.get("void") for row in history.rows) and all(len(d) <= 4 for d in history["devices"])


@pytest.mark.parametrize("method", ["fedavg", "uniform", "weighted"])
def test_every_selection_asks_more_where_told(method):
    history = shoal.run(method, over_select=0.5, **TINY).history
    assert [len(d) for d in history["devices"]] == [6] * 3
