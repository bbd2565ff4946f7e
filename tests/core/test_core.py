"""The pieces under the loop: streams, trees, plans, nets, one device's training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from shoal.core.batch import Batch
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.local.step import StepContext, StepRule, advance, compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Cut, Plan, Slicer, expand_unit_indices
from shoal.core.streams import RandomStreams
from shoal.core.types import Optimiser
from shoal.core.wire import Message, pack_bits, unpack_bits
from shoal.data.augment import ImageAugmentation, parse_augment
from shoal.data.dataset import read_digits as load_digits
from shoal.fleet.fleets import parse_fleet
from shoal.models import build_model
from shoal.models.lenet import lenet
from shoal.models.mlp import mlp
from shoal.runs.recipe import Recipe

# streams --------------------------------------------------------------------------------------------------------------


def test_streams_differ_by_every_coordinate_and_repeat():
    one = RandomStreams(1)
    numbers = {
        one.derive_seed("a", 0, 0),
        one.derive_seed("b", 0, 0),
        one.derive_seed("a", 1, 0),
        one.derive_seed("a", 0, 1),
        RandomStreams(2).derive_seed("a", 0, 0),
        one.derive_seed("a/0", 0, 0),
    }
    assert len(numbers) == 6
    assert torch.equal(
        torch.rand(3, generator=one.make_torch_generator("a", 2, 3)),
        torch.rand(3, generator=one.make_torch_generator("a", 2, 3)),
    )
    assert one.make_numpy_generator("a", 2, 3).random() == one.make_numpy_generator("a", 2, 3).random()


# trees ----------------------------------------------------------------------------------------------------------------

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.integers(-9, 9), max_size=4).map(lambda v: torch.tensor(v, dtype=torch.int32)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(trees)
def test_a_tree_survives_being_written(tmp_path_factory, made):
    from shoal.storage.files import read_tree, write_tree

    path = tmp_path_factory.mktemp("tree") / "tree.safetensors"
    write_tree(path, made)
    assert tree.is_same_tree(read_tree(path), made)


def test_a_tree_that_is_no_tree_cannot_be_written():
    with pytest.raises(TypeError, match="may hold"):
        tree.pack_tree({"x": {1, 2}})


def test_same_sees_every_difference():
    a = {"x": torch.zeros(2), "n": [1, (2.0,)]}
    assert tree.is_same_tree(a, {"x": torch.zeros(2), "n": [1, (2.0,)]})
    for b in (
        {"x": torch.zeros(2, dtype=torch.float64), "n": [1, (2.0,)]},
        {"x": torch.ones(2), "n": [1, (2.0,)]},
        {"x": torch.zeros(2), "n": [1, [2.0]]},
        {"x": torch.zeros(2), "n": [True, (2.0,)]},
        {"n": [1, (2.0,)], "x": torch.zeros(2)},
    ):
        assert not tree.is_same_tree(a, b)


# plans ----------------------------------------------------------------------------------------------------------------


def test_units_spread_over_spans_and_copies():
    axis = Axis("h", 3, ())
    assert expand_unit_indices(torch.tensor([0, 2]), axis, Cut("w", 0)).tolist() == [0, 2]
    assert expand_unit_indices(torch.tensor([0, 2]), axis, Cut("w", 0, span=2)).tolist() == [0, 1, 4, 5]
    assert expand_unit_indices(torch.tensor([0, 2]), axis, Cut("w", 0, copies=2)).tolist() == [0, 2, 3, 5]


units = st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True).map(lambda u: torch.tensor(sorted(u)))


@given(h=units, g=units, seed=st.integers(0, 99), masked=st.booleans())
def test_what_is_taken_is_placed_back_where_it_was(h, g, seed, masked):
    axes = (
        Axis("h", 5, (Cut("a", 0), Cut("b", 1, span=2))),
        Axis("g", 5, (Cut("b", 0, copies=2),)),
    )
    slicer = Slicer(axes, ("a", "b", "c"))
    make = torch.Generator().manual_seed(seed)
    full = {"a": torch.randn(5, 3, generator=make), "b": torch.randn(10, 10, generator=make), "c": torch.randn(2)}
    masks = {"a": torch.rand(5, 3, generator=make) < 0.5} if masked else {}
    plan = Plan({"h": h, "g": g}, masks)
    small = slicer.take(full, plan)
    assert small["b"].shape == (2 * len(g), 2 * len(h)) and torch.equal(small["c"], full["c"])
    back = slicer.place(small, full, plan)
    for name, value in full.items():
        covered = slicer.covered_mask(name, value, plan)
        assert covered is not None or name == "c"
        expected = value if covered is None else torch.where(covered, value, 0)
        assert torch.equal(back[name], expected)
        assert small[name].numel() == (value.numel() if covered is None else covered.sum())


@pytest.mark.parametrize(
    "make", [lambda: mlp((1, 8, 8), 10), lambda: lenet((3, 32, 32), 10), lambda: lenet((1, 28, 20), 7)]
)
def test_masked_and_sliced_models_are_the_same(make):
    """Law 3: logits, gradients on kept coordinates, and a whole local run."""
    net = make()
    net = replace(net, module=net.module.double())
    generator = torch.Generator().manual_seed(3)
    kept = {a.name: torch.randperm(a.size, generator=generator)[: a.size // 2 + 1].sort().values for a in net.axes}
    plan, small = Plan(kept), net.cut(Plan(kept))
    x = torch.randn(6, *net.input_shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, net.classes, (6,), generator=generator)
    cut = net.slicer.take(net.initial, plan)
    masked = net.slicer.place(cut, net.initial, plan)
    torch.testing.assert_close(net.forward(masked, x)[0], small.forward(cut, x)[0])
    covers = {k: net.slicer.covered_mask(k, masked[k], plan) for k in masked}
    masks = {k: m.double() for k, m in covers.items() if m is not None}
    lr = {"lr": torch.tensor(0.1, dtype=torch.float64)}
    ends = []
    for each, start, mask in ((net, masked, masks), (small, cut, {})):
        rule = StepRule(each, Method(), Optimiser(momentum=0.9, weight_decay=0.01))
        local_state = rule.init_state(start, {})
        for _ in range(3):
            local_state, _ = advance(
                rule,
                local_state,
                Batch(x, ((y, None),)),
                StepContext(start, {}, lr, {}, mask),
                compute_autograd_gradient,
            )
        ends.append(local_state.params)
    torch.testing.assert_close(net.slicer.take(ends[0], plan), ends[1])


# nets -----------------------------------------------------------------------------------------------------------------


def test_lenet_has_the_published_counts():
    net = lenet((3, 32, 32), 10)
    assert sum(p.numel() for p in net.initial.values()) == 62_006 and net.macs_forward == 651_720
    wide = lenet((3, 32, 32), 100)
    assert sum(p.numel() for p in wide.initial.values()) == 69_656 and wide.macs_forward == 659_280


def test_mlp_counts():
    net = mlp((1, 32, 32), 10)
    assert sum(p.numel() for p in net.initial.values()) == 132_490 and net.macs_forward == 1024 * 128 + 1280


def test_a_net_runs_with_any_parameters_and_never_trains_its_own():
    net = build_model("mlp", (1, 8, 8), 10, seed=1)
    before = {k: v.clone() for k, v in net.initial.items()}
    x = torch.randn(4, 1, 8, 8)
    zero = tree.make_zeros(net.initial)
    assert net.forward(zero, x)[0].abs().max() == 0
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    plain.load_state_dict(dict(zip(plain.state_dict(), net.initial.values())))
    torch.testing.assert_close(net.forward(net.initial, x)[0], plain(x))
    torch.testing.assert_close(net.forward(net.initial, x)[1], plain[:3](x))
    assert tree.is_same_tree(net.initial, before)


def test_first_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    one = build_model("lenet", (1, 8, 8), 10, seed=1).initial
    torch.manual_seed(6)
    drawn = torch.rand(1)
    torch.manual_seed(6)
    two = build_model("lenet", (1, 8, 8), 10, seed=1).initial
    assert tree.is_same_tree(one, two) and torch.equal(torch.rand(1), drawn)
    assert not tree.is_same_tree(one, build_model("lenet", (1, 8, 8), 10, seed=2).initial)


def batch_normed() -> Net:
    torch.manual_seed(0)
    return Net(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)).double(), (4,), 2)


def test_batch_norm_moves_its_buffers_as_an_ordinary_module_does():
    net = batch_normed()
    plain = batch_normed().module.train()
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.1)
    rule = StepRule(net, Method(), Optimiser())
    course = rule.init_state(net.initial, {})
    for _ in range(3):
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 2, (5,))
        optimiser.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimiser.step()
        scene = StepContext(net.initial, {}, {"lr": torch.tensor(0.1, dtype=torch.float64)}, {}, {})
        course, _ = advance(rule, course, Batch(x, ((y, None),)), scene, compute_autograd_gradient)
    torch.testing.assert_close(course.params | course.buffers, plain.state_dict())
    assert int(net.initial["1.num_batches_tracked"]) == 0


@pytest.mark.parametrize(
    "optimiser",
    [Optimiser(), Optimiser(0.9), Optimiser(0.5, 0.01), Optimiser(0, 0, 0.1), Optimiser(0.9, 0.1, 0.1)],
    ids=str,
)
def test_training_equals_a_plain_pytorch_loop(optimiser):
    net = build_model("lenet", (1, 8, 8), 10, seed=1)
    net = replace(net, module=net.module.double())
    plain = build_model("lenet", (1, 8, 8), 10, seed=1).module.double().train()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=optimiser.momentum, weight_decay=optimiser.weight_decay)
    rule = StepRule(net, Method(), optimiser)
    course = rule.init_state(net.initial, {})
    for _ in range(4):
        x, y = torch.randn(5, 1, 8, 8, dtype=torch.float64), torch.randint(0, 10, (5,))
        sgd.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        if optimiser.clip:
            nn.utils.clip_grad_norm_(plain.parameters(), optimiser.clip)
        sgd.step()
        scene = StepContext(net.initial, {}, {"lr": torch.tensor(0.1, dtype=torch.float64)}, {}, {})
        course, _ = advance(rule, course, Batch(x, ((y, None),)), scene, compute_autograd_gradient)
    torch.testing.assert_close(course.params, {k: v.detach() for k, v in plain.state_dict().items()})


def test_several_targets_share_a_loss():
    """Mixup's form: the loss of each list of targets with its weight."""
    net = build_model("mlp", (4,), 3, seed=0)
    score = StepRule(net, Method(), Optimiser()).make_scorer({})
    x, a, b = torch.randn(5, 4), torch.randint(0, 3, (5,)), torch.randint(0, 3, (5,))
    logits = net.forward(net.initial, x)[0]
    mixed = score(net.initial, Batch(x, ((a, torch.full((5,), 0.3)), (b, torch.full((5,), 0.7)))))
    torch.testing.assert_close(mixed.loss, 0.3 * F.cross_entropy(logits, a) + 0.7 * F.cross_entropy(logits, b))


