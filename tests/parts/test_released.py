"""Parts that do what released code does: feddh_released, fedad_released and serverm_released, by hand."""

from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal
from shoal.core.batch import BatchScore
from shoal.core.compose import Method
from shoal.core.model.plan import Plan
from shoal.core.server_state import EnrolmentRegister
from shoal.core.types import Local, Outcome, Reply, Round
from shoal.models import build_model
from shoal.parts.fedad_released import FedADReleased
from shoal.parts.feddh_released import FedDHReleased, compute_raw_steps, scale_to_unit_range, sum_matrix_product
from shoal.parts.lib.dropout_rates import compute_rates_by_samples, compute_softmax_rates, scale_kept_units
from shoal.parts.lib.submodel_units import device_state_key
from shoal.parts.lib.unit_scores import sum_adjacent_weights
from shoal.parts.serverm_released import ServerMReleased
from shoal.plugins.smoke_run import build_tiny_run

SIZES = (6, 3, 5)
HISTOGRAMS = ((6, 0, 0), (1, 1, 1), (0, 4, 1))


def make_round(part: Any = None, number: int = 0) -> Round:
    """Replies of three devices with random changes to the tiny net, and gradients that the part has reported."""
    loop, net = build_tiny_run(Method() if part is None else Method((part,)), SIZES)
    round = loop.make_round(loop.start(net), 0, EnrolmentRegister({}, loop.host.enrol))
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        return {k: torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in net.initial.items()}

    replies = [
        Reply(d, SIZES[d], draw(), {}, {"feddh_released": {"gradient": draw()}}, Outcome(d, steps=2)) for d in range(3)
    ]
    weights = torch.tensor([n / sum(SIZES) for n in SIZES], dtype=torch.float64)
    return replace(round, replies=replies, weights=weights, number=number, part="feddh_released")


# feddh_released -------------------------------------------------------------------------------------------------------
def test_the_product_of_the_code_is_no_inner_product():
    generator = torch.Generator().manual_seed(1)
    for shape in ((3, 5), (4, 2, 3, 3)):
        w, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        wanted = torch.matmul(w, g.T if w.dim() == 2 else g).sum()
        assert float(sum_matrix_product(w, g)) == pytest.approx(float(wanted))
    w, g = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert float(sum_matrix_product(w, g)) == 13.0
    assert float(sum_matrix_product(torch.ones(2, 1, 2, 3), torch.ones(2, 1, 2, 3))) == 12.0


def test_raw_steps_by_hand():
    """n / D = 4 and 16. The normalisers are (20 x 0.5)^2 = 100 and (20 x 0.25)^2 = 25.

    First device: -3 x 16 x 2 / 100 = -0.96, / 100, + 5 x 2 x 16, / 100. Second: -5 x 4 x 4 / 25 = -3.2, + 3 x 4 x 4,
    / 25, / 25.
    """
    found = compute_raw_steps([3.0, 5.0], [2.0, 4.0], [0.5, 0.25], [1.0, 1.0])
    assert found == pytest.approx([(160 - 0.0096) / 100, 44.8 / 625])
    assert compute_raw_steps([3.0, 5.0], [2.0, 4.0], [0.5, 0.25], [2.0, 1.0])[0] == pytest.approx(2 * found[0])


def test_scaled_steps_lie_between_0_and_1():
    assert scale_to_unit_range([3.0, -1.0, 1.0]) == [1.0, 0.0, 0.5]
    assert scale_to_unit_range([2.0, 2.0]) == scale_to_unit_range([float("nan"), 1.0]) == [0.0, 0.0]
    assert scale_to_unit_range([7.0]) == [0.0]


def test_one_device_moves_by_the_whole_rate_and_one_not_at_all():
    """In round 2 the rates have been multiplied by 0.5, 0.5 and 0.25 of 1, that is by 0.5^(2 x 3 / 2)."""
    part = FedDHReleased(lr_v=0.1, decay_v=0.5, lr_b=0.2, decay_b=1.0)
    known = {device_state_key(d): torch.tensor(own, dtype=torch.float64) for d, own in enumerate(HISTOGRAMS)}
    _, state = part.serve({}, {"labels": known, "control": {}}, make_round(part, number=2))
    v, b = zip(*(state["control"][device_state_key(d)] for d in range(3)))
    assert sorted(v)[0] == pytest.approx(1 - 0.1 * 0.5**3) and sorted(v)[-1] == 1.0
    assert sorted(b)[0] == 0.0 and sorted(b)[-1] == pytest.approx(0.2), "b can only leave 0 upwards"
    _, again = part.serve({}, state, make_round(part, number=3))
    assert again["control"] != state["control"]


