"""The history of a run as a table, and as lines on disk."""

import json
from itertools import accumulate
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import History, ShoalError
from shoal.core.metric import COLUMNS, METRICS, Metric
from shoal.runs.history import (
    clear_nonfinite_values,
    encode_row,
    encode_rows,
    read_history,
)


def row(number: int, accuracy: float | None, **more) -> dict:
    costs = {"bytes_down": 100, "bytes_up": 10, "macs_work": 7, "sim_seconds": 0.5, "wall_seconds": 1.0}
    return {"round": number, "accuracy": accuracy, **costs, **more}


ROWS = [row(0, 0.1), row(1, None, bytes_up=20), row(2, 0.6, dropped=[3]), row(3, 0.5), row(4, 0.9, sim_seconds=2.0)]


def test_to_dict_has_columns_in_the_order_they_came_up():
    columns = History(ROWS).to_dict()
    assert columns["round"] == [0, 1, 2, 3, 4]
    assert columns["accuracy"] == [0.1, None, 0.6, 0.5, 0.9]
    assert columns["dropped"] == [None, None, [3], None, None]
    assert list(columns)[-1] == "dropped"


def test_to_pandas_is_the_same_table():
    table = History(ROWS).to_pandas()
    assert list(table.columns) == list(History(ROWS).to_dict())
    assert table["bytes_up"].tolist() == [10, 20, 10, 10, 10]
    assert table["accuracy"].isna().tolist() == [False, True, False, False, False]


def test_an_empty_history():
    empty = History()
    assert (len(empty), empty.to_dict(), empty.last("accuracy"), empty.total("bytes_up")) == (0, {}, None, 0)
    assert empty.cost_to_target(0.5) is None and len(empty.to_pandas()) == 0


def test_last_is_the_newest_value_that_is_there():
    assert History(ROWS[:2]).last("accuracy") == 0.1
    assert History(ROWS).last("accuracy") == 0.9
    assert History(ROWS).last("elephants") is None


def test_total_adds_columns():
    assert History(ROWS).total("bytes_down", "bytes_up") == 5 * 100 + 4 * 10 + 20


def test_total_of_a_column_that_no_registry_sums():
    """As of a part's traffic in a history that was read without the registry of its run."""
    told = History([row(0, 0.1), row(1, None, **{"fedbr.bytes_down_by_blocks": 7}), row(2, 0.3)])
    assert told.total("fedbr.bytes_down_by_blocks", "bytes_up") == 37
    with pytest.raises(ShoalError, match="bytes_up"):
        told.total("bytes_upp")


def test_to_target_is_the_cost_until_the_first_round_that_reached_it():
    assert History(ROWS).cost_to_target(0.6) == {"rounds": 3, "sim_seconds": 1.5, "bytes": 340, "macs": 21}
    assert History(ROWS).cost_to_target(0.1) == {"rounds": 1, "sim_seconds": 0.5, "bytes": 110, "macs": 7}
    assert History(ROWS).cost_to_target(0.61) == {"rounds": 5, "sim_seconds": 4.0, "bytes": 560, "macs": 35}
    assert History(ROWS).cost_to_target(0.95) is None


def test_total_of_what_only_some_rounds_tell():
    told = [row(0, 0.1, bytes_down_by_blocks=40), row(1, 0.2), row(2, 0.3, bytes_down_by_blocks=2)]
    assert History(told).total("bytes_down_by_blocks") == 42
    assert History(ROWS).total("bytes_down_by_blocks") == 0


def test_what_only_some_methods_tell_must_be_a_number_where_it_is_told(tmp_path):
    for wrong in ('"many"', "null", "[]"):
        text = json.dumps(row(0, 0.1))[:-1] + f', "bytes_down_by_blocks": {wrong}}}\n'
        (tmp_path / "h.jsonl").write_text(text)
        with pytest.raises(ShoalError, match="line 1: bytes_down_by_blocks is not a number"):
            read_history(tmp_path / "h.jsonl")


TOLD = METRICS | {
    "damp.sent": Metric("damp.sent", "sent", "bytes", total="sum"),
    "damp.share": Metric("damp.share", "share", "share", "down"),
}