def test_a_last_batch_of_one_is_dropped_where_batch_norm_would_fail():
    from shoal.core.local.schedule import make_schedule
    from shoal.core.types import Work

    def rows(n: int, mixes: bool) -> list[int]:
        return [len(r) for r in make_schedule(torch.arange(n), Work(2.0, 0, 4, 0.1), torch.Generator(), mixes)]

    assert rows(9, True) == [4, 4, 4, 4] and rows(9, False) == [4, 4, 1, 4, 4, 1]
    assert rows(6, True) == [4, 2, 4, 2] and rows(1, True) == [1, 1]


@given(n=st.integers(1, 30), batch=st.integers(1, 12), epochs=st.integers(1, 3))
def test_every_epoch_shows_every_sample_once(n, batch, epochs):
    from shoal.core.local.schedule import make_schedule
    from shoal.core.types import Work

    rows = make_schedule(torch.arange(100, 100 + n), Work(epochs, 0, batch, 0.1), torch.Generator(), False)
    assert len(rows) == epochs * rows.per_epoch
    assert rows.sizes == [len(r) for r in rows]
    for epoch in range(epochs):
        seen = torch.cat(list(rows)[epoch * rows.per_epoch : (epoch + 1) * rows.per_epoch])
        assert sorted(seen.tolist()) == list(range(100, 100 + n))


