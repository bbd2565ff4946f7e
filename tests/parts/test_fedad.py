"""FedAD: scores, curvature, rates and sub-models, by hand and by what must always hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.core.batch import Batch
from shoal.core.compose import Method
from shoal.core.model.flops import FlopCache, verify_width_formula
from shoal.core.model.flops_by_width import FlopsByWidth, count_models_to_cut
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Tree
from shoal.models import build_model
from shoal.parts.fedad import FedAD
from shoal.parts.lib.curvature import (
    FlatLoss,
    Spectrum,
    compute_shares_above,
    estimate_lipschitz,
    estimate_pruning_rate,
    estimate_spectrum,
    find_eigengap_rate,
    find_plateau_rate,
    run_lanczos,
)
from shoal.parts.lib.dropout_rates import compute_device_rates, compute_neuron_rates, draw_kept_neurons
from shoal.parts.lib.unit_scores import average_neuron_scores, compute_map_ranks, score_neurons, shape_feature_maps
from shoal.plugins.smoke_run import build_tiny_run

IMAGES = (3, 32, 32)
QUICK = "fedad(rule='fixed', rate=0.5, check=1, force=0)"


# scores ---------------------------------------------------------------------------------------------------------------


def test_ranks_are_those_of_the_maps():
    column, row = torch.arange(1.0, 6.0)[:, None], torch.arange(2.0, 9.0)
    found = torch.stack([column * row, torch.eye(5, 7), torch.zeros(5, 7)])[None].repeat(4, 1, 1, 1)
    assert compute_map_ranks(found).tolist() == pytest.approx([1 / 5, 1.0, 0.0])
    assert compute_map_ranks(found / found.new_zeros(())).tolist() == [0.0, 0.0, 0.0], "maps that overflow say nothing"


def test_filters_are_scored_by_ranks_and_neurons_by_the_weights_that_make_them():
    net = build_model("lenet", IMAGES, 10, 0)
    x = torch.randn(8, *IMAGES)
    params = {k: v.clone() for k, v in net.initial.items()}
    params["conv1.weight"][2] = params["conv1.bias"][2] = 0.0
    params["fc1.weight"][5] *= 10
    found = score_neurons(net, params, x)
    after = net.forward(params, x, ("relu1",))[2]["relu1"]
    assert after.shape[1:] == (6, 28, 28) and float(found["conv1"][2]) == 0.0
    assert float(found["conv1"][0]) == pytest.approx(float(torch.linalg.matrix_rank(after[:, 0]).float().mean()) / 28)
    sums = params["fc1.weight"].abs().sum(1) + params["fc1.bias"].abs()
    torch.testing.assert_close(found["fc1"], sums / sums.mean())
    assert {k: len(v) for k, v in found.items()} == {a.name: a.size for a in net.axes}


def test_heads_are_scored_by_the_rank_of_what_they_put_out():
    net = build_model("vit", IMAGES, 10, 0)
    axis = next(a for a in net.axes if a.name == "layer1.heads")
    x = torch.randn(3, *IMAGES)
    made = net.forward(net.initial, x, (axis.tap,))[2][axis.tap]
    assert shape_feature_maps(made, axis).shape == (3, 4, 64, 16)
    torch.testing.assert_close(shape_feature_maps(made, axis)[1, 2], made[1, :, 32:48])
    found = score_neurons(net, net.initial, x)
    assert {len(v) for k, v in found.items() if k.endswith("heads")} == {4}
    assert all(0 < float(v.min()) <= float(v.max()) <= 1 for k, v in found.items() if k.endswith("heads"))


def test_scores_are_weighed_by_samples_over_those_who_held_a_unit():
    whole, part = Plan(), Plan({"a": torch.tensor([0, 2])})
    reports = [(1, {"a": torch.tensor([1.0, 2.0, 3.0])}, whole), (3, {"a": torch.tensor([5.0, 0.0, 7.0])}, part)]
    assert average_neuron_scores(reports, {})["a"].tolist() == [4.0, 2.0, 6.0]
    nobody = [(3, {"a": torch.tensor([5.0, 0.0, 7.0])}, part)]
    assert average_neuron_scores(nobody, {"a": torch.tensor([1.0, 9.0, 1.0])})["a"].tolist() == [5.0, 9.0, 7.0]


# curvature ------------------------------------------------------------------------------------------------------------


class Bowl(nn.Module):
    """Logits (z, 0) with z made so that the loss is a known function of the weights."""

    def __init__(self, size: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x):
        return torch.stack((x @ self.w, torch.zeros(len(x), dtype=x.dtype)), 1)


class Quadratic(FlatLoss):
    """w' H w / 2 + c'w instead of a model's loss."""

    def __init__(self, curvature: torch.Tensor, slope: torch.Tensor):
        super().__init__(Net(Bowl(len(slope)), (len(slope),), 2), {"w": slope}, Batch(slope[None], ()))
        self.h, self.c = curvature, slope

    def compute_gradient(self, at, graph=False):
        leaf = at.detach().requires_grad_()
        found = leaf @ self.h + self.c
        return leaf, found if graph else found.detach()