def test_weights_are_those_of_the_paper_at_the_start():
    released, paper = (
        shoal.run(m, rounds=1, engine="serial", split="dirichlet:0.3", seed=1) for m in ("feddh_released", "fedjs")
    )
    for name, value in paper.params.items():
        torch.testing.assert_close(released.params[name], value)
    assert released.history.total("bytes_up") > 1.9 * paper.history.total("bytes_up"), "gradients travel too"


def test_the_gradient_is_the_mean_of_the_last_epoch():
    loop, net = build_tiny_run(Method(), SIZES)
    name = net.shared_trainable[0]
    part, zero = FedDHReleased(), torch.zeros(())
    state: Any = {"gradient": {name: torch.zeros(1)}, "steps": zero, "epoch": zero}
    score = BatchScore(zero, zero, zero, {}, {}, {})
    for epoch, value in ((0, 9.0), (0, 9.0), (1, 1.0), (1, 4.0)):
        local = Local(net, {}, {}, {"epoch": torch.tensor(float(epoch))}, {}, state)
        update, state = part.step({name: torch.tensor([value])}, state, score, local)
        assert update[name].tolist() == [value]
    assert part.measure({}, state, loop)["gradient"][name].tolist() == [2.5]  # pyright: ignore[reportArgumentType]


# fedad_released -------------------------------------------------------------------------------------------------------
def test_rates_by_numbers_of_samples():
    """1 - 100 x 0.6 / n: 0.4, 0.25 and -0.2, which becomes the floor; a small device gets it, too."""
    sizes = np.array([100, 80, 50, 10])
    found = compute_rates_by_samples(sizes, [0, 1, 2, 3], 0.4, 0.05)
    assert found == pytest.approx([0.4, 0.25, 0.05, 0.05])


def test_a_softmax_over_all_units_together():
    """Factors 1, 1/2 and 1/4, three units: 0.1 x 3 / 1.75 of each; with 0.9 the first is above 1."""
    scores = {"a": np.array([0.0, log(2)]), "b": np.array([log(4)])}
    found = compute_softmax_rates(scores, 0.1)
    assert np.concatenate(list(found.values())) == pytest.approx(np.array([1, 0.5, 0.25]) * 0.3 / 1.75)
    assert compute_softmax_rates(scores, 0.9)["a"][0] == pytest.approx(2.7 / 1.75)
    assert scale_kept_units(np.array([0.0, 0.5, 1.0, 1.5])).tolist() == [1.0, 2.0, 1.0, 1.0]
    assert compute_softmax_rates({}, 0.1) == {}


def test_neurons_are_scored_by_the_weights_on_both_sides_and_classes_by_those_that_make_them():
    net = build_model("lenet", (3, 32, 32), 10, 0)
    params, axis = net.initial, {a.name: a for a in (*net.axes, *net.rows)}
    found = sum_adjacent_weights([axis["fc2"], axis["fc3:output"]], params)
    both = params["fc2.weight"][7].abs().sum() + params["fc3.weight"][:, 7].abs().sum()
    assert float(found["fc2"][7]) == pytest.approx(float(both))
    assert float(found["fc3:output"][3]) == pytest.approx(float(params["fc3.weight"][3].abs().sum()))
    filters, neurons = FedADReleased().group_axes(net)
    assert filters == ["conv1", "conv2"] and neurons == ["fc1", "fc2", "fc3:output"]


def test_who_did_not_train_votes_for_the_old_value():
    """Weights 6/14, 3/14 and 5/14, all changes 14: a mean over holders is 14, the plain mean 14 less 3."""
    round = make_round()
    name = next(k for k in round.net.shared_trainable if round.anchor[k].dim() == 2)
    delta = {k: torch.full_like(v, 14.0) for k, v in round.anchor.items()}
    covered = torch.ones_like(round.anchor[name], dtype=torch.bool)
    covered[0] = False
    replies = [replace(r, delta=delta, covered={name: covered} if r.device == 1 else {}) for r in round.replies]
    found, _ = FedADReleased().combine(replies, {}, replace(round, replies=replies))
    change = found[name] - round.anchor[name]
    torch.testing.assert_close(change[0], torch.full_like(change[0], 11.0))
    torch.testing.assert_close(change[1:], torch.full_like(change[1:], 14.0))


def change_ranks(part: FedADReleased, round: Round, state: Any, rank: float) -> tuple[dict[str, Tensor], Any]:
    """A round whose largest device reports the same rank for all filters of one axis."""
    report = {part.name(): {"scores": {"a": torch.full((4,), rank)}}}
    replies = [replace(r, report=report if r.device == 0 else {}, plan=Plan()) for r in round.replies]
    return part.serve({k: v + 1 for k, v in round.anchor.items()}, state, replace(round, replies=replies))


