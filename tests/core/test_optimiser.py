"""Local optimisers: the numbers of torch.optim, clipping by role, micro-batches, what is refused."""

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.core.batch import Batch
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.local.accumulate import accumulate_gradients
from shoal.core.local.device import SLOTS_KEY
from shoal.core.local.step import (
    StepContext,
    StepRule,
    advance,
    compute_autograd_gradient,
    compute_func_gradient,
    gate_padded_step,
)
from shoal.core.lr_schedule import LrSchedule
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.optimiser import Optimiser, clip_apart
from shoal.core.part import Part
from shoal.models import build_model
from shoal.parts.fedprox import FedProx
from shoal.parts.scaffold import Scaffold
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import read_recipe_file
from shoal.testing.laws import check_part
from shoal.testing.toy import toy
from tests.one_weight import one_weight

STEPS, LR = 6, 0.01
KINDS = [
    Optimiser(0.9, nesterov=True),
    Optimiser(0.9, 0.1, 0.5, nesterov=True),
    Optimiser(kind="adam"),
    Optimiser(kind="adam", weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6),
    Optimiser(kind="adamw", weight_decay=0.1),
    Optimiser(kind="adamw", weight_decay=0.1, clip=0.5, beta1=0.0),
]


def make_torch_optimiser(optimiser: Optimiser, module: nn.Module) -> torch.optim.Optimizer:
    decay: dict[str, Any] = {"lr": LR, "weight_decay": optimiser.weight_decay}
    if optimiser.kind == "sgd":
        return torch.optim.SGD(module.parameters(), **decay, momentum=optimiser.momentum, nesterov=optimiser.nesterov)
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimiser.kind]
    return make(module.parameters(), **decay, betas=(optimiser.beta1, optimiser.beta2), eps=optimiser.eps)