def symmetric(values: list[float], seed: int = 0) -> torch.Tensor:
    turn = torch.linalg.qr(
        torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed)).double()
    )[0]
    return turn @ torch.diag(torch.tensor(values).double()) @ turn.t()


def test_lanczos_finds_the_ends_of_a_known_spectrum():
    values = [-2.0, *np.linspace(-0.1, 0.1, 37), 5.0, 30.0]
    h = symmetric(values)
    start = torch.randn(40, generator=torch.Generator().manual_seed(1)).double().sign()
    found = run_lanczos(lambda v: h @ v, start, 12)
    assert found.values[[0, -2, -1]] == pytest.approx([-2.0, 5.0, 30.0], abs=1e-6)
    assert found.weights.sum() == pytest.approx(1.0)
    whole = run_lanczos(lambda v: h @ v, start, 50)
    assert len(whole.values) <= 40 and whole.values[[0, -1]] == pytest.approx([-2.0, 30.0])


def test_lanczos_stops_where_nothing_new_is_left():
    found = run_lanczos(lambda v: 3 * v, torch.ones(5).double(), 50)
    assert found.values.tolist() == pytest.approx([3.0]) and found.weights.tolist() == pytest.approx([1.0])
    nothing = run_lanczos(lambda v: 0 * v, torch.ones(5).double(), 50)
    assert nothing.values.tolist() == [0.0] and nothing.weights.tolist() == [1.0]


def smooth_loss(held: bool = False) -> tuple[FlatLoss, torch.Tensor]:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    net = Net(module, (4,), 3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 4, generator=generator).double(), torch.randint(0, 3, (9,), generator=generator)
    loss = FlatLoss(net, net.initial, Batch(x, ((y, None),)))
    at = loss.flatten(net.initial)
    if held:
        loss.held = (torch.rand(len(at), generator=generator) < 0.5).double()
    return loss, at


@pytest.mark.parametrize("held", [False, True])
def test_a_hessian_vector_product_is_a_difference_of_gradients(held: bool):
    loss, at = smooth_loss(held)
    vector = torch.randn(len(at), generator=torch.Generator().manual_seed(2)).double()
    vector = vector * loss.held if loss.held is not None else vector
    h = 1e-5
    expected = (loss.compute_gradient(at + h * vector)[1] - loss.compute_gradient(at - h * vector)[1]) / (2 * h)
    torch.testing.assert_close(loss.build_hessian_product(at)(vector), expected, rtol=1e-6, atol=1e-8)