# wire -----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=40))
def test_bits_come_back(flags):
    mask = torch.tensor(flags, dtype=torch.bool)
    assert pack_bits(mask).nbytes == (len(flags) + 7) // 8
    assert torch.equal(unpack_bits(pack_bits(mask), mask.shape), mask)


def test_a_payload_is_as_long_as_its_tensors():
    message = Message(
        {"w": {"value": torch.zeros(3), "at": torch.zeros(3, dtype=torch.int32)}}, {"p": {"c": {"w": torch.ones(2)}}}
    )
    assert message.nbytes == len(message.to_bytes()) == 12 + 12 + 8


# data -----------------------------------------------------------------------------------------------------------------


def test_digits():
    digits = load_digits()
    assert digits.inputs.shape == (1437, 1, 8, 8) and digits.test_inputs.shape == (360, 1, 8, 8)
    assert digits.inputs.min() == 0 and digits.inputs.max() == 1
    counts = torch.bincount(torch.cat((digits.targets, digits.test_targets)))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    normal = digits.normalise()
    assert normal.inputs.mean().abs() < 1e-5 and normal.inputs.std().sub(1).abs() < 1e-4


def test_inputs_are_normalised_by_given_moments():
    """Pixels of 0 and 1 become -1 and 1 by a mean and a deviation of a half, and every channel may have its own."""
    digits = load_digits()
    half = digits.normalise("0.5:0.5")
    assert torch.equal(half.inputs, digits.inputs * 2 - 1)
    assert torch.equal(half.test_inputs, digits.test_inputs * 2 - 1)
    coloured = replace(digits, inputs=torch.ones(4, 3, 2, 2), test_inputs=torch.ones(1, 3, 2, 2))
    assert coloured.normalise("0,0.5,1:1,0.5,0.25").inputs[0, :, 0, 0].tolist() == [1, 1, 0]
    for text in ("0.5", "0.5:0", "a:b", "1,2:1", "nan:1", ":"):
        with pytest.raises(ShoalError, match="normalise_by"):
            Recipe().with_values(normalise_by=text)
    with pytest.raises(ShoalError, match="2 means, and inputs have 3 channels"):
        coloured.normalise("0,1:1,1")
    assert Recipe(normalise_by="0.5:0.5").normalises
    assert Recipe().fingerprint() != Recipe(normalise_by="0:1").fingerprint()