def train_by_torch(optimiser: Optimiser, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """A LeNet after some steps of torch.optim, on other samples in each."""
    module = build_model("lenet", (1, 8, 8), 10, seed=1).module.double().train()
    stepper = make_torch_optimiser(optimiser, module)
    for inputs, targets in zip(x, y):
        stepper.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        if optimiser.clip:
            nn.utils.clip_grad_norm_(module.parameters(), optimiser.clip)
        stepper.step()
    return {k: v.detach() for k, v in module.state_dict().items()}


def make_context(net: Net, step: int = 0, steps: int = STEPS, lr: float = LR) -> StepContext:
    numbers = {"lr": lr, "step": step, "steps": steps}
    return StepContext(net.initial, {}, {k: torch.tensor(v, dtype=net.dtype) for k, v in numbers.items()}, {}, {})


@pytest.mark.parametrize("optimiser", KINDS, ids=str)
def test_many_devices_in_one_call_train_as_torch_optim_trains_each(optimiser):
    """In double precision: Adam makes a whole step of the last digit of a gradient that is nearly 0."""
    torch.manual_seed(0)
    x, y = torch.randn(3, STEPS, 8, 1, 8, 8).double(), torch.randint(0, 10, (3, STEPS, 8))
    net = build_model("lenet", (1, 8, 8), 10, seed=1)
    net = replace(net, module=net.module.double())
    rule = StepRule(net, Method(), optimiser)

    def train_device(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        state = rule.init_state(net.initial, {})
        for step in range(STEPS):
            batch = Batch(x[step], ((y[step], None),))
            state, _ = advance(rule, state, batch, make_context(net, step), compute_func_gradient)
        return state.params

    found = torch.vmap(train_device)(x, y)
    for device in range(3):
        expected = train_by_torch(optimiser, x[device], y[device])
        for name, value in expected.items():
            torch.testing.assert_close(found[name][device], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("optimiser", [replace(each, clip=0.0) for each in KINDS if each.is_adaptive], ids=str)
def test_gradients_of_any_size_lead_to_the_same_weights_in_single_precision(optimiser):
    torch.manual_seed(0)
    module = nn.Linear(20, 30)
    params = {k: v.detach().clone() for k, v in module.named_parameters()}
    stepper, slots = make_torch_optimiser(optimiser, module), optimiser.init_slots(params)
    for _ in range(50):
        grads = {k: torch.randn_like(v) * 10 ** (3 * torch.randn_like(v)) for k, v in params.items()}
        for name, parameter in module.named_parameters():
            parameter.grad = grads[name].clone()
        stepper.step()
        direction, slots = optimiser.step(optimiser.add_weight_decay(grads, params), slots, params)
        params = {k: p - LR * direction[k] for k, p in params.items()}
        torch.testing.assert_close(params, dict(module.named_parameters()), rtol=0, atol=1e-6)


def test_a_parameter_without_dimensions_keeps_its_shape():
    optimiser, params = Optimiser(kind="adamw", weight_decay=0.1), {"scale": torch.tensor(2.0)}
    direction, slots = optimiser.step({"scale": torch.tensor(3.0)}, optimiser.init_slots(params), params)
    assert direction["scale"].shape == () and slots["exp_avg"]["scale"].shape == ()
    assert float(direction["scale"]) == pytest.approx(1 + 0.1 * 2)


def test_adamw_by_hand():
    # the first step of Adam has the length lr whatever the gradient is, and the decay takes lr * 0.5 * w
    optimiser = Optimiser(kind="adamw", weight_decay=0.5, eps=0.0)
    assert one_weight([], [[7]], optimiser=optimiser)[0] == pytest.approx([0.1])
    # second step: gradients g1 = 0 - 7, g2 = 0.1 - 7 give about (g1 + g2) / 2 over their root mean square
    g1, g2, (b1, b2) = -7.0, -6.9, (0.9, 0.999)
    mean = ((1 - b1) * (b1 * g1 + g2)) / (1 - b1**2)
    square = ((1 - b2) * (b2 * g1**2 + g2**2)) / (1 - b2**2)
    expected = 0.1 - 0.1 * (mean / square**0.5 + 0.5 * 0.1)
    sent = one_weight([], [[7]], steps=lambda _: 2, optimiser=optimiser)[0]
    assert sent == pytest.approx([expected], rel=1e-9)


@pytest.mark.parametrize("optimiser", [Optimiser(0.5), Optimiser(kind="adamw", weight_decay=0.1)], ids=str)
def test_a_padded_step_leaves_the_slots_alone(optimiser):
    net = build_model("mlp", (4,), 3, seed=0)
    rule = StepRule(net, Method(), optimiser)
    batch = Batch(torch.randn(5, 4), ((torch.randint(0, 3, (5,)), None),))
    old, _ = advance(rule, rule.init_state(net.initial, {}), batch, make_context(net), compute_autograd_gradient)
    new, _ = advance(rule, old, batch, make_context(net, 1), compute_autograd_gradient)
    assert not tree.is_same_tree(new.slots, old.slots)
    assert tree.is_same_tree(gate_padded_step(torch.tensor(False), new, old).slots, old.slots)
    assert tree.is_same_tree(gate_padded_step(torch.tensor(True), new, old).slots, new.slots)


def test_what_a_plan_masks_does_not_move_by_adamw_and_its_decay():
    net = build_model("mlp", (4,), 3, seed=0)
    rule = StepRule(net, Method(), Optimiser(kind="adamw", weight_decay=10.0))
    name = net.trainable[0]
    mask = {name: torch.ones_like(net.initial[name]).index_fill(0, torch.tensor([0]), 0.0)}
    batch = Batch(torch.randn(5, 4), ((torch.randint(0, 3, (5,)), None),))
    state = rule.init_state(net.initial, {})
    for step in range(3):
        context = make_context(net, step)._replace(mask=mask)
        state, _ = advance(rule, state, batch, context, compute_autograd_gradient)
    assert torch.equal(state.params[name][0], net.initial[name][0])
    assert (state.params[name][1:] != net.initial[name][1:]).all()


# clipping -------------------------------------------------------------------------------------------------------------
def test_shared_and_personal_tensors_are_clipped_by_norms_of_their_own():
    update = {"a": torch.tensor([3.0, 0.0]), "own": torch.tensor([0.0, 0.5]), "b": torch.tensor([4.0])}
    clipped = clip_apart(update, 1.0, [("own",)])
    assert list(clipped) == list(update)
    # the shared norm is 5, the personal one 0.5
    torch.testing.assert_close(clipped["a"], torch.tensor([0.6, 0.0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(clipped["b"], torch.tensor([0.8]), rtol=1e-6, atol=0)
    assert torch.equal(clipped["own"], update["own"])
    together = clip_apart(update, 1.0, [])
    assert float(together["own"][1]) == pytest.approx(0.5 / 25.25**0.5, rel=1e-5)


def test_a_step_clips_what_a_plan_trains_alone():
    """A weight that is 0 and not trained has a gradient all the same, and no device would know its norm."""
    net = build_model("mlp", (4,), 3, seed=0)
    masks = {k: (torch.rand(net.initial[k].shape) < 0.3).float() for k in net.trainable}
    params = net.initial | {k: net.initial[k] * mask for k, mask in masks.items()}
    batch = Batch(10 * torch.randn(5, 4), ((torch.randint(0, 3, (5,)), None),))
    context = make_context(net)
    for plan_mask, states in ((masks, {}), ({}, {"other": {"mask": masks}})):
        rule = StepRule(net, Method(), Optimiser(clip=0.1))
        begun = rule.init_state(params, states)
        state, _ = advance(rule, begun, batch, context._replace(mask=plan_mask), compute_autograd_gradient)
        moved = torch.cat([(state.params[k] - params[k]).flatten() for k in net.trainable]) / LR
        assert float(moved.norm()) == pytest.approx(0.1, rel=1e-3)


def test_a_step_clips_what_is_personal_alone():
    net = build_model("mlp", (4,), 3, seed=0)
    head = net.trainable[-1]
    own = replace(net, roles={head: "personal"})
    batch = Batch(10 * torch.randn(5, 4), ((torch.randint(0, 3, (5,)), None),))
    moved = []
    for each in (net, own):
        rule = StepRule(each, Method(), Optimiser(clip=0.1))
        state, _ = advance(rule, rule.init_state(net.initial, {}), batch, make_context(net), compute_autograd_gradient)
        moved.append({k: (state.params[k] - net.initial[k]).norm() / LR for k in net.trainable})
    assert float(torch.stack(list(moved[0].values())).norm()) == pytest.approx(0.1, rel=1e-3)
    assert float(moved[0][head]) < 0.09 and float(moved[1][head]) == pytest.approx(0.1, rel=1e-3)


# micro-batches --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gradient", [compute_autograd_gradient, compute_func_gradient])
@pytest.mark.parametrize("size", [1, 3, 4, 11, 20])
@pytest.mark.parametrize("padding", [0, 5])
def test_micro_batches_add_up_to_the_gradient_of_the_batch(gradient, size, padding):
    torch.manual_seed(0)
    net = build_model("lenet", (1, 8, 8), 10, seed=1)
    weight = torch.tensor([1.0] * (11 - padding) + [0.0] * padding) if padding else None
    batch = Batch(torch.randn(11, 1, 8, 8), ((torch.randint(0, 10, (11,)), None),), weight)
    anchor = {k: v + 0.1 for k, v in net.initial.items()}
    local = toy("fedprox").local(part="fedprox")._replace(anchor=anchor)
    scorer = FedProx(mu=0.5).objective(StepRule(net, Method(), Optimiser()).make_scorer({}), local)
    params = dict(net.initial)
    expected, whole = gradient(scorer, params, batch)
    found, joined = accumulate_gradients(gradient, size)(scorer, params, batch)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    torch.testing.assert_close(joined.loss, whole.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(joined.logits, whole.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(joined.features, whole.features, rtol=0, atol=1e-5)


def test_micro_batches_see_no_more_than_their_samples():
    seen = []

    def gradient(scorer, params, batch):
        seen.append(len(batch.inputs))
        return compute_autograd_gradient(scorer, params, batch)

    net = build_model("mlp", (4,), 3, seed=0)
    rule = StepRule(net, Method(), Optimiser(micro_batch=4))
    batch = Batch(torch.randn(10, 4), ((torch.randint(0, 3, (10,)), None),))
    advance(rule, rule.init_state(net.initial, {}), batch, make_context(net), gradient)
    assert seen == [4, 4, 2]


# refusals -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["scaffold", "fednova", "fedda", "fedprox+scaffold"])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_parts_made_for_sgd_are_refused_beside_others(method, kind):
    with pytest.raises(ShoalError, match=f"cannot be used with the optimiser {kind}: it takes the way") as error:
        assemble_run(Recipe(method=method, optimiser=kind))
    assert error.value.kind.name == "clash" and "\n" not in error.value.problem


def test_feddh_is_refused_beside_adam_only_where_it_reads_steps():
    with pytest.raises(ShoalError, match="the optimiser is adam") as error:
        toy("feddh", optimiser=Optimiser(kind="adam"))
    assert error.value.kind.name == "clash"
    assert toy("feddh(gradient_from='client_grad')", optimiser=Optimiser(kind="adam")).play(2)


def test_parts_that_take_steps_for_equal_are_refused_beside_a_schedule_over_them():
    with pytest.raises(ShoalError, match="fedda cannot be used with a learning rate that changes over local steps"):
        assemble_run(Recipe(method="fedda", local_lr_schedule="cosine"))
    assert assemble_run(Recipe(method="fedda", lr_schedule="cosine:10"))


@pytest.mark.parametrize("method", ["feddecorr", "mixup", "cutmix", "fedacd"])
def test_parts_that_mix_a_batch_are_refused_beside_micro_batches(method):
    with pytest.raises(ShoalError, match=f"{method} cannot be used with accumulate: what it computes") as error:
        assemble_run(Recipe(method=method, accumulate=2))
    assert error.value.kind.name == "clash"


def test_batch_norm_is_refused_beside_micro_batches():
    given = shoal.hand_over_objects({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))})
    with pytest.raises(ShoalError, match="accumulate cannot be used with batch norm"):
        assemble_run(Recipe(**given, accumulate=2))


@pytest.mark.parametrize(
    "values, why",
    [
        ({"optimiser": "adam", "momentum": 0.9}, "momentum 0.9 is given with the optimiser adam"),
        ({"optimiser": "adamw", "nesterov": True}, "nesterov is given with the optimiser adamw"),
        ({"nesterov": True}, "nesterov is given without momentum"),
        ({"optimiser": "adamax"}, "adamax"),
        ({"lr_schedule": "cosine"}, "lr_schedule is 'cosine'"),
        ({"lr_schedule": "step:30"}, "lr_schedule is 'step:30'"),
        ({"lr_schedule": "cosine:ten"}, "lr_schedule is 'cosine:ten'"),
        ({"local_lr_schedule": "sine"}, "local_lr_schedule is 'sine'"),
        ({"local_lr_schedule": "linear:5:2"}, "local_lr_schedule is 'linear:5:2'"),
        ({"local_lr_schedule": "linear:0"}, "local_lr_schedule is 'linear:0'"),
        ({"local_lr_schedule": ":3"}, "local_lr_schedule is ':3'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values, why):
    with pytest.raises(ShoalError, match=why):
        assemble_run(Recipe(**values))


# schedules and parts --------------------------------------------------------------------------------------------------
def test_scaffold_divides_by_the_sum_of_learning_rates():
    """Its control variate is the mean gradient of the steps, weighed by their learning rates."""
    optimiser = Optimiser(schedule=LrSchedule("linear"))
    run = toy(Scaffold(), sizes=(4,), lr=0.1, optimiser=optimiser)
    device, local = run.device(part="scaffold"), run.local(part="scaffold")
    # two steps: lr = 0.1 and 0.05
    assert float(device.lr_sum) == pytest.approx(0.15)
    before = run.params
    run.play(1)
    c_k = run.memory(0)["scaffold"]["c_k"]
    for name in local.net.trainable:
        torch.testing.assert_close(c_k[name], (before[name] - run.params[name]) / 0.15)


def test_parts_see_the_learning_rate_of_the_step():
    seen: list[float] = []

    @dataclass(frozen=True)
    class Looks(Part):
        def step(self, update, state, scored, local):
            seen.append(float(local.numbers["lr"]))
            return update, state

    toy(Looks(), sizes=(8,), lr=0.1, optimiser=Optimiser(schedule=LrSchedule("linear", warmup=2))).play(1)
    # four steps: up to lr in two, then down in two
    assert seen == pytest.approx([0.05, 0.1, 0.1, 0.05])


def test_fednova_counts_shorter_steps_as_less():
    from shoal.parts.fednova import compute_effective_steps

    # a constant gradient enters with 1, then 1.5 and 1.75, times 1, 2/3 and 1/3
    optimiser = Optimiser(0.5, schedule=LrSchedule("linear"))
    assert compute_effective_steps(3, optimiser) == pytest.approx(1 + 1.5 * 2 / 3 + 1.75 / 3)
    # nesterov goes along g + 0.5 v, with v = 1 and 1.5
    assert compute_effective_steps(2, Optimiser(0.5, nesterov=True)) == pytest.approx(1.5 + 1.75)


# state over rounds ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Remembers(Part):
    """Momentum goes on from round to round."""

    keeps_slots: ClassVar = True


def test_a_part_may_keep_the_state_of_the_optimiser():
    # one step a round, gradients -1, -0.9: v = -1, then -0.5 - 0.9 = -1.4
    kept, _, _ = one_weight([Remembers()], [[1]], rounds=2, optimiser=Optimiser(0.5))
    assert kept == pytest.approx([0.1, 0.1 + 0.14])
    fresh, _, _ = one_weight([], [[1]], rounds=2, optimiser=Optimiser(0.5))
    assert fresh == pytest.approx([0.1, 0.1 + 0.09])


def test_a_part_that_keeps_it_keeps_the_laws():
    """Engines agree on what devices remember, with momentum, and a stopped run goes on with it."""
    check_part(Remembers(), whole=False)


def test_the_kept_state_counts_the_steps_of_adam():
    run = toy(Remembers(), sizes=(5, 3), optimiser=Optimiser(kind="adam"))
    run.play(3)
    assert [float(run.memory(device)[SLOTS_KEY]["step"]) for device in (0, 1)] == [9.0, 6.0]
    assert SLOTS_KEY not in toy(compose([FedProx()]).parts, optimiser=Optimiser(kind="adam")).memory(0)


# groups of learning rates ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_groups_are_parameter_groups_of_torch(kind):
    """Two steps with factors of 10 on biases, of 0 on the first layer's weight, as torch has them in groups."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    net = Net(module, (4,), 2)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0])
    optimiser = replace(kind, lr_groups=(("*.bias", 10.0), ("0.*", 0.0), ("*.bias", 2.0)))
    rule, start = StepRule(net, Method(), optimiser), net.initial
    state = rule.init_state(start, {})
    context = StepContext(start, {}, {"lr": torch.tensor(LR, dtype=torch.float64)}, {}, {})
    for _ in range(2):
        state, _ = advance(rule, state, Batch(x, ((y, None),)), context, compute_autograd_gradient)
    net.reset_slots()
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model.load_state_dict(start)
    factors = {"0.weight": 0.0, "0.bias": 10.0, "2.weight": 1.0, "2.bias": 10.0}
    by_torch = make_torch_optimiser(kind, model)
    groups = [{"params": [p], "lr": LR * factors[name]} for name, p in model.named_parameters()]
    taken = signature(type(by_torch)).parameters
    by_torch = type(by_torch)(groups, **{k: v for k, v in by_torch.defaults.items() if k in taken})
    for _ in range(2):
        by_torch.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if kind.clip:
            nn.utils.clip_grad_norm_(model.parameters(), kind.clip)
        by_torch.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state.params[name], value, atol=1e-10, rtol=0)


def test_a_group_of_no_parameter_and_a_part_that_takes_one_rate_for_granted_are_refused():
    with pytest.raises(ShoalError, match=r"lr_groups names 'head\.\*', and no parameter"):
        assemble_run(Recipe().with_values(lr_groups={"head.*": 10.0}))
    with pytest.raises(ShoalError, match="scaffold cannot be used with lr_groups"):
        assemble_run(Recipe().with_values(lr_groups="fc2.*=10", method="scaffold"))
    for text in ("head", "=2", "head=x", "head=-1", "head=nan"):
        with pytest.raises(ShoalError, match="lr_groups is"):
            Recipe().with_values(lr_groups=text)


def test_groups_can_be_a_table_of_a_recipe_file(tmp_path):
    (tmp_path / "recipe.toml").write_text('lr_groups = {"fc2.*" = 10.0, "fc1.*" = 1}\n')
    assert read_recipe_file(tmp_path / "recipe.toml") == {"lr_groups": {"fc2.*": 10.0, "fc1.*": 1}}
    recipe = Recipe().with_values(**read_recipe_file(tmp_path / "recipe.toml"))
    assert recipe.lr_groups == "fc2.*=10.0,fc1.*=1"