def test_the_secant_of_a_quadratic_loss_is_nothing_and_of_another_something():
    loss = Quadratic(symmetric([1.0, 2.0, -3.0]), torch.ones(3).double())
    way = torch.tensor([0.3, -1.0, 2.0]).double()
    assert estimate_lipschitz(loss, torch.zeros(3).double(), way) < 1e-12
    tanh, at = smooth_loss()
    assert estimate_lipschitz(tanh, at, torch.ones_like(at)) > 1e-3
    assert estimate_lipschitz(tanh, at, torch.zeros_like(at)) == 0.0


def test_what_lies_above_a_value_is_read_off_the_weights():
    places, shares = compute_shares_above(Spectrum(np.array([-1.0, 0.5, 2.0]), np.array([0.2, 0.5, 0.3])))
    assert len(places) == len(shares) == 10_000 and places[[0, -1]] == pytest.approx([-1.01, 2.01])
    read = [float(shares[places.searchsorted(v)]) for v in (-1.01, -0.5, 0.0, 1.0, 2.01)]
    assert read == pytest.approx([1.0, 0.8, 0.8, 0.3, 0.0], abs=0.01), "the ends of the first and last peak are cut off"
    assert (np.diff(shares) <= 0).all()


def test_a_plateau_is_where_the_share_stays():
    """From 0 the share above is 0.8 at 0.1, 0.2, 0.3 and 0.4: three changes of nothing in a row."""
    assert find_plateau_rate(Spectrum(np.array([-1.0, 0.95, 2.0]), np.array([0.2, 0.5, 0.3]))) == pytest.approx(
        0.8, abs=0.005
    )


def test_steps_that_are_too_wide_for_a_plateau_are_halved():
    """Half of the mass lies just above 0: with steps of 0.1 it is gone before three of them are made."""
    found = Spectrum(np.array([-1.0, 0.16, 5.0]), np.array([0.1, 0.8, 0.1]))
    assert find_plateau_rate(found) == pytest.approx(0.9, abs=0.01)


def test_steps_become_as_small_as_a_peak_at_0_needs():
    """Range 21.02: bins of 0.0021, a peak 0.0145 wide. It loses 0.9 / 0.0145 / 2.5 = 25 for each 1, so even a bin is a
    step of 0.052: only steps inside of a bin change nothing, and the share is what it is at 0, half of the peak and
    what lies above it. Steps of a bin or more would walk over the whole peak, and leave 0.05.
    """
    found = find_plateau_rate(Spectrum(np.array([-1.0, 0.0, 20.0]), np.array([0.05, 0.9, 0.05])))
    assert 0.5 - 0.06 < found <= 0.5 + 0.06


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([3.0], [1.0], 1.0),  # all eigenvalues equal: all of them are above 0.3, the fourth place
        ([-3.0], [1.0], 0.0),
        ([0.0], [1.0], 0.5),  # no curvature: the smoothed peak is halved by 0
        ([0.05], [1.0], 1.0),  # steps of 0.1, 0.05 and 0.025 fall over it, three of 0.0125 do not
        ([-1.0, 1e7], [0.5, 0.5], 1.0),  # bins of 1000: 0 lies in the first, with all that is there
        ([-1e7, 1.0], [0.5, 0.5], 0.5),
        ([-1e-9, 1e-9], [0.5, 0.5], 0.5),
    ],
)
def test_plateaus_of_spectra_with_little_in_them(values, weights, expected):
    assert find_plateau_rate(Spectrum(np.array(values), np.array(weights))) == pytest.approx(expected, abs=0.02)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(1e-6, 1)), min_size=1, max_size=20))
def test_a_plateau_lies_between_half_of_what_is_above_0_and_all_of_it(pairs):
    values, weights = np.array(sorted(pairs)).T
    found = Spectrum(values, weights / weights.sum())
    places, shares = compute_shares_above(found)
    first = shares[max(0, places.searchsorted(0.0, "right") - 1)]
    assert first / 2 <= find_plateau_rate(found) <= first


