"""FedDH, FedJS and FedDHE: hand-worked weights, slopes against finite differences, what must always hold."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from shoal.core.aggregate import average_replies
from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.measures.divergence import jensen_shannon_divergence, measure_label_degrees
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.server_state import EnrolmentRegister
from shoal.core.types import Outcome, Reply, Round
from shoal.data.dataset import DATASETS
from shoal.data.user_data import build_user_dataset
from shoal.models import build_model
from shoal.parts.feddh import FedDH
from shoal.parts.lib.label_counts import count_labels, estimate_label_shares
from shoal.parts.lib.reply_means import cap_weights, compute_weight_derivatives, project_gradient
from shoal.parts.lib.submodel_units import device_state_key
from shoal.plugins.smoke_run import build_tiny_run

SIZES = (6, 3, 5)


def a_round(sizes=SIZES, masked: bool = False, seed: int = 0) -> Round:
    """Replies with random changes to the tiny net; if masked, some coordinates have one holder or none."""
    loop, net = build_tiny_run(Method(), sizes)
    round = loop.make_round(loop.start(net), 0, EnrolmentRegister({}, loop.host.enrol))
    generator = torch.Generator().manual_seed(seed)

    def reply(device: int) -> Reply:
        delta = {k: torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in net.initial.items()}
        covered = {k: torch.rand(v.shape, generator=generator) < 0.6 for k, v in delta.items()} if masked else {}
        delta = {k: v * covered[k] if masked else v for k, v in delta.items()}
        return Reply(device, sizes[device], delta, covered, {}, Outcome(device, steps=2))

    return replace(round, replies=[reply(d) for d in range(len(sizes))])


def state_of(histograms: list[list[int]], control: dict | None = None) -> dict:
    known = {device_state_key(d): torch.tensor(own, dtype=torch.float64) for d, own in enumerate(histograms)}
    return {"labels": known, "control": control or {}, "late": []}


HISTOGRAMS = [[6, 0, 0], [1, 1, 1], [0, 4, 1]]


def weights_of(part: FedDH, state: dict, round: Round) -> Tensor:
    sizes = torch.tensor([float(r.size) for r in round.replies], dtype=torch.float64)
    weights, _ = part.weigh(sizes, state, round)
    return weights / weights.sum()


def test_weights_are_sizes_over_degrees():
    """Two devices with one of two classes each and one with both: the pooled mix is even, JS is 0.3113 twice and 0."""
    histograms = [[4, 0], [0, 4], [1, 1]]
    js = measure_label_degrees(np.array(histograms))
    assert js.round(4).tolist() == [0.3113, 0.3113, 0.0]
    floor = max(1e-3, 0.02 * js.mean())
    found = weights_of(FedDH(), state_of(histograms), a_round((4, 4, 2)))
    expected = torch.tensor([4 / js[0], 4 / js[1], 2 / floor], dtype=torch.float64)
    torch.testing.assert_close(found, expected / expected.sum())


def test_control_parameters_are_a_line_through_the_degree():
    state = state_of(HISTOGRAMS, {device_state_key(0): [2.0, 0.1], device_state_key(2): [1.0, 0.5]})
    js = measure_label_degrees(np.array(HISTOGRAMS))
    expected = [2 * js[0] + 0.1, js[1], js[2] + 0.5]
    torch.testing.assert_close(
        FedDH().compute_dynamic_degrees(state, [0, 1, 2]), torch.tensor(expected, dtype=torch.float64)
    )


# invariants 1 to 9 of the specification ------------------------------------------------------------------------------


def test_equal_histograms_give_fedavg_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(n, 5, generator=generator), torch.arange(n) % 3) for n in (6, 12, 9, 3)]
    own = build_user_dataset(data, test=(torch.randn(6, 5, generator=generator), torch.arange(6) % 3))
    setting = {"data": own, "split": "owner", "devices": 4, "sample": 3, "rounds": 3, "batch": 4, "engine": "serial"}
    ends = [shoal.run(method, **setting).params for method in ("fedavg", "feddh", "fedjs")]
    for other in ends[1:]:
        assert all(torch.equal(ends[0][k], other[k]) for k in other)


def test_without_learning_rates_it_is_fedjs():
    part, round = FedDH(lr_v=0.0, lr_b=0.0), a_round()
    weights = weights_of(part, state_of(HISTOGRAMS), round)
    _, state = part.serve(round.anchor, state_of(HISTOGRAMS), replace(round, weights=weights))
    assert all(own == [1.0, 0.0] for own in state["control"].values())


def loss_of(params: Params) -> Tensor:
    """Any smooth function of the model will do as a global loss."""
    return sum((p.sin().sum() + (p**3).sum() / 3 for p in params.values()), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "holders"])
@pytest.mark.parametrize("seed", range(3))
def test_slopes_are_those_of_finite_differences(masked: bool, seed: int):
    round = a_round(masked=masked, seed=seed)
    js = measure_label_degrees(np.array(HISTOGRAMS))
    v, b = torch.tensor([1.0, 0.7, 1.3]).double(), torch.tensor([0.1, 0.3, 0.2]).double()
    sizes = torch.tensor([6.0, 3.0, 5.0]).double()

    def combined(v: Tensor, b: Tensor) -> tuple[Params, Tensor, Tensor]:
        degree = v * torch.from_numpy(js) + b
        weights = sizes / degree
        weights = weights / weights.sum()
        return average_replies(replace(round, weights=weights)), weights, degree

    params, weights, degree = combined(v, b)
    gradient = {k: p.cos() + p**2 for k, p in params.items()}
    by_degree = -project_gradient(compute_weight_derivatives(replace(round, weights=weights)), gradient) / degree
    h = 1e-6
    for k in range(3):
        for values, factor in ((v, js[k]), (b, 1.0)):
            step = torch.zeros(3, dtype=torch.float64).index_fill(0, torch.tensor(k), h)
            up, down = ((combined(v + s, b) if values is v else combined(v, b + s))[0] for s in (step, -step))
            slope = (loss_of(up) - loss_of(down)) / (2 * h)
            assert abs(float(slope - factor * by_degree[k])) < 1e-6
    assert abs(float((degree * by_degree).sum())) < 1e-9


def test_pulls_sum_to_nothing():
    """D is scale-free: the sum of D_k dF/dD_k is 0, also over holders."""
    for masked in (False, True):
        round = replace(a_round(masked=masked), weights=torch.tensor([0.5, 0.2, 0.3]).double())
        gradient = {k: torch.randn_like(v) for k, v in round.anchor.items()}
        assert abs(float(project_gradient(compute_weight_derivatives(round), gradient).sum())) < 1e-9


def test_a_common_factor_on_all_degrees_changes_nothing():
    js = measure_label_degrees(np.array(HISTOGRAMS))
    one = weights_of(FedDH(), state_of(HISTOGRAMS), a_round())
    many = weights_of(
        FedDH(), state_of(HISTOGRAMS, {device_state_key(d): [7.0, 0.0] for d in range(len(js))}), a_round()
    )
    torch.testing.assert_close(one, many)


NUMBERS = st.floats(-1e30, 1e30)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=3), st.sampled_from([1.0, 0.5]))
def test_weights_are_shares_whatever_the_control_parameters_are(control, cap):
    state = state_of(HISTOGRAMS, {device_state_key(d): list(own) for d, own in enumerate(control)})
    found = weights_of(FedDH(cap=cap), state, a_round())
    assert bool((found >= 0).all()) and bool(found.isfinite().all()) and abs(float(found.sum()) - 1) < 1e-9
    assert float(found.max()) <= cap + 1e-9


def test_control_parameters_that_are_no_numbers_start_again():
    part, round = FedDH(lr_v=1e308, lr_b=1e308), a_round()
    round = replace(round, weights=weights_of(part, state_of(HISTOGRAMS), round))
    huge = replace(round, replies=[replace(r, delta={k: d * 1e150 for k, d in r.delta.items()}) for r in round.replies])
    _, state = part.serve(round.anchor, state_of(HISTOGRAMS), huge)
    assert all(own == [1.0, 0.0] for own in state["control"].values())


def test_a_floor_lets_a_degree_rise_and_not_fall():
    part, state = FedDH(lr_v=0.0, lr_b=1.0), state_of([[3, 3], [3, 3], [6, 0]])
    past = {"devices": [0, 1], "degree": part.compute_dynamic_degrees(state, [0, 1])}
    moved = part.update_control(
        state | {"control": {device_state_key(0): [0.0, -1.0], device_state_key(1): [0.0, -1.0]}},
        past,
        torch.tensor([1.0, -1.0]),
        0,
    )
    assert moved["control"][device_state_key(0)][1] > -1.0 and moved["control"][device_state_key(1)][1] == -1.0


def test_one_device_alone_is_not_steered():
    part, round = FedDH(lr_v=1.0, lr_b=1.0), a_round((5,))
    round = replace(round, weights=torch.ones(1, dtype=torch.float64))
    _, state = part.serve(round.anchor, state_of([[3, 2], [0, 9]]), round)
    assert state["control"][device_state_key(0)] == [1.0, 0.0]


def test_the_order_of_devices_does_not_matter():
    part, round = FedDH(lr_v=0.1, lr_b=0.1), a_round(masked=True)
    ends = []
    for order in permutations(range(3)):
        own = replace(round, replies=[round.replies[i] for i in order])
        own = replace(own, weights=weights_of(part, state_of(HISTOGRAMS), own))
        _, state = part.serve(round.anchor, state_of(HISTOGRAMS), own)
        ends.append([state["control"][device_state_key(d)] for d in range(3)])
    for other in ends[1:]:
        np.testing.assert_allclose(ends[0], other, rtol=1e-9)


def test_degrees_do_not_depend_on_what_classes_are_called():
    counts = np.array([[5, 0, 2, 1], [0, 3, 3, 0], [1, 1, 1, 9]])
    for order in permutations(range(4)):
        np.testing.assert_allclose(measure_label_degrees(counts), measure_label_degrees(counts[:, order]))
    even = np.full(10, 0.1)
    assert jensen_shannon_divergence(np.repeat([0.5, 0.0], [2, 8]), even).round(4) == 0.61
    assert jensen_shannon_divergence(np.repeat([0.2, 0.0], [5, 5]), even).round(4) == 0.3113


# where gradients come from -------------------------------------------------------------------------------------------


def test_the_pseudo_gradient_is_the_change_over_the_steps_it_took():
    part, round = FedDH(), replace(a_round(), weights=torch.tensor([0.5, 0.2, 0.3]).double())
    change = {k: v - round.anchor[k] for k, v in average_replies(round).items()}
    for name, found in part.estimate_global_gradient(round.anchor, round).items():
        torch.testing.assert_close(found, -change[name] / (0.1 * 2))


@pytest.mark.parametrize("gradient", ["pseudo", "server_data", "client_grad"])
def test_every_gradient_steers(gradient: str):
    """The same seeds: the weights of the second round differ from FedJS where control parameters moved in the first."""
    rows = [
        shoal.run(method=m, rounds=4, server_data="per-class:3", engine="serial", split="dirichlet:0.2")
        for m in (f"feddh(lr_v=1.0, lr_b=1.0, gradient_from='{gradient}')", "fedjs")
    ]
    assert any(not torch.equal(rows[0].params[k], rows[1].params[k]) for k in rows[0].params)
    up = [run.history.total("bytes_up") for run in rows]
    assert (up[0] > 1.9 * up[1]) == (gradient == "client_grad")


def test_it_asks_for_server_samples_where_it_needs_them():
    for method in ("feddh(gradient_from='server_data')", "feddhe"):
        with pytest.raises(shoal.ShoalError, match="needs samples on the server"):
            shoal.run(method=method, rounds=1)


def test_histograms_travel_once_and_are_counted():
    one, two = (shoal.run(method=m, rounds=2, engine="serial", split="iid").history for m in ("fedavg", "feddh"))
    assert two.rows[0]["bytes_up"] - one.rows[0]["bytes_up"] == 20 * 10 * 4
    assert two.rows[1]["bytes_up"] == one.rows[1]["bytes_up"]


@settings(max_examples=50, deadline=None)
@example([2.0, 5e-324], 0.5)
@example([2.0, 5e-323], 0.5)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.floats(0.05, 1))
def test_a_cap_bounds_and_keeps_the_sum(weights, cap):
    given_weights = torch.tensor(weights, dtype=torch.float64)
    found = cap_weights(given_weights, cap)
    if given_weights.sum() > 0:
        shares, before = found / found.sum(), given_weights / given_weights.sum()
        assert float(shares.max()) <= max(cap, 1 / int((before > 0).sum())) + 1e-9
        assert float(shares.sum()) == pytest.approx(1)
        assert bool(((before > 0) | (shares == 0)).all())


def test_a_second_combination_in_the_same_round_uses_the_new_weights():
    part, round = FedDH(lr_v=0.0, lr_b=5.0, reaggregate=True), a_round()
    state = state_of(HISTOGRAMS)
    round = replace(round, weights=weights_of(part, state, round))
    params, after = part.serve(average_replies(round), state, round)
    torch.testing.assert_close(params, average_replies(replace(round, weights=weights_of(part, after, round))))


# FedDHE --------------------------------------------------------------------------------------------------------------


def test_a_server_that_sees_only_a_model_finds_the_classes_it_was_trained_on():
    """Invariant 10; the printed formula finds the others."""
    data = DATASETS["digits"]()
    x, y = data.inputs.float(), data.targets
    few = y < 3
    net = build_model("mlp", data.input_shape, 10, 0)
    params = {k: v.clone() for k, v in net.initial.items()}
    for _ in range(100):
        leaves = {k: p.requires_grad_() for k, p in params.items()}
        loss = torch.nn.functional.cross_entropy(net.forward(leaves, x[few])[0], y[few])
        grads = torch.autograd.grad(loss, list(leaves.values()))
        params = {k: (p - 0.5 * g).detach() for (k, p), g in zip(leaves.items(), grads)}
    rows = torch.cat([(y == c).nonzero().flatten()[:10] for c in range(10)])
    held = Samples(x, y, rows)
    shares = estimate_label_shares(net, params, held, 4.0)
    assert abs(float(shares.sum()) - 1) < 1e-12 and float(shares[:3].sum()) > 0.9
    assert float(estimate_label_shares(net, params, held, 4.0, literal=True)[:3].sum()) < 0.5


def test_what_cannot_be_estimated_is_even():
    net = build_model("mlp", (4,), 3, 0)
    broken = {k: v * torch.nan for k, v in net.initial.items()}
    samples = Samples(torch.ones(3, 4), torch.arange(3), torch.arange(3))
    assert estimate_label_shares(net, broken, samples, 4.0).tolist() == [1 / 3] * 3


def slopes_of(*lengths: float) -> tuple[Net, Samples]:
    """A model whose loss on the one sample of class c has a gradient of this length in its only weight, at 0."""

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            own = F.one_hot(x[:, 1].long(), len(lengths))
            return own * x[:, :1] * self.weight

    steps = [length * len(lengths) / (len(lengths) - 1) for length in lengths]
    inputs = torch.tensor([[s, c] for c, s in enumerate(steps)], dtype=torch.float64)
    samples = Samples(inputs, torch.arange(len(lengths)), torch.arange(len(lengths)))
    return Net(Steep(), (2,), len(lengths)), samples


def test_shares_by_hand():
    """Squared slopes 1, 4 and 4: u = (1, 1/4, 1/4) over their mean of 1/2."""
    net, samples = slopes_of(1.0, 2.0, 2.0)
    expected = torch.softmax(torch.tensor([2.0, 0.5, 0.5]).double(), 0)
    torch.testing.assert_close(estimate_label_shares(net, net.initial, samples, 1.0), expected)
    # without a sample of the last class nothing is known of it: u = (1, 1/4, 0) over 5/12
    known = Samples(samples.inputs, samples.targets, torch.arange(2))
    expected = torch.softmax(torch.tensor([12 / 5, 3 / 5, 0.0]).double(), 0)
    torch.testing.assert_close(estimate_label_shares(net, net.initial, known, 1.0), expected)


@pytest.mark.parametrize("length", [1e200, torch.nan])
@pytest.mark.parametrize("literal", [False, True])
def test_a_gradient_that_is_not_finite_makes_the_shares_even(length, literal):
    net, samples = slopes_of(1.0, length, 2.0)
    assert estimate_label_shares(net, net.initial, samples, 4.0, literal).tolist() == [1 / 3] * 3


def test_labels_are_counted_at_every_position():
    samples = Samples(torch.zeros(2, 3), torch.tensor([[0, 2, 2], [1, -100, 2]]), torch.arange(2))
    assert count_labels(samples, 4).tolist() == [1, 1, 3, 0]
