"""Numbers that parts tell: what counts, what is refused, and what is known of them elsewhere."""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.metric import (
    ASKED,
    COLUMNS,
    METRICS,
    Metric,
    decode_metrics,
    encode_metrics,
    find_metric,
    list_part_metrics,
    list_run_metrics,
)
from shoal.core.part import Part
from shoal.core.telling import Telling
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.hosts import RecordingHost
from shoal.testing.laws import check_part
from shoal.testing.rounds import play_rounds


@dataclass(frozen=True)
class Counts(Part):
    """Tells at every point of the server how often it was there in this pass, and reports a number from devices."""

    metrics: ClassVar = (
        Metric("passes", "passes", total="sum"),
        Metric("order", "order", when="now and then"),
        Metric("size", "size", over="max"),
        Metric("evaluations", "evaluations"),
    )

    def count(self, name, round):
        round.tell(name, round.telling.numbers.get(f"counts.{name}", 0) + 1)
        round.log("one text")

    def select(self, devices, state, round):
        self.count("passes", round)
        return devices, state

    def plan(self, plans, state, round):
        self.count("passes", round)
        return plans, state

    def send(self, state, round):
        self.count("passes", round)
        return {}, state

    def measure(self, params, state, device):
        return {"size": torch.tensor(float(len(device.samples)))}

    def weigh(self, weights, state, round):
        self.count("passes", round)
        return weights, state

    def serve(self, params, state, round):
        self.count("passes", round)
        round.tell("order", torch.tensor(2.5))
        return params, state

    def prune(self, plan, state, round):
        self.count("passes", round)
        return plan, state

    def evaluate(self, judged, state, round):
        self.count("evaluations", round)
        return judged


def test_every_point_of_the_server_can_tell():
    loop, net = build_tiny_run(compose([Counts()]), (5, 3))
    _, rows = play_rounds(loop, loop.start(net), 0, 2)
    for row in rows:
        told = {name: value for name, value in row.items() if name.startswith("counts.")}
        assert told == {"counts.passes": 6, "counts.order": 2.5, "counts.size": 5.0, "counts.evaluations": 1}
        assert row["log"] == [["counts", "one text"]]


@dataclass(frozen=True)
class Fails(Part):
    """Cannot use the reply of device 0."""

    def serve(self, params, state, round):
        if any(reply.device == 0 for reply in round.replies):
            raise ValueError("not that one")
        return params, state


def test_a_pass_without_culprits_counts_alone():
    loop, net = build_tiny_run(compose([Counts(), Fails()]), (5, 3, 4, 2))
    _, (row,) = play_rounds(loop, loop.start(net), 0, 1)
    assert [gone["device"] for gone in row["dropped"]] == [0]
    assert row["counts.passes"] == 6 and row["counts.evaluations"] == 1
    assert row["counts.size"] == 4, "the reply that was left out has the largest"


@dataclass(frozen=True)
class Spoils(Part):
    def serve(self, params, state, round):
        return {k: v * torch.nan for k, v in params.items()}, state


def test_a_void_round_keeps_what_was_told_before_training():
    loop, net = build_tiny_run(compose([Counts(), Spoils()]), (5, 3))
    _, (row,) = play_rounds(loop, loop.start(net), 0, 1)
    assert row["void"] and row["counts.passes"] == 3 and row["counts.evaluations"] == 1
    assert "counts.size" not in row and "counts.order" not in row


@dataclass(frozen=True)
class Asks(Part):
    """Wants the cards of its cohort when much has been told already."""

    def enrol(self, card, samples, net):
        return card | {"x": torch.zeros(1)}

    def send(self, state, round):
        round.roster.fetch_cards(round.devices)
        return {}, state


class DeviceOneIsSilent(RecordingHost):
    def enrol(self, devices):
        return {device: card for device, card in super().enrol(devices).items() if device != 1}


def test_what_was_told_in_an_opening_that_is_repeated_is_not_doubled():
    loop, net = build_tiny_run(compose([Counts(), Asks()]), (5, 3, 4))
    loop = replace(loop, host=DeviceOneIsSilent(loop.host))
    _, (row,) = play_rounds(loop, loop.start(net), 0, 1)
    assert row["devices"] == [0, 2] and row["counts.passes"] == 6


class Untrusted(RecordingHost):
    is_untrusted = True  # pyright: ignore


def test_a_rehearsal_of_the_next_round_leaves_no_trace():
    loop, net = build_tiny_run(compose([Counts()]), (5, 3))
    _, rows = play_rounds(replace(loop, host=Untrusted(loop.host)), loop.start(net), 0, 2)
    assert [(row["counts.passes"], row["counts.evaluations"]) for row in rows] == [(6, 1), (6, 1)]


def test_what_is_told_before_the_first_round_is_in_no_row():
    @dataclass(frozen=True)
    class Early(Part):
        metrics: ClassVar = (Metric("x", "x", when="never"),)

        def init_server(self, round):
            round.tell("x", 1)
            return {}

    loop, net = build_tiny_run(compose([Early()]), (5, 3))
    _, rows = play_rounds(loop, loop.start(net), 0, 1)
    assert "early.x" not in rows[0]