def test_a_trained_lenet_can_lose_about_half_of_its_weights():
    """Mass above 0 is about half; a scan that walks over the peak there finds 0.01 to 0.06."""
    setting = {"data": "digits", "model": "lenet", "devices": 1, "sample": 1, "epochs": 4, "batch": 10, "lr": 0.1}
    run = shoal.run(rounds=2, engine="serial", **setting)
    assert run.history.rows[-1]["accuracy"] > 0.5
    x = torch.rand(50, *run.net.input_shape, generator=torch.Generator().manual_seed(0))
    loss = FlatLoss(run.net, run.params, Batch(x, ((run.net.forward(run.params, x)[0].argmax(1), None),)))
    share = estimate_pruning_rate(
        "slq_plateau", loss, run.net.initial, run.params, 30, torch.Generator().manual_seed(1)
    )
    assert share is not None and 0.35 < share < 0.65


def test_curvature_that_is_not_finite_says_nothing():
    broken = run_lanczos(lambda v: v * float("inf"), torch.ones(5).double(), 50)
    assert not np.isfinite(broken.values).any()
    loss, _ = smooth_loss()
    params = {k: v * float("nan") for k, v in loss.params.items()}
    for rule in ("slq_plateau", "eigen_gap"):
        assert estimate_pruning_rate(rule, loss, loss.params, params, 20, torch.Generator()) is None
    assert find_eigengap_rate(Spectrum(np.array([0.0, 1.0]), np.array([0.5, 0.5])), float("nan")) is None


def test_without_a_gap_the_literal_rule_is_the_plateau():
    """From far enough away, 4 constants are wider than any gap; from no way at all, the first gap is one."""
    loss, at = smooth_loss()
    found = estimate_spectrum(loss, at, 20, torch.Generator().manual_seed(3))
    far = {k: v + 10 for k, v in loss.params.items()}
    for start, literal in ((far, None), (loss.params, found.weights[0])):
        constant = estimate_lipschitz(loss, at, loss.flatten(start) - at)
        assert find_eigengap_rate(found, constant) == literal
        share = estimate_pruning_rate("eigen_gap", loss, start, loss.params, 20, torch.Generator().manual_seed(3))
        assert share == pytest.approx(literal or min(find_plateau_rate(found), 0.8))


def test_a_gap_is_four_constants_wide():
    found = Spectrum(np.array([0.0, 1.0, 1.5, 9.0, 30.0]), np.array([0.1, 0.3, 0.3, 0.2, 0.1]))
    assert (
        find_eigengap_rate(found, 1.0) == pytest.approx(0.7)
        and find_eigengap_rate(found, 3.0) == pytest.approx(0.9)
        and find_eigengap_rate(found, 9.0) is None
    )


@pytest.mark.parametrize("rule", ["slq_plateau", "eigen_gap"])
def test_a_rate_is_a_share_and_the_same_for_the_same_probe(rule: str):
    loss, at = smooth_loss()
    start = {k: v + 0.1 for k, v in loss.params.items()}
    found = [
        estimate_pruning_rate(rule, loss, start, loss.params, 20, torch.Generator().manual_seed(s)) for s in (3, 3)
    ]
    assert found[0] is not None and found[0] == found[1] and 0 <= found[0] <= 0.8
    assert estimate_spectrum(loss, at, 20, torch.Generator()).weights.sum() == pytest.approx(1.0)


# rates ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=12), st.floats(0, 0.8))
def test_slow_devices_drop_and_fast_ones_do_not(seconds, mean):
    times = np.array(seconds)
    found = compute_device_rates(times, mean)
    assert found[times.argmax()] == pytest.approx(mean)
    assert (found[times <= times.max() * (1 - mean) * (1 - 1e-12)] == 0).all()
    assert (np.diff(found[times.argsort(kind="stable")]) >= -1e-12).all()