def read_one_step(augment: ImageAugmentation, batch: int) -> list[Tensor]:
    """Draws for one step of so many images."""
    words = torch.randint(2**32, (batch * augment.words,), generator=torch.Generator().manual_seed(1))
    return [drawn[0] for drawn in augment.read_draws(words, [batch], batch)]


def test_augmentation_moves_pixels_and_loses_none_but_at_the_border():
    flip, crop = parse_augment("flip"), parse_augment("crop:2")
    assert flip and crop
    x = torch.arange(2 * 3 * 6 * 6.0).view(2, 3, 6, 6)
    turned = flip.transform_images(x, read_one_step(flip, 2))
    assert all(torch.equal(t, o) or torch.equal(t, o.flip(-1)) for t, o in zip(turned, x))
    wide = F.pad(x, (2, 2, 2, 2))
    for shifted, source in zip(crop.transform_images(x, read_one_step(crop, 2)), wide):
        windows = [source[:, i : i + 6, j : j + 6] for i in range(5) for j in range(5)]
        assert any(torch.equal(shifted, w) for w in windows)


@pytest.mark.parametrize("text", ["spin", "crop", "crop:x", "crop:0", "flip:1", "crop:-1"])
def test_unknown_augmentations_are_refused(text):
    with pytest.raises(shoal.ShoalError, match="cannot be read"):
        parse_augment(text)