def test_the_model_goes_back_to_the_round_of_the_least_change():
    """Ranks 9, 5, 4, 2: changes 8 (4 of 2 filters squared: sqrt(4 x 16)), 2, 4. The third does not fall."""
    part, round = FedADReleased(rule="fixed", rate=0.5, start=0), make_round()
    start: Any = {"ranks": {}, "least": -1.0, "saved": {}, "rate": -1.0, "asking": False}
    late = FedADReleased(rule="fixed", rate=0.5, start=9)
    state = start
    for number, rank in enumerate((9.0, 5.0, 4.0)):
        anchor = {k: v + number for k, v in round.anchor.items()}
        params, state = change_ranks(late, replace(round, number=number, anchor=anchor), state, rank)
        assert state["rate"] == -1.0
    assert state["least"] == 2.0 and torch.equal(next(iter(state["saved"].values())), next(iter(anchor.values())))
    params, state = change_ranks(late, replace(round, number=9), state, 2.0)
    assert state["rate"] == 0.5
    for name in round.net.names_with_role("shared"):
        assert torch.equal(params[name], anchor[name]), "back where the change was least"
    # from the first round on, the first change of all counts as one that did not fall
    _, state = change_ranks(part, replace(round, number=1), start, 9.0)
    _, state = change_ranks(part, replace(round, number=2), state, 5.0)
    assert state["rate"] == 0.5


def test_units_of_all_kinds_drop_out():
    setting = {"data": "digits", "model": "lenet", "devices": 6, "sample": 3, "steps": "2", "batch": 8, "rounds": 5}
    run = shoal.run("fedad_released(rule='fixed', rate=0.5, start=0)", engine="serial", **setting)
    rates, dropped = run.history["fedad_released.dropout_rate"], run.history["fedad_released.dropped_share"]
    assert rates[:2] == [0.0, 0.0] and min(rates[2:]) >= 0.05 and max(dropped) > 0
    assert min(run.history["macs_forward"][2:]) < run.history["macs_forward"][0]


# serverm_released -----------------------------------------------------------------------------------------------------
def test_momentum_acts_twice_where_the_server_moved_the_model():
    """From 1 to a mean of 3, and a step of 1 on the server: m = 2, then 0.9 x 2 + 0.1 x 1 = 1.9; 1 + 2 + 1.9."""
    part, round = ServerMReleased(), make_round()
    anchor = {k: torch.ones_like(v) for k, v in round.anchor.items()}
    replies = [replace(r, delta={k: torch.full_like(v, 2.0) for k, v in anchor.items()}) for r in round.replies]
    round = replace(round, anchor=anchor, replies=replies)
    name = round.net.shared_trainable[0]
    once, state = part.combine(replies, part.init_server(round), round)
    assert float(once[name].flatten()[0]) == pytest.approx(3.0)
    stayed, kept = part.serve(once, state, round)
    assert torch.equal(stayed[name], once[name]) and torch.equal(kept["m"][name], state["m"][name])
    twice, state = part.serve({k: v + 1 for k, v in once.items()}, state, round)
    assert float(twice[name].flatten()[0]) == pytest.approx(4.9)
    # the next round has 0.9 x 1.9 + 0.1 x 2 after averaging
    again, _ = part.combine(replies, state, round)
    assert float(again[name].flatten()[0]) == pytest.approx(1 + 0.9 * 1.9 + 0.2)


def test_without_a_step_of_the_server_it_is_the_exponential_mean():
    setting = {"rounds": 3, "engine": "serial", "split": "dirichlet:0.3"}
    one, two = (shoal.run(m, **setting) for m in ("serverm_released", "fedavgm(beta=0.9, ema=True, start='first')"))
    for name, value in two.params.items():
        torch.testing.assert_close(one.params[name], value)


# the model ------------------------------------------------------------------------------------------------------------
def test_no_logit_of_the_released_lenet_is_below_0():
    plain, released = (build_model(name, (3, 32, 32), 10, 0) for name in ("lenet", "lenet-relu-logits"))
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    logits = plain.forward(plain.initial, x)[0]
    assert torch.equal(released.forward(plain.initial, x)[0], logits.relu()) and bool((logits < 0).any())
    assert list(plain.initial) == list(released.initial) and plain.macs_forward == released.macs_forward
    assert [a.name for a in released.axes] == [a.name for a in plain.axes]