def test_what_parts_tell_adds_up_where_the_registry_says_so():
    told = [row(0, 0.1, **{"damp.sent": 4, "damp.share": 0.5}), row(1, 0.2), row(2, 0.3, **{"damp.sent": 3})]
    history = History(told, TOLD)
    assert history.total("damp.sent", "bytes_up") == 7 + 30 and history.last("damp.share") == 0.5
    assert history.cut(1).total("damp.sent") == 4
    with pytest.raises(ShoalError, match="damp.share is no amount"):
        history.total("damp.share")


def test_a_told_number_that_is_none_is_damage(tmp_path):
    (tmp_path / "h.jsonl").write_text(json.dumps(row(0, 0.1, **{"damp.share": "much"})) + "\n")
    with pytest.raises(ShoalError, match="line 1: damp.share is not a number"):
        read_history(tmp_path / "h.jsonl", metrics=TOLD)
    assert len(read_history(tmp_path / "h.jsonl")) == 1, "who does not know the part lets it be"


# headline -------------------------------------------------------------------------------------------------------------
def test_a_headline_of_which_less_is_better():
    rows = [row(n, 0.5, loss=loss) for n, loss in enumerate([2.0, 1.5, None, 1.0, 1.2])]
    history = History(rows, headline="loss")
    cost = history.cost_to_target(1.5)
    assert history.best == 1.0 and cost and cost["rounds"] == 2
    assert history.cost_to_target(0.9) is None and not history.is_reached(1.0) and history.is_reached(1.2)
    assert history.accuracy_at_budget(1.5, "sim_seconds") == 1.5
    assert history.cut(2).headline == "loss"


def test_words_are_said_once():
    history = History([row(0, 0.1, log=[["damp", "slow"]])])
    again = history.drop_repeated_words(row(1, 0.1, log=[["damp", "slow"], ["damp", "fast"], ["lag", "slow"]]))
    assert again["log"] == [["damp", "fast"], ["lag", "slow"]]
    assert "log" not in history.drop_repeated_words(row(1, 0.1, log=[["damp", "slow"]]))


@pytest.mark.parametrize("log", ["x", [3], [["damp"]], [["damp", 3]]])
def test_words_of_another_form_are_damage(tmp_path, log):
    (tmp_path / "h.jsonl").write_text(json.dumps(row(0, 0.1, log=log)) + "\n")
    with pytest.raises(ShoalError, match="line 1: log is not a list"):
        read_history(tmp_path / "h.jsonl")


# at a budget ----------------------------------------------------------------------------------------------------------
def test_at_a_budget_by_hand():
    """Seconds add up to 0.5, 1, 1.5, 2 and 4; bytes to 110, 230, 340, 450 and 560; round 1 is not evaluated."""
    history = History(ROWS)
    budgets = (0.4, 0.5, 1.2, 1.5, 3.9, 4.0, 9.0)
    assert [history.accuracy_at_budget(b, "sim_seconds") for b in budgets] == [None, 0.1, 0.1, 0.6, 0.5, 0.9, 0.9]
    both = [history.accuracy_at_budget(b, "bytes_down", "bytes_up") for b in (109, 110, 339, 340, 559, 560)]
    assert both == [None, 0.1, 0.1, 0.6, 0.5, 0.9]
    assert History().accuracy_at_budget(1.0, "sim_seconds") is None
    assert History([row(0, None)]).accuracy_at_budget(1.0, "sim_seconds") is None


costs = st.floats(0, 1e6) | st.integers(0, 10**12)
courses = st.lists(st.tuples(costs, costs, st.booleans()), max_size=12)


def course(drawn: list[tuple[float, float, bool]]) -> History:
    """A history whose accuracies are the numbers of their rounds, from 1."""
    return History([row(n, n + 1 if e else None, bytes_down=d, bytes_up=u) for n, (d, u, e) in enumerate(drawn)])