# whole runs -----------------------------------------------------------------------------------------------------------


def test_the_same_recipe_gives_the_same_run():
    one, two = (shoal.run("fedprox+scaffold", rounds=3, augment="flip,crop:1", epochs="1-3") for _ in range(2))
    assert one.history.equals_except_wall_time(two.history) and tree.is_same_tree(one.params, two.params)
    other = shoal.run("fedprox+scaffold", rounds=3, augment="flip,crop:1", epochs="1-3", seed=1)
    assert not tree.is_same_tree(one.params, other.params)


def test_compared_methods_see_the_same_devices_and_batches():
    plain, prox = shoal.run("fedavg", rounds=3), shoal.run("fedprox(mu=0.0)+fedavgm(beta=0.0)", rounds=3)
    assert plain.history["devices"] == prox.history["devices"]
    torch.testing.assert_close(plain.params, prox.params)


def test_dropout_layers_are_reproducible_and_leave_other_randomness_alone():
    from shoal.models import MODELS

    def dropping(shape, classes):
        net = mlp(shape, classes)
        net.module.add_module("relu", nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))
        return Net(net.module, shape, classes, net.axes, net.blocks)

    MODELS["dropping"] = dropping
    try:
        torch.manual_seed(1)
        one = shoal.run(model="dropping", rounds=2)
        torch.manual_seed(2)
        drawn = torch.get_rng_state()
        two = shoal.run(model="dropping", rounds=2)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert tree.is_same_tree(one.params, two.params) and not tree.is_same_tree(
            one.params, shoal.run(rounds=2).params
        )
    finally:
        del MODELS["dropping"]


def schedule_work(**values):
    """The work of 40 equal devices in every round."""
    from shoal.runs.build import make_work_schedule

    streams = RandomStreams(0)
    fleet = parse_fleet("uniform", streams, 40, 10)
    return make_work_schedule(Recipe().with_values(**values), streams, fleet, np.full(40, 10))


def test_learning_rate_decays_per_round():
    work = schedule_work(lr=0.2, lr_decay=0.5)
    assert [work(t, 0).lr for t in range(3)] == [0.2, 0.1, 0.05]


def test_unequal_work_is_drawn_anew_and_repeats():
    work = schedule_work(epochs="1-5")
    drawn = [[work(t, d).epochs for d in range(40)] for t in range(2)]
    assert set(drawn[0]) == {1, 2, 3, 4, 5} and drawn[0] != drawn[1]
    assert drawn[1] == [work(1, d).epochs for d in range(40)]
    steps = schedule_work(steps="5-6")
    assert {steps(0, d).steps for d in range(20)} == {5, 6}
    part = schedule_work(epochs=0.5)
    assert part(0, 0).epochs == 0.5


def test_a_run_learns():
    result = shoal.run("fedavg", rounds=25, split="iid", epochs=2)
    assert result.accuracy is not None and result.accuracy > 0.85
    module = result.module()
    digits = load_digits()
    right = (module(digits.test_inputs).argmax(1) == digits.test_targets).float().mean()
    assert float(right) == pytest.approx(result.accuracy)


@settings(max_examples=8, deadline=None)
@given(
    devices=st.integers(1, 60),
    batch=st.integers(1, 200),
    beta=st.sampled_from(["iid", "dirichlet:0.05", "dirichlet:5"]),
)
def test_any_split_trains(devices, batch, beta):
    history = shoal.run("scaffold", devices=devices, sample=min(devices, 3), batch=batch, split=beta, rounds=2).history
    assert np.isfinite(history.last("loss"))