# refusals -------------------------------------------------------------------------------------------------------------
def test_a_name_that_is_not_declared_is_refused_in_one_sentence():
    with pytest.raises(ShoalError) as error:
        Telling({}).add_number("damp", "shar", 1.0)
    assert error.value.problem == "The part damp tells 'shar', which is not among its `metrics`."


@pytest.mark.parametrize("value", [None, "1", True, [1.0], torch.zeros(2)])
def test_only_single_numbers_are_told(value):
    with pytest.raises(ShoalError, match="no single number"):
        Telling().add_number("damp", "x", value)


def test_what_is_not_finite_is_null():
    telling = Telling()
    telling.add_number("damp", "x", torch.tensor(torch.inf))
    telling.add_number("damp", "y", 2)
    assert telling.make_row([]) == {"damp.x": None, "damp.y": 2}


@pytest.mark.parametrize("field", ["unit", "better", "total", "over"])
def test_words_that_mean_nothing_are_refused(field):
    with pytest.raises(ShoalError, match=f"has {field} = 'often', which means nothing"):
        Metric("x", "x", **dict[str, Any]({field: "often"}))


# the registry ---------------------------------------------------------------------------------------------------------
def test_a_registry_comes_back_from_json():
    registry = list_run_metrics(compose([Counts()]), ["top3", "mine.py:own"])
    assert set(registry) == {*METRICS, "own", *(f"counts.{m.name}" for m in Counts.metrics)}
    assert decode_metrics(json.loads(json.dumps(encode_metrics(registry)))) == registry
    assert registry["counts.size"].title == "counts: size" and registry["own"].drawn


@pytest.mark.parametrize(
    "note",
    [{"a.b": 3}, {"a.b": {}}, {"a.b": {"name": "a.c", "title": "t"}}, {"a.b": {"name": "a.b", "title": 3}}]
    + [{"a.b": {"name": "a.b", "title": "t", "drawn": "yes"}}, {"a.b": {"name": "a.b", "title": "t", "unit": "miles"}}],
)
def test_a_damaged_registry_is_refused(note):
    with pytest.raises(ValueError):
        decode_metrics(note)


def test_fields_of_a_later_version_are_let_be():
    fields = encode_metrics(list_part_metrics(compose([Counts()])))["counts.size"] | {"colour": "red"}
    assert decode_metrics({"counts.size": fields})["counts.size"].over == "max"


def test_columns_of_further_models_are_known_by_those_of_the_first():
    assert find_metric("accuracy_newest", METRICS) is METRICS["accuracy"]
    assert find_metric("bytes_down_by_blocks", METRICS) is METRICS["bytes_down_by_blocks"]
    assert find_metric("elephants", METRICS) is None


def test_every_column_is_explained_and_none_twice():
    assert not METRICS.keys() & COLUMNS.keys()
    assert all(known.about for known in (*METRICS.values(), *COLUMNS.values()))
    known = {"top3", "perplexity", "devices", "local", "class_kl", "per_class", "confusion", "log_loss"}
    library = {"balanced_accuracy", "f1_macro", "f1_micro", "auroc", "average_precision", "calibration_error"}
    assert set(ASKED) == known | library | {"rmse", "r2"}


# on devices -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Weighs(Part):
    """Tells at `begin`, `end` and `measure` of devices."""

    metrics: ClassVar = (
        Metric("samples", "samples", over="sum", on_device=True, when="at the interval"),
        Metric("largest", "largest", over="max", on_device=True, when="at the interval"),
        Metric("mean", "mean", on_device=True, when="at the interval"),
        Metric("odd", "odd", on_device=True, when="where it is finite"),
    )

    def begin(self, params, memory, device):
        device.tell("samples", len(device.samples))
        return params, {}

    def end(self, params, state, memory, device):
        device.tell("largest", torch.tensor(float(device.id)))
        return params, memory

    def measure(self, params, state, device):
        device.tell("mean", device.id)
        device.tell("odd", torch.nan if device.id else 7.0)
        return {}


def test_devices_tell_at_the_interval_and_their_numbers_are_reduced():
    loop, net = build_tiny_run(compose([Weighs()]), (5, 3, 1))
    _, rows = play_rounds(replace(loop, tell_every=2), loop.start(net), 0, 2)
    assert not any(name.startswith("weighs.") for name in rows[0]) and rows[0]["bytes_by"]["up"].keys() == {"model"}
    told = {name: value for name, value in rows[1].items() if name.startswith("weighs.")}
    assert told == {"weighs.samples": 9, "weighs.largest": 2, "weighs.mean": 1, "weighs.odd": 7}
    assert rows[1]["bytes_by"]["up"]["told"] == 3 * 3 * 4 + 4 and rows[1]["bytes_by"]["down"]["told"] == 3


def test_what_devices_tell_keeps_the_laws():
    check_part(Weighs(), whole=False)


@dataclass(frozen=True)
class Whispers(Part):
    """Asks for one number, and tells another."""

    metrics: ClassVar = (Metric("one", "one", on_device=True, when="never"),)

    def end(self, params, state, memory, device):
        device.tell("two", 2.0)
        return params, memory


def test_a_device_may_tell_only_what_is_declared():
    loop, net = build_tiny_run(compose([Whispers()]), (5, 3))
    with pytest.raises(ShoalError, match="tells 'two' on a device, and has no metric of that name"):
        play_rounds(loop, loop.start(net), 0, 1)