@given(courses, costs)
def test_no_round_at_a_budget_exceeds_it_and_none_later_fits(drawn, budget):
    history = course(drawn)
    at = history.accuracy_at_budget(budget, "bytes_down") or 0
    spent = zip(history["accuracy"], accumulate(history["bytes_down"]))
    assert all((cost <= budget) == (number <= at) for number, cost in spent if number is not None)


@given(courses, costs, costs)
def test_more_budget_is_never_an_earlier_round(drawn, one, other):
    small, large = (course(drawn).accuracy_at_budget(b, "bytes_down", "bytes_up") or 0 for b in sorted((one, other)))
    assert small <= large


@given(courses)
def test_what_was_spent_in_all_is_enough_for_the_last_round(drawn):
    for columns in (["sim_seconds"], ["bytes_down"], ["bytes_down", "bytes_up"]):
        assert course(drawn).accuracy_at_budget(course(drawn).total(*columns), *columns) == course(drawn).last(
            "accuracy"
        )


def test_two_runs_are_the_same_course_whatever_the_clock_said():
    assert History([row(0, 0.1)]).equals_except_wall_time(History([row(0, 0.1, wall_seconds=9.0)]))
    assert not History([row(0, 0.1)]).equals_except_wall_time(History([row(0, 0.2)]))
    assert not History(ROWS[:1]).equals_except_wall_time(History(ROWS[:2]))


def test_what_is_no_number_is_nothing():
    assert clear_nonfinite_values({"round": 0, "loss": nan, "train_loss": -inf, "accuracy": 0.5}) == {
        "round": 0,
        "loss": None,
        "train_loss": None,
        "accuracy": 0.5,
    }


def test_rewrite_and_read(tmp_path):
    (tmp_path / "h.jsonl").write_bytes(encode_rows(ROWS))
    assert read_history(tmp_path / "h.jsonl").rows == ROWS
    assert read_history(tmp_path / "h.jsonl", 2).rows == ROWS[:2]
    assert read_history(tmp_path / "h.jsonl", 0).rows == []


def test_no_file_is_no_history(tmp_path):
    assert read_history(tmp_path / "h.jsonl").rows == []


def test_a_row_is_one_line_of_json():
    assert encode_row({"round": 0, "text": "ü\n\u2028"}) == b'{"round":0,"text":"\\u00fc\\n\\u2028"}\n'


COSTS = {name: 1 for name, metric in METRICS.items() if metric.is_in_every_row and metric.total == "sum"}
cells = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
names = st.text().filter(
    lambda name: name not in {*METRICS, *COLUMNS}
)  # hypothesis tries the words of our own source, too
tables = st.lists(st.dictionaries(names, cells | st.lists(cells), max_size=4), max_size=5)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("history") / "h.jsonl"


@settings(deadline=None)
@given(tables)
def test_any_table_comes_back(file, table):
    rows = [{**cells, **COSTS, "round": number} for number, cells in enumerate(table)]
    file.write_bytes(encode_rows(rows))
    assert read_history(file).rows == rows


@settings(deadline=None)
@given(tables, st.data())
def test_a_file_that_ends_anywhere_keeps_its_whole_lines(file, table, data):
    """What a kill leaves: the first so many bytes."""
    rows = [{**cells, **COSTS, "round": number} for number, cells in enumerate(table)]
    content = b"".join(map(encode_row, rows))
    cut = data.draw(st.integers(0, len(content)))
    file.write_bytes(content[:cut])
    assert read_history(file).rows == rows[: content[:cut].count(b"\n")]


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60) | st.lists(st.sampled_from([b'{"round":0}', b"\n", b"[", b"\xff", b"0"])).map(b"".join))
def test_any_bytes_are_a_history_or_damaged(file, content):
    file.write_bytes(content)
    try:
        found = read_history(file)
    except ShoalError as error:
        assert error.kind.name == "damaged"
    else:
        assert [r["round"] for r in found.rows] == list(range(len(found)))


def test_a_history_is_written_without_what_json_does_not_know():
    with pytest.raises(ValueError):
        encode_row({"round": 0, "loss": nan})
    assert json.loads(encode_row(clear_nonfinite_values({"round": 0, "loss": nan})))["loss"] is None
