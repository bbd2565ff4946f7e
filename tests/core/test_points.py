"""What happens at each point of a round, seen on the tiny parts of `tiny_parts.py`."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_parts import (
    AskLoss,
    CutOnce,
    DropRows,
    ExtraLayer,
    FrozenHead,
    Half,
    HalfWidth,
    Histogram,
    KeepMask,
    Largest,
    LastTensors,
    Noise,
    OwnLoss,
    Remember,
    ServerJoins,
    Smoothed,
    Sparse,
    Twice,
)

from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.local.device import PERSONAL_KEY
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Cut
from shoal.core.part import Part
from shoal.core.types import SERVER, Outcome
from shoal.engines.serial import SerialEngine
from shoal.parts.fednh import FedNH
from shoal.parts.fedprox import FedProx
from shoal.parts.scaffold import Scaffold
from shoal.parts.selection import Uniform, Weighted
from shoal.plugins.smoke_run import build_tiny_run, smoke_test_part
from shoal.testing.hosts import RecordingHost
from shoal.testing.rounds import play_rounds

WEIGHTS = 4 * 3 + 3 + 3 * 2 + 2
"""Parameters of the tiny net: 4-3-2 with biases, eight bytes each."""


def played(*parts: Part, rounds: int = 2):
    """A tiny run with these parts: the loop, a spy on its engine, where it ended, its rows."""
    loop, net = build_tiny_run(compose(parts))
    spy = RecordingHost(loop.host)
    loop = replace(loop, host=spy)
    standing, rows = play_rounds(loop, loop.start(net), 0, rounds)
    return loop, spy, standing, rows


def test_a_model_may_grow_and_personal_tensors_stay_on_their_device():
    loop, spy, standing, rows = played(ExtraLayer())
    assert rows[0]["bytes_down"] == rows[0]["bytes_up"] == 2 * 8 * WEIGHTS
    assert all("scale.by" not in job.message.body for jobs in spy.jobs for job in jobs)
    assert standing.params["scale.by"].tolist() == [1.0, 1.0]
    kept = [loop.host.memory.get(d)[PERSONAL_KEY]["scale.by"] for d in (0, 1)]
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], torch.ones(2))


def test_server_tensors_are_sent_and_neither_trained_nor_combined():
    _, spy, standing, rows = played(FrozenHead())
    assert torch.equal(standing.params["b.weight"], standing.net.initial["b.weight"])
    assert rows[0]["bytes_down"] == 2 * 8 * WEIGHTS and rows[0]["bytes_up"] == 2 * 8 * (WEIGHTS - 8)


def test_enrolment_is_asked_once_and_counted_then():
    _, spy, standing, rows = played(Histogram(), rounds=3)
    assert [row["bytes_up"] - 2 * 8 * WEIGHTS for row in rows] == [2 * 2 * 4, 0, 0]
    assert set(standing.cards) == {0, 1} and int(standing.cards[0]["labels"].sum()) == 5


def test_a_plan_sends_and_trains_less_and_the_rest_keeps_its_value():
    loop, spy, standing, rows = played(HalfWidth(), rounds=1)
    # the plan itself travels down as one bit per unit
    assert rows[0]["bytes_down"] - 2 * 1 == rows[0]["bytes_up"] == 2 * 8 * (4 * 2 + 2 + 2 * 2 + 2)
    assert rows[0]["macs_forward"] == 4 * 2 + 2 * 2
    # device 0 drops unit 0, device 1 drops unit 1: unit 0 moves by device 1 alone, unit 2 by both
    replies = [o.message.body["a.bias"]["value"] for o in spy.outcomes[0] if o.message]
    moved = standing.params["a.bias"] - standing.net.initial["a.bias"]
    torch.testing.assert_close(
        moved, torch.stack([replies[1][0], replies[0][0], (5 * replies[0][1] + 3 * replies[1][1]) / 8])
    )


def test_an_element_mask_trains_every_other_weight():
    _, _, standing, rows = played(Sparse(), rounds=1)
    moved = (standing.params["a.weight"] != standing.net.initial["a.weight"]).flatten()
    assert not moved[1::2].any() and moved[::2].any()
    assert rows[0]["bytes_up"] == 2 * 8 * (WEIGHTS - 6)


def test_a_device_may_be_sent_less_than_it_trains():
    _, spy, _, rows = played(LastTensors())
    assert [row["bytes_down"] for row in rows] == [2 * 8 * WEIGHTS, 2 * 8 * 8]
    assert [row["bytes_up"] for row in rows] == [2 * 8 * WEIGHTS] * 2


def test_what_was_not_sent_starts_from_memory():
    loop, spy, standing, _ = played(LastTensors(), rounds=1)
    first = {o.device: o.message for o in spy.outcomes[0]}
    for device in (0, 1):
        message = first[device]
        assert message is not None
        assert tree.is_same_tree(
            loop.host.memory.get(device)["lasttensors"]["saved"]["a.weight"], message.body["a.weight"]["value"]
        )


def test_a_request_is_answered_only_when_made():
    _, spy, standing, rows = played(AskLoss(), rounds=3)
    assert [row["bytes_up"] - 2 * 8 * WEIGHTS for row in rows] == [8, 0, 8]
    assert [row["bytes_down"] - 2 * 8 * WEIGHTS for row in rows] == [2, 0, 2]
    assert len(standing.states["askloss"]["losses"]) == 4
    # the passes that the measurement makes are counted too
    assert rows[0]["macs_work"] == rows[1]["macs_work"] + 8 * (12 + 6)


def test_data_may_be_added():
    _, _, _, plain = played()
    _, _, _, double = played(Twice())
    assert double[0]["macs_work"] == 2 * plain[0]["macs_work"]


class BackwardsEngine(SerialEngine):
    """Trains the last device first."""

    def train(self, tasks):
        return super().train(tasks[::-1])[::-1]


def test_draws_do_not_depend_on_order_or_company():
    seen: dict[str, dict[int, list]] = {}

    @dataclass(frozen=True)
    class Watch(Part):
        label: str = ""

        def draw(self, generator, device, step):
            drawn = torch.rand(3, generator=generator)
            seen.setdefault(self.label, {}).setdefault(device.id, []).append(drawn.tolist())
            return {"x": drawn}

    for label, parts in (("alone", [Watch("alone")]), ("among", [Noise(), Watch("among"), Scaffold(), Largest()])):
        loop, net = build_tiny_run(compose(parts))
        if label == "among":
            loop.host.engine = BackwardsEngine()
        play_rounds(loop, loop.start(net), 0, 2)
    assert seen["alone"] == seen["among"] and len(seen["alone"][0]) == 2 * 3


def test_the_loss_can_be_replaced_and_its_part_is_innermost():
    for order in ([OwnLoss(), FedProx(mu=0.5)], [FedProx(mu=0.5), OwnLoss()]):
        assert [p.name() for p in compose(order).parts_at("objective")] == ["fedprox", "ownloss"]
    ends = [played(*order)[2].params for order in ([OwnLoss(), FedProx(mu=0.5)], [FedProx(mu=0.5), OwnLoss()])]
    assert tree.is_same_tree(*ends) and not tree.is_same_tree(ends[0], played(OwnLoss())[2].params)


def test_a_mask_in_a_state_holds_even_against_momentum():
    loop, net = build_tiny_run(compose([KeepMask()]), momentum=0.9)
    standing, _ = play_rounds(loop, loop.start(net), 0, 2)
    assert torch.equal(standing.params["a.weight"], net.initial["a.weight"])
    assert not torch.equal(standing.params["b.weight"], net.initial["b.weight"])


def test_rows_left_out_are_not_covered_in_either_direction():
    loop, spy, standing, rows = played(DropRows(), rounds=1)
    # of a (3 x 4) and b (2 x 3) the first row is missing, and one byte of mask comes along with each
    assert rows[0]["bytes_down"] == rows[0]["bytes_up"] == 2 * (8 * (WEIGHTS - 4 - 3) + 2)
    initial = standing.net.initial
    assert torch.equal(standing.params["a.weight"][0], initial["a.weight"][0])
    assert not torch.equal(standing.params["a.weight"][1], initial["a.weight"][1])
    assert standing.states["droprows"] == {"sent": 2}
    assert loop.host.memory.get(0)["droprows"] == {"sent": 1}


def test_a_sparsified_coordinate_is_covered_with_delta_zero():
    loop, spy, standing, _ = played(Largest(), rounds=1)
    # b.bias has two elements, each device sends one of them: the other counts as 0 in the mean
    sent = {o.device: o.message.body["b.bias"] for o in spy.outcomes[0] if o.message}
    expected = torch.zeros(2, dtype=torch.float64)
    for device, weight in ((0, 5 / 8), (1, 3 / 8)):
        expected[sent[device]["at"].long()] += weight * sent[device]["value"]
    torch.testing.assert_close(standing.params["b.bias"] - standing.net.initial["b.bias"], expected)


def test_what_was_not_sent_is_owed():
    loop, spy, _, _ = played(Largest(), rounds=1)
    plain_loop, plain_spy, _, _ = played(rounds=1)
    for device, (coded, plain) in enumerate(zip(spy.outcomes[0], plain_spy.outcomes[0])):
        assert coded.message and plain.message
        owed = loop.host.memory.get(device)["largest"]["owed"]
        for name, entry in coded.message.body.items():
            whole = owed[name].flatten().index_add(0, entry["at"].long(), entry["value"])
            torch.testing.assert_close(whole.view(owed[name].shape), plain.message.body[name]["value"])


def test_three_codecs_run_in_the_order_of_their_stages():
    method = compose([Half(), Largest(), DropRows()])
    assert [p.name() for p in method.codecs_for("up")] == ["droprows", "largest", "half"]
    assert [p.name() for p in method.codecs_for("down")] == ["droprows", "half"]
    _, spy, _, rows = played(Half(), Largest(), DropRows())
    entry = next(o.message.body["a.weight"] for o in spy.outcomes[0] if o.message)
    assert entry["value"].dtype == torch.float32 and entry["value"].shape == (4,) and entry["rows"].shape == (1,)


def test_codecs_follow_a_plan():
    loop, spy, standing, _ = played(HalfWidth(), Largest(), DropRows(), rounds=3)
    owed = loop.host.memory.get(0)["largest"]["owed"]
    assert {k: v.shape for k, v in owed.items()} == {k: v.shape for k, v in standing.params.items()}
    assert tree.is_tree_finite(standing.params)


def test_the_server_takes_part_at_no_cost_and_counts_only_if_a_part_says_so():
    @dataclass(frozen=True)
    class Joins(Part):
        def select(self, devices, state, round):
            return [*devices, SERVER], state

    _, _, quiet, quiet_rows = played(Joins())
    _, _, alone, alone_rows = played()
    _, _, loud, loud_rows = played(ServerJoins())
    assert tree.is_same_tree(quiet.params, alone.params) and not tree.is_same_tree(loud.params, alone.params)
    for column in ("bytes_down", "bytes_up", "macs_work", "sim_seconds"):
        assert [r[column] for r in quiet_rows] == [r[column] for r in alone_rows] == [r[column] for r in loud_rows]
    assert loud_rows[0]["devices"] == [0, 1, SERVER]


def test_a_server_without_data_cannot_take_part():
    loop, net = build_tiny_run(compose([ServerJoins()]))
    loop = replace(loop, server=None)
    with pytest.raises(ShoalError, match="no data"):
        play_rounds(loop, loop.start(net), 0, 1)


def test_pruning_shrinks_the_model_and_every_state_of_its_shape():
    loop, spy, standing, rows = played(CutOnce(), Remember(), Scaffold(), rounds=3)
    assert standing.params["a.weight"].shape == (2, 4) and standing.params["b.weight"].shape == (2, 2)
    assert standing.states["scaffold"]["c"]["b.weight"].shape == (2, 2)
    assert standing.states["cutonce"]["like"]["a.bias"].shape == (2,)
    assert standing.states["cutonce"]["units"]["a"].tolist() == [0, 1]
    assert loop.host.memory.get(0)["remember"]["last"]["a.weight"].shape == (2, 4)
    assert rows[0]["bytes_down"] == 2 * 2 * 8 * WEIGHTS and rows[1]["bytes_down"] == 2 * 2 * 8 * 16
    assert rows[0]["macs_forward"] == 18 and rows[1]["macs_forward"] == 12
    linear = standing.net.module.get_submodule("a")
    assert (linear.in_features, linear.out_features) == (4, 2)


def test_a_memory_on_disk_is_cut_when_it_is_next_read():
    loop, net = build_tiny_run(compose([CutOnce(at=1), Remember()]))
    loop.host.memory.limit = 0
    standing, _ = play_rounds(loop, loop.start(net), 0, 2)
    assert not loop.host.memory.held or len(loop.host.memory.held) == 1
    assert loop.host.memory.get(0)["remember"]["last"]["a.weight"].shape == (2, 4)


def test_the_judged_model_may_differ_from_the_one_that_is_broadcast():
    loop, _, standing, rows = played(Smoothed())
    before = played(Smoothed(), rounds=1)[2].params
    final = loop.make_final_params(standing, 2)
    torch.testing.assert_close(final["a.bias"], (standing.params["a.bias"] + before["a.bias"]) / 2)
    assert rows[0]["loss"] != rows[0]["loss_newest"] and "accuracy_newest" in rows[0]


def test_two_owners_setters_losses_and_stages_are_refused():
    @dataclass(frozen=True)
    class Other(Part):
        stage: ClassVar = "rows"
        replaces_loss: ClassVar = True
        sets: ClassVar = frozenset({"plan", "weigh"})
        carries: ClassVar = "values"

        def combine(self, replies, state, round):
            return round.anchor, state

    from shoal.parts.feddyn import FedDyn
    from shoal.parts.median import Median

    for one, word in ((Median(), "combined"), (OwnLoss(), "loss"), (HalfWidth(), "model"), (FedDyn(), "weights")):
        with pytest.raises(ShoalError, match=word) as error:
            compose([one, Other()])
        assert error.value.kind.name == "clash" and "other" in str(error.value) and one.name() in str(error.value)
    with pytest.raises(ShoalError, match="same stage"):
        compose([DropRows(), Other()])
    with pytest.raises(ShoalError, match="differences"):
        compose([LastTensors(), Largest()])
    with pytest.raises(ShoalError, match="take part"):
        compose([Uniform(), Weighted()])
    with pytest.raises(ShoalError, match="listed twice"):
        compose([FedProx(), FedProx(mu=1.0)])


def test_a_selection_of_nobody_or_strangers_is_refused():
    @dataclass(frozen=True)
    class Picks(Part):
        which: str = ""

        def select(self, devices, state, round):
            return [int(w) for w in self.which.split()], state

    for which in ("7", "0 0", "-5"):
        loop, net = build_tiny_run(compose([Picks(which)]))
        with pytest.raises(ShoalError, match="selection"):
            play_rounds(loop, loop.start(net), 0, 1)
    loop, net = build_tiny_run(compose([Picks("")]))
    standing, [row] = play_rounds(loop, loop.start(net), 0, 1)
    assert row["void"] and tree.is_same_tree(standing.params, net.initial)


def test_weights_that_are_no_weights_are_refused():
    @dataclass(frozen=True)
    class Weighs(Part):
        kind: str = ""

        def weigh(self, weights, state, round):
            made: dict[str, Any] = {"nan": weights * np.nan, "negative": -weights, "short": weights[:1]}
            return made[self.kind], state

    for kind in ("nan", "negative", "short"):
        loop, net = build_tiny_run(compose([Weighs(kind)]))
        with pytest.raises(ShoalError, match="weights"):
            play_rounds(loop, loop.start(net), 0, 1)


def test_a_device_that_fails_is_named_and_the_rest_goes_on():
    loop, net = build_tiny_run(compose([]))
    spy = RecordingHost(loop.host, lambda outcomes: [Outcome(0, problem="its battery is empty"), *outcomes[1:]])
    standing, [row] = play_rounds(replace(loop, host=spy), loop.start(net), 0, 1)
    assert row["dropped"] == [{"device": 0, "why": "its battery is empty"}]
    assert not tree.is_same_tree(standing.params, net.initial)


def test_taps_show_what_was_asked_for():
    seen = []

    @dataclass(frozen=True)
    class Looks(Part):
        def taps(self, net):
            return tuple(name for name, _ in net.module.named_children() if name != "b")

        def step(self, update, state, scored, local):
            seen.append((scored.taps, scored.features))
            return update, state

    loop, net = build_tiny_run(compose([Looks()]))
    play_rounds(loop, loop.start(net), 0, 1)
    taps, features = seen[0]
    assert set(taps) == {"a", "relu"} and taps["a"].shape == (2, 3)
    assert torch.equal(taps["a"].clamp(min=0), taps["relu"]) and torch.equal(taps["relu"], features)


def test_a_model_that_is_not_finite_is_never_taken():
    @dataclass(frozen=True)
    class Explodes(Part):
        def init_server(self, round):
            return {"rounds": 0}

        def serve(self, params, state, round):
            return {k: v / 0 for k, v in params.items()}, {"rounds": state["rounds"] + 1}

    _, _, standing, rows = played(Explodes())
    assert tree.is_same_tree(standing.params, standing.net.initial) and all(row["void"] for row in rows)
    assert standing.states["explodes"] == {"rounds": 0}


def test_cards_are_asked_for_in_one_go():
    asked = []

    @dataclass(frozen=True)
    class Asks(Part):
        def select(self, devices, state, round):
            assert round.roster.fetch_cards([0, 1]) == round.roster.fetch_cards([0, 1])
            return devices, state

    loop, net = build_tiny_run(compose([Asks()]))
    spy = RecordingHost(loop.host)
    spy.enrol = lambda devices, inner=spy.inner: (asked.append(list(devices)), inner.enrol(devices))[1]
    play_rounds(replace(loop, host=spy), loop.start(net), 0, 2)
    assert asked == [[0, 1]]


def test_enrolment_before_the_first_round_is_counted_in_it():
    @dataclass(frozen=True)
    class AsksEarly(Part):
        def enrol(self, card, samples, net):
            return card | {"size": torch.tensor(len(samples))}

        def init_server(self, round):
            return {"sizes": [int(round.roster[d]["size"]) for d in (0, 1)]}

    _, _, standing, rows = played(AsksEarly())
    assert [row["bytes_up"] - 2 * 8 * WEIGHTS for row in rows] == [2 * 8, 0]
    assert standing.states["asksearly"] == {"sizes": [5, 3]}


def test_a_void_round_leaves_no_memory():
    @dataclass(frozen=True)
    class ExplodesAt(Part):
        at: int = 1

        def serve(self, params, state, round):
            return {k: v / 0 if round.number == self.at else v for k, v in params.items()}, state

    loop, _, _, rows = played(Remember(), ExplodesAt(), rounds=3)
    assert [bool(row.get("void")) for row in rows] == [False, True, False]
    assert loop.host.memory.get(0)["remember"]["visits"] == 2


def test_what_lies_beside_may_be_nested():
    @dataclass(frozen=True)
    class Nested(Part):
        def send(self, state, round):
            return {d: {"deep": {"c": dict(round.anchor), "n": torch.ones(3)}} for d in round.devices}, state

        def measure(self, params, state, device):
            assert device.got["deep"]["c"]["a.weight"].shape == (3, 4)
            return {"deep": {"n": device.got["deep"]["n"] * 2, "c": device.got["deep"]["c"]}}

    _, _, _, rows = played(Nested(), HalfWidth())
    assert rows[0]["bytes_up"] == 2 * (2 * 8 * 16 + 12)


def test_claims_that_the_loop_does_not_know_are_refused():
    @dataclass(frozen=True)
    class NoStage(Part):
        def encode(self, message, memory, link):
            return message, memory

    @dataclass(frozen=True)
    class OddStage(Part):
        stage: ClassVar = "squash"

    @dataclass(frozen=True)
    class OddSets(Part):
        sets: ClassVar = frozenset({"wiegh"})

    for part, word in ((NoStage(), "stage"), (OddStage(), "stage"), (OddSets(), "sets")):
        with pytest.raises(ShoalError, match=word) as error:
            compose([part])
        assert error.value.kind.name == "bad-part"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"roles": {"b.bias": "presonal"}}, "'b.bias' has the role 'presonal'.* Did you mean 'personal'"),
        ({"roles": {"b.bais": "personal"}}, "'b.bais'.* Did you mean 'b.bias'"),
        ({"axes": (Axis("a", 3, (Cut("a.wieght", 0),)),)}, "'a' cuts the tensor 'a.wieght'.* Did you mean 'a.weight'"),
        ({"rows": (Axis("b:output", 2, (Cut("c.weight", 0),)),)}, "'b:output' cuts the tensor 'c.weight'"),
        ({"head": "c"}, "head is the layer 'c'.* Known are '', 'a', 'relu', 'b'"),
    ],
)
def test_a_part_that_misspells_a_role_or_a_tensor_is_refused(changes, says):
    @dataclass(frozen=True)
    class Misspelt(Part):
        def model(self, net: Net) -> Net:
            return replace(net, **changes)

    for use in (lambda: smoke_test_part(Misspelt()), lambda: played(Misspelt())):
        with pytest.raises(ShoalError, match=says) as error:
            use()
        assert error.value.kind.name == "bad-part"


def test_roles_of_a_last_layer_go_when_the_layer_goes():
    _, net = build_tiny_run(compose([FrozenHead(), FedNH()]))
    assert dict(net.roles) == {"b.prototypes.weight": "server", "b.read": "personal"}