def test_the_printed_rates_are_the_other_way_round():
    times = np.array([1.0, 2.0, 4.0])
    assert compute_device_rates(times, 0.4).tolist() == pytest.approx([0.0, 0.0, 0.4])
    assert compute_device_rates(times, 0.4, literal=True).tolist() == pytest.approx([1.0, 0.8, 0.4])
    assert compute_device_rates(np.array([3.0, 4.0]), 0.4).tolist() == pytest.approx([1 - 4 * 0.6 / 3, 0.4])


SCORES = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9).map(np.array), min_size=1
)


@settings(max_examples=300, deadline=None)
@given(SCORES, st.floats(0, 1), st.floats(0.5, 0.95))
def test_unit_rates_have_the_mean_that_is_asked_for_and_a_bound(found, mean, most):
    made = np.concatenate(list(compute_neuron_rates(found, mean, most).values()))
    assert (made >= 0).all() and (made <= most + 1e-12).all()
    assert made.mean() == pytest.approx(min(mean, most), abs=1e-6)


def test_units_that_matter_less_drop_out_more():
    made = compute_neuron_rates({"a": np.array([3.0, 1.0, 2.0]), "b": np.array([5.0, 5.0])}, 0.3, 0.9)
    assert made["a"][1] > made["a"][2] > made["a"][0] and made["b"][0] == made["b"][1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 0.9), min_size=1, max_size=30), st.floats(0, 1), st.integers(0, 1000))
def test_of_every_axis_something_is_kept(rates, least, seed):
    matter = np.arange(len(rates), dtype=float)
    kept = draw_kept_neurons(np.array(rates), matter, least, np.random.default_rng(seed))
    assert len(kept) >= max(1, int(np.ceil(least * len(rates)))) and (np.diff(kept) > 0).all()
    assert 0 <= kept.min() and kept.max() < len(rates)


def test_those_that_are_kept_by_force_are_those_that_matter_most():
    kept = draw_kept_neurons(
        np.full(10, 1.0), np.array([0, 9, 1, 8, 2, 7, 3, 6, 4, 5.0]), 0.3, np.random.default_rng(0)
    )
    assert kept.tolist() == [1, 3, 5]


def test_scaled_activations_are_in_the_mean_what_they_were():
    """Invariant 16: over many draws, the mean output of the layer that reads scaled units is that of the whole."""
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    axis = build_model("mlp", (4,), 3, 0).axes[0]
    cuts = tuple(replace(c, tensor={"fc1": "0", "fc2": "2"}[c.tensor[:3]] + c.tensor[3:]) for c in axis.cuts)
    net = Net(module, (4,), 3, (replace(axis, size=6, cuts=cuts),))
    rates = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 0.5])
    x, generator, total = torch.randn(5, 4).double(), np.random.default_rng(0), torch.zeros(5, 3).double()
    for _ in range(4000):
        kept = torch.from_numpy(draw_kept_neurons(rates, rates, 0.0, generator))
        plan = Plan({axis.name: kept})
        scale = torch.from_numpy(1 / (1 - rates))
        sliced = net.slicer.place(net.slicer.take(net.initial, plan), net.initial, plan)
        total += net.forward(net.slicer.scale_unit_outputs(sliced, {axis.name: scale}), x)[0]
    torch.testing.assert_close(total / 4000, net.forward(net.initial, x)[0], rtol=0, atol=0.06)


# the part -------------------------------------------------------------------------------------------------------------


