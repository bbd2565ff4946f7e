"""Server and devices of unlike versions: who does not know all that a run uses refuses, and never trains otherwise."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from federation import BASE, InProcessTransport, make_clients, make_recipe, play_with_devices
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ShoalError
from shoal.core.part import POINTS
from shoal.parts import PRESETS, find_shipped_parts
from shoal.plugins.load import load_method
from shoal.remote import messages
from shoal.remote.messages import DEVICE_PROBLEMS, RequestStamp, TrainRequest, problem_to_bytes, read_stamped_reply
from shoal.remote.tree_bytes import tree_from_bytes, tree_to_bytes
from shoal.runs.recipe import Recipe
from shoal.service import client, run_compatibility
from shoal.service.run_compatibility import (
    DEVICE_POINTS,
    describe_device_parts,
    refuse_other_parts,
    refuse_unknown_keys,
)
from shoal.service.run_description import KNOWN_KEYS, LATER_SETUP_KEYS, SETUP_KEYS
from shoal.service.server_run import describe_run_for_devices

UNKNOWN = DEVICE_PROBLEMS["unknown"]
KEPT_BY_SERVER = frozenset(
    # where data come from, whose they are, what a device gets of them: a device has its own
    "data data_dir label owner order missing text_length split server_data devices parts normalise normalise_by init "
    # what travels with every job, as its work
    "sample rounds epochs steps lr lr_decay lr_schedule lr_warmup "
    # what is judged and kept, and where it is computed
    "eval_every metrics validation stratify_validation evaluate_test local_test_of headline target until_accuracy "
    "patience until_seconds until_bytes until_macs engine width address compute threads deterministic fleet failures "
    "deadline over_select checkpoint_every keep_best memory_mb out".split()
)
"""Recipe keys that no device needs by themselves."""


def test_every_recipe_key_is_sent_or_is_of_no_concern_to_devices():
    """A new key must be put into one of the two lists: a device that is not sent it trains as if it were not set."""
    sent = {*SETUP_KEYS, *LATER_SETUP_KEYS}
    assert {f.name for f in fields(Recipe)} == sent | KEPT_BY_SERVER and not sent & KEPT_BY_SERVER


@given(st.text(max_size=12), st.none() | st.booleans() | st.integers() | st.text(max_size=5))
def test_a_key_that_a_device_does_not_know_is_refused(key, value):
    if key not in KNOWN_KEYS:
        with pytest.raises(ShoalError, match="does not know") as refusal:
            refuse_unknown_keys({"seed": 1, key: value}, KNOWN_KEYS)
        assert client.get_reason_code(refusal.value) == "unknown"


OTHER_VALUES: dict[str, Any] = {
    "optimiser": "adam", "nesterov": True, "beta1": 0.5, "beta2": 0.5, "eps": 0.1, "local_lr_schedule": "cosine",
    "local_lr_warmup": 2, "accumulate": 2, "lr_groups": "fc1*=0.5", "label_smoothing": 0.1, "focal": 1.0,
    "class_weights": ",".join(["1.0", "2.0"] * 5), "gradient_checkpointing": True, "local_test": 0.25,
}  # fmt: skip
"""For every later key another value than that which means that it is not there."""


@pytest.mark.parametrize("key", [k for k in LATER_SETUP_KEYS if k not in ("batch", "task", "loss")])
def test_a_key_is_sent_where_it_is_set_and_refused_by_whoever_does_not_know_it(key):
    values = dict[str, Any](BASE | {"sample": 3, "momentum": 0.5 if key == "nesterov" else 0.0})
    assert key not in describe_run_for_devices(Recipe().with_values(**values), "")
    described = describe_run_for_devices(Recipe().with_values(**values | {key: OTHER_VALUES[key]}), "")
    assert key in described
    with pytest.raises(ShoalError, match=f"'{key}'"):
        refuse_unknown_keys(described, KNOWN_KEYS - {key})


def test_a_device_of_an_earlier_version_takes_part_where_nothing_new_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "KNOWN_KEYS", KNOWN_KEYS - {"optimiser", "label_smoothing"})
    clients = make_clients(tmp_path)
    play_with_devices(make_recipe("fedavg", tmp_path / "old", rounds=1), InProcessTransport(clients))
    with pytest.raises(ShoalError, match="No device came"):
        recipe = make_recipe("fedavg", tmp_path / "new", rounds=1, optimiser="adam", lr=0.01)
        play_with_devices(recipe, InProcessTransport(clients))


def test_a_device_that_became_older_during_a_run_is_left_out_and_said_so(tmp_path, monkeypatch):
    class Downgrades(InProcessTransport):
        def exchange(self, requests, kind, timeout):
            for device, request in requests.items():
                known = KNOWN_KEYS - {"focal"} if device == 1 and kind == "train" else KNOWN_KEYS
                monkeypatch.setattr(client, "KNOWN_KEYS", known)
                yield from super().exchange({device: request}, kind, timeout)

    recipe = make_recipe("fedavg", tmp_path / "run", rounds=1, focal=1.0)
    found = play_with_devices(recipe, Downgrades(make_clients(tmp_path)))
    assert found.history.rows[0]["dropped"] == [{"device": 1, "why": UNKNOWN}]


def test_a_method_or_a_value_that_a_device_does_not_know_is_refused(tmp_path):
    [device] = make_clients(tmp_path)[:1]
    described = describe_run_for_devices(Recipe().with_values(**BASE), "")
    for other in ({"method": "fedfuture"}, {"method": "fedprox(mu=0.1, nu=2)"}, {"optimiser": "lion"}, {"later": 1}):
        request = {"stamp": RequestStamp("r", -1, 0, "n").to_dict(), "setup": described | other}
        reply = tree_from_bytes(device.answer_request(tree_to_bytes(request), "enrol"), 1 << 20)
        assert reply["problem"] == "unknown", other


# parts ----------------------------------------------------------------------------------------------------------------
def test_a_part_with_another_option_point_or_claim_is_another_part():
    told = {"device_parts": describe_device_parts(load_method("fedprox(mu=0.2)+topk(ratio=0.5)"))}
    refuse_other_parts(told, load_method("fedprox(mu=0.2)+topk(ratio=0.5)"))
    refuse_other_parts({}, load_method("fedprox"))  # of a server of a former version
    for name, change in (
        ("fedprox", {"options": {"mu": "0.2", "nu": "0.0"}}),
        ("fedprox", {"options": {"mu": "0.3"}}),
        ("fedprox", {"points": ["objective", "of later versions"]}),
        ("topk", {"claims": {"of_later_versions": "True"}}),
    ):
        own = told["device_parts"]
        with pytest.raises(ShoalError, match=f"The part {name} is another one"):
            other = {"device_parts": own | {name: own[name] | change}}
            refuse_other_parts(other, load_method("fedprox(mu=0.2)+topk(ratio=0.5)"))
    for missing in ({}, {"fedprox": told["device_parts"]["fedprox"]}, 7):
        with pytest.raises(ShoalError, match="is another one on the server"):
            refuse_other_parts({"device_parts": missing}, load_method("fedprox(mu=0.2)+topk(ratio=0.5)"))


@pytest.mark.parametrize("name", sorted(find_shipped_parts()))
def test_every_part_is_the_same_to_itself_after_a_journey(name):
    try:
        method = load_method(name)
    except ShoalError:
        pytest.skip("it has options without defaults")
    described = tree_from_bytes(tree_to_bytes({"device_parts": describe_device_parts(method)}), 1 << 20)
    refuse_other_parts(described, method)
    acts = any(part.acts_at(point) for part in method.parts for point in DEVICE_POINTS)
    assert not acts or described["device_parts"]


def test_presets_are_told_as_the_parts_that_they_stand_for():
    """What a preset stands for may be another method in another version."""
    for name in PRESETS:
        assert describe_device_parts(load_method(name)).keys() <= {p.name() for p in load_method(name).parts}


def test_points_of_devices_are_all_but_those_of_the_server():
    on_server = set("select plan send sift weigh combine serve prune observe evaluate".split())
    assert set(DEVICE_POINTS) == set(POINTS) - on_server
    assert "keeps_slots" in run_compatibility.PART_CLAIMS and "cite" not in run_compatibility.PART_CLAIMS


# messages -------------------------------------------------------------------------------------------------------------
@given(st.sampled_from(["", "job", "plan", "cut", "work"]), st.text(min_size=1, max_size=8))
def test_a_request_with_something_unknown_is_refused(where, key):
    plan = messages.Plan({"a": torch.arange(3)})
    job = messages.Job(1, 3, plan, messages.Message({}), messages.Work(1.0, 0, 16, 0.1))
    request = TrainRequest(RequestStamp("run", 3, 1, "n"), {"seed": 1}, job, (plan,), None, 5.0)
    content = tree_from_bytes(request.to_bytes(), 1 << 20)
    assert isinstance(content, dict)
    spoilt = {"": content, "job": content["job"], "plan": content["job"]["plan"]}
    spoilt |= {"cut": content["cuts"][0], "work": content["job"]["work"]}
    if key not in spoilt[where]:
        spoilt[where][key] = 1
        with pytest.raises(ShoalError):
            TrainRequest.from_bytes(tree_to_bytes(content), 1 << 20)


def test_a_device_that_is_too_old_for_a_request_is_not_said_to_answer_another_one(tmp_path, monkeypatch):
    """One of version 2 refuses the stamp of version 3, and sends back one of its own."""
    [device] = make_clients(tmp_path)[:1]
    stamp = RequestStamp("r", -1, 0, "n")
    request = tree_to_bytes({"stamp": stamp.to_dict(), "setup": {}})
    monkeypatch.setattr(messages, "MESSAGE_VERSION", stamp.version - 1)
    reply = device.answer_request(request, "enrol")
    monkeypatch.undo()
    for answer in (reply, problem_to_bytes(RequestStamp("unknown", -1, -1, "unknown", 2), "unread")):
        with pytest.raises(ShoalError, match="its shoal is older"):
            read_stamped_reply(answer, stamp, 1 << 16)
