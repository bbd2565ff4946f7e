"""Real devices test on samples of their own: as in simulation, by numbers alone, and no score is trusted."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from federation import (
    BASE,
    DEVICES,
    InProcessTransport,
    history_rows,
    make_clients,
    make_recipe,
    play_with_devices,
    strip_judging,
)
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.core.errors import ShoalError
from shoal.remote import tree_bytes
from shoal.remote.messages import DeviceTestScore, RequestStamp, TrainRequest, decode_score_bytes, score_to_bytes
from shoal.runs.session import Result
from shoal.service.server_run import adapt_recipe_to_devices

OWN: dict[str, Any] = {"local_test": 0.25}
COLUMNS = ("personal_mean", "personal_pooled", "personal_worst", "personal_spread", "personal_loss", "personal_devices")
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"normalise": True},
    "fedper": {},
    "fedrep+topk(ratio=0.3)": {},
    "lgfedavg": {},
    "ditto+feddh": {},
    "apfl(adaptive=True)": {},
    "pfedme": {},
    "perfedavg": {},
    "fedala": {"rounds": 3},
    "fedas(average_head=True)": {"rounds": 3},
    "fedbabu(epochs=2)": {},
    "fedavg+finetune": {},
    "fedrod": {},
    "fedrod+fedap(at=1, rule='fixed')": {"model": "lenet", "server_data": "share:0.1", "rounds": 3},
}
FEW = ("fedavg", "fedrep+topk(ratio=0.3)", "fedas(average_head=True)", "fedbabu(epochs=2)", list(METHODS)[-1])


@pytest.mark.parametrize("method", [m if m in FEW else pytest.param(m, marks=pytest.mark.whole) for m in METHODS])
def test_devices_get_what_they_get_in_a_simulation(method, tmp_path):
    more = METHODS[method]
    simulated = shoal.run(method, engine="serial", out=str(tmp_path / "simulated"), **BASE | more | OWN)
    clients = make_clients(tmp_path, **more)
    real = play_with_devices(make_recipe(method, tmp_path / "run", **more | OWN), InProcessTransport(clients))
    assert strip_judging(history_rows(real)) == history_rows(simulated)
    assert all(real.history.rows[-1][name] is not None for name in COLUMNS)
    assert all(torch.equal(real.params[k], v) for k, v in simulated.params.items())
    notes = [json.loads((tmp_path / name / "devices.json").read_text()) for name in ("run", "simulated")]
    assert notes[0] == notes[1] and len(notes[0]["own_tests"]) == DEVICES


class Listens(InProcessTransport):
    """Keeps what travels for tests, and may change the scores on their way."""

    def __init__(self, clients, tamper=lambda device, round, reply: reply):
        super().__init__(clients)
        self.change, self.sent, self.scores = tamper, list[bytes](), list[bytes]()

    def exchange(self, requests, kind, timeout):
        for device, reply in super().exchange(requests, kind, timeout):
            if kind == "judge":
                assert isinstance(reply, bytes)
                self.sent.append(requests[device])
                self.scores.append(reply)
                reply = self.change(device, self.round, reply)
            yield device, reply


def test_four_numbers_of_a_device_travel_and_bytes_are_counted(tmp_path):
    transport = Listens(make_clients(tmp_path))
    row = play_with_devices(make_recipe("fedper", tmp_path / "run", **OWN), transport).history.rows[0]
    for reply in transport.scores:
        content = tree_bytes.tree_from_bytes(reply, 1 << 16)
        assert set(content) == {"stamp", "score"} and set(content["score"]) == {"sum", "count", "loss", "samples"}
        assert all(type(value) in (int, float) for value in content["score"].values())
    request = TrainRequest.from_bytes(transport.sent[0], 1 << 30)
    assert not any(name.startswith("fc2") for name in request.job.message.body), "a head is the device's own"
    assert row["bytes_by"]["down"]["judge"] == DEVICES * request.job.message.nbytes > 0
    assert row["bytes_by"]["up"]["judge"] == DEVICES * 32
    assert row["bytes_down"] == sum(row["bytes_by"]["down"].values())


def test_devices_are_asked_where_the_model_is_evaluated_and_only_those_of_the_round(tmp_path):
    more = {"rounds": 3, "eval_every": 2, "sample": 2}
    transport = Listens(make_clients(tmp_path))
    rows = play_with_devices(make_recipe("fedavg", tmp_path / "run", **more | OWN), transport).history.rows
    assert [row.get("personal_devices") for row in rows] == [None, 2, 2]
    asked = [TrainRequest.from_bytes(request, 1 << 30).stamp.device for request in transport.sent]
    assert sorted(asked[:2]) == sorted(rows[1]["devices"]) and sorted(asked[2:]) == sorted(rows[2]["devices"])
    assert "judge" not in rows[0]["bytes_by"]["down"]


def spoil_score(**fields: Any):
    """A tamper that changes the score of device 1."""

    def tamper(device: int, round: int, reply: bytes) -> bytes | str:
        if device != 1:
            return reply
        content = tree_bytes.tree_from_bytes(reply, 1 << 16)
        content["score"] |= fields
        return tree_bytes.tree_to_bytes(content)

    return tamper


SPOILT = {
    "late": lambda device, round, reply: "it was late" if device == 1 else reply,
    "cut": lambda device, round, reply: reply[:-3] if device == 1 else reply,
    "not a number": spoil_score(sum=float("nan")),
    "more samples than it can have": spoil_score(samples=10**6),
    "more targets than samples": spoil_score(count=10.0**6),
    "more hits than targets": spoil_score(sum=10.0**6),
    "less than nothing": spoil_score(sum=-5.0),
    "text": spoil_score(loss="patient 17"),
    "more": spoil_score(name="patient 17"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_device_that_does_not_answer_as_it_could_is_left_out(case, tmp_path):
    found = play_with_devices(
        make_recipe("fedavg", tmp_path / "run", rounds=1, **OWN), Listens(make_clients(tmp_path), SPOILT[case])
    )
    honest = play_with_devices(
        make_recipe("fedavg", tmp_path / "honest", rounds=1, **OWN), InProcessTransport(make_clients(tmp_path))
    )
    note, other = (json.loads((tmp_path / name / "devices.json").read_text()) for name in ("run", "honest"))
    assert note["tested"] == [0, 2] and note["own_tests"] == [other["own_tests"][0], other["own_tests"][2]]
    row = found.history.rows[0]
    assert row["personal_devices"] == 2 and row["personal_mean"] == pytest.approx(np.mean(note["own_tests"]))
    assert row["accuracy"] == honest.history.rows[0]["accuracy"] and "dropped" not in row


def test_a_server_that_stops_after_a_test_goes_on_from_its_checkpoint(tmp_path):
    """A test reads the newest memory of a device, and must not delete the one before it."""

    class Dies(InProcessTransport):
        def exchange(self, requests, kind, timeout):
            replies = list(super().exchange(requests, kind, timeout))
            if kind == "judge" and self.round == 2:
                raise KeyboardInterrupt
            yield from replies

    def play(name: str, transport: InProcessTransport) -> Result:
        return play_with_devices(make_recipe("fedper", tmp_path / name, rounds=4, **OWN), transport)

    whole = play("whole", InProcessTransport(make_clients(tmp_path)))
    other = tmp_path / "other"
    other.mkdir()
    clients = make_clients(other)
    with pytest.raises(ShoalError, match="Stopped after 2 rounds"):
        play("run", Dies(clients))
    assert history_rows(play("run", InProcessTransport(clients))) == history_rows(whole)


def test_halves_of_a_data_set_cannot_be_joined_where_devices_hold_their_own():
    with pytest.raises(ShoalError, match="hold all of their samples"):
        adapt_recipe_to_devices(shoal.Recipe().with_values(local_test=0.25, local_test_of="all"))


STAMP = RequestStamp("run", 3, 1, "nonce")
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=7), inner, max_size=4),
    max_leaves=6,
)


@given(TREES, st.sampled_from(["", "stamp", "score", "problem"]), st.binary(max_size=40))
def test_any_other_score_is_read_or_refused(content, key, noise):
    honest = score_to_bytes(STAMP, DeviceTestScore(3.0, 4.0, 1.5, 4))
    assert decode_score_bytes(honest, STAMP, 4, 1, 1.0) == DeviceTestScore(3.0, 4.0, 1.5, 4)
    tree = tree_bytes.tree_from_bytes(honest, 1 << 16) | {key: content} if key else content
    for payload in (tree_bytes.tree_to_bytes(tree), honest[: len(noise)], noise):
        try:
            decode_score_bytes(payload, STAMP, 4, 1, 1.0)
        except ShoalError as error:
            assert error.kind.name == "damaged"