def test_a_rate_of_nothing_is_fedavg_to_the_bit_and_costs_its_plan():
    setting = {"model": "lenet", "rounds": 3, "devices": 6, "sample": 3, "engine": "serial", "fleet": "tiers"}
    plain, none = (shoal.run(m, **setting) for m in ("fedavg", "fedad(rule='fixed', rate=0.0, check=100, force=0)"))
    assert all(torch.equal(plain.params[k], none.params[k]) for k in plain.params)
    units = sum(a.size for a in none.net.axes)
    more = [a["bytes_down"] - b["bytes_down"] for a, b in zip(none.history.rows, plain.history.rows)]
    assert more == [3 * 1, 3 * (-(-units // 8) + 4 * units), 3 * (-(-units // 8) + 4 * units)]
    assert [a["bytes_up"] - b["bytes_up"] for a, b in zip(none.history.rows, plain.history.rows)] == [
        3 * 4 * units,
        0,
        0,
    ]


def test_slow_devices_compute_and_send_less():
    work = {"steps": "2", "rounds": 3, "devices": 6, "sample": 6}
    setting = {"model": "lenet", "engine": "serial", "fleet": "tiers:1:1:0.2", **work}
    plain, dropped = (shoal.run(m, **setting).history.rows for m in ("fedavg", QUICK))
    assert dropped[0]["macs_forward"] == plain[0]["macs_forward"]
    for key in ("macs_forward", "macs_work", "bytes_down", "sim_seconds"):
        assert dropped[2][key] < plain[2][key]


def test_engines_agree_on_sub_models():
    work = {"steps": "3", "rounds": 3, "devices": 6, "sample": 4}
    setting = {"model": "lenet", "fleet": "tiers", "precision": "float64", **work}
    ends = [shoal.run(f"feddh+{QUICK}", engine=e, **setting) for e in ("serial", "batched")]
    for name, value in ends[0].params.items():
        torch.testing.assert_close(value, ends[1].params[name], rtol=0, atol=1e-9)
    keys = ("bytes_up", "bytes_down", "macs_forward", "macs_work", "sim_seconds")
    assert [[r[k] for k in keys] for r in ends[0].history.rows] == [[r[k] for k in keys] for r in ends[1].history.rows]


def started() -> Tree:
    loop, net = build_tiny_run(Method((FedAD(),)))
    return loop.start(net).states["fedad"]


START = started()


@pytest.mark.parametrize(
    ("patience", "force", "changes", "due"),
    [
        (10, 50, [5.0, 4.0, 3.0, 3.0, 3.0], [False, False, False, False, True]),
        (5, 50, [5.0, 4.0, 4.0], [False, False, True]),
        (10, 10, [5.0, 4.0, 3.0], [False, True, True]),
        (100, 100, [5.0, 4.0, 3.0], [False, False, False]),
    ],
)
def test_rates_are_due_when_scores_have_settled(patience, force, changes, due):
    part = FedAD(rule="slq_plateau", patience=patience, force=force)
    state = START | {"scores": {"a": torch.zeros(4)}}
    value, asked = torch.zeros(4), []
    for number, change in enumerate(changes, 1):
        value = value + torch.tensor([change, 0, 0, 0])
        state = part.track_score_change(state, {"a": value}, 5 * number)
        asked.append(state["asking"])
        if state["asking"]:
            state = state | {"asking": False, "rate": 0.4}
    assert asked == due


def test_after_the_first_time_rates_are_due_when_the_change_is_smaller_than_then():
    part = FedAD(rule="fixed")
    state = START | {"scores": {"a": torch.zeros(1)}, "rate": 0.3, "change": 2.0}
    same = part.track_score_change(state, {"a": torch.tensor([2.0])}, 60)
    assert same["rate"] == 0.3
    again = part.track_score_change(state, {"a": torch.tensor([1.9])}, 60)
    assert again["rate"] == part.rate and again["change"] == pytest.approx(1.9)


def test_the_curvature_of_devices_sets_the_rate():
    setting = {"rounds": 3, "devices": 4, "sample": 2, "fleet": "tiers:1:0.1", "engine": "serial"}
    rows = shoal.run("fedad(check=1, force=0, images=20, steps=10)", **setting).history.rows
    assert rows[1]["bytes_up"] - rows[2]["bytes_up"] > 0 and rows[1]["macs_work"] > 1.2 * rows[0]["macs_work"]
    assert rows[2]["macs_forward"] <= rows[0]["macs_forward"]


@pytest.mark.parametrize(
    "method", ["fedprox+feddh+fedad", f"scaffold+{QUICK}", f"feddh+{QUICK}", "feddhad", "feddh+heterofl"]
)
def test_it_composes(method: str):
    run = shoal.run(method, rounds=4, fleet="tiers", engine="serial")
    assert all(bool(v.isfinite().all()) for v in run.params.values()) and not any("void" in r for r in run.history.rows)


def test_a_transformer_loses_heads_and_neurons_and_keeps_one_of_each():
    data = (torch.randn(60, 3, 8, 8), torch.arange(60) % 3)
    setting = {"data": data, "model": "vit", "rounds": 3, "devices": 4, "sample": 4, "fleet": "tiers:1:1:0.1"}
    method = "fedad(rule='fixed', rate=0.8, most=0.9, least=0.0, check=1, force=0)"
    run = shoal.run(method, engine="serial", batch=8, **setting)
    assert run.history.rows[2]["macs_forward"] < run.history.rows[0]["macs_forward"]


# costs of a plan ------------------------------------------------------------------------------------------------------


def lenet_of(c1: int, c2: int, f1: int, f2: int) -> tuple[int, int]:
    """Parameters and multiply-accumulates of a LeNet of these widths, by hand."""
    params = c1 * 75 + c1 + c2 * c1 * 25 + c2 + f1 * c2 * 25 + f1 + f2 * f1 + f2 + 10 * f2 + 10
    return params, 784 * c1 * 75 + 100 * c2 * c1 * 25 + f1 * c2 * 25 + f2 * f1 + 10 * f2


@settings(max_examples=15, deadline=None)
@given(st.tuples(st.integers(1, 6), st.integers(1, 16), st.integers(1, 120), st.integers(1, 84)))
def test_bytes_and_products_of_a_plan_are_those_of_the_cut_out_model(widths):
    net = build_model("lenet", IMAGES, 10, 0)
    plan = Plan({a.name: torch.randperm(a.size)[:n].sort().values for a, n in zip(net.axes, widths)})
    params, macs = lenet_of(*widths)
    assert FlopCache().count_forward(net, plan) == macs
    assert sum(v.nbytes for v in net.slicer.take(net.initial, plan).values()) == 4 * params


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [("lenet", IMAGES, 10), ("cnn", IMAGES, 10), ("mlp", (20,), 5), ("lstm", (4,), 30), ("vit", (3, 8, 8), 4)],
)
def test_what_widths_cost_follows_from_a_few_counts(model, shape, classes):
    net = build_model(model, shape, classes, 0)
    tally, generator = FlopCache(), torch.Generator().manual_seed(0)
    needed = count_models_to_cut(len(net.axes))
    for number in range(needed + 5):
        sizes = [int(torch.randint(1, a.size + 1, (), generator=generator)) for a in net.axes]
        plan = Plan({a.name: torch.arange(n) for a, n in zip(net.axes, sizes)})
        found = tally.count_forward(net, plan)
        if number >= needed:
            assert found == net.cut(plan).macs_forward
    assert tally.widths is not None


def test_a_formula_that_does_not_fit_is_not_used():
    net = build_model("lenet", IMAGES, 10, 0)
    wrong = {(("conv1", 3),): 1}
    assert verify_width_formula(FlopsByWidth(net), wrong) is None


@pytest.mark.parametrize("method", ["fedad", "feddrop", "fjord", "heterofl", "afd", "fedmp", "afd(filters=False)"])
def test_a_model_of_which_nothing_can_be_left_out_is_refused(method: str):
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(shoal.ShoalError, match="leaves out units, and this model has none"):
        shoal.run(method, model=flat, rounds=1)


def test_two_parts_that_cut_the_model_are_refused():
    with pytest.raises(shoal.ShoalError, match="fedad and fjord cannot be used together: both set which part"):
        shoal.run("fedad+fjord", rounds=1)
