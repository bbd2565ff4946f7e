"""The model zoo: published counts, slices, blocks, many models at once, and models of the user's own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

import shoal
from shoal.core import wire
from shoal.core.batch import Batch, Samples
from shoal.core.compose import Method
from shoal.core.local.device import TrainingSetup
from shoal.core.local.step import StepContext, StepRule, advance, compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.flops import count_macs
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.streams import RandomStreams
from shoal.core.task import Task
from shoal.core.types import Job, Optimiser, Work
from shoal.engines.serial import train_device
from shoal.engines.slices import SlicedSetups
from shoal.models import MODELS, build_model, describe_model
from shoal.models.lstm import LSTM, lstm
from shoal.models.resnet import build_resnet, find_inner_channels
from shoal.models.user_model import build_user_net, load_model_file
from shoal.models.vgg import vgg11
from shoal.models.vit import Attention

IMAGES = (3, 32, 32)


def parameters(net: Net) -> int:
    return sum(net.initial[name].numel() for name in net.trainable)


# counts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "classes", "weights", "macs"),
    [
        ("lenet", IMAGES, 10, 62_006, 651_720),
        ("lenet", IMAGES, 100, 69_656, 659_280),
        ("cnn", IMAGES, 10, 122_570, 4_548_608),
        ("cnn", IMAGES, 100, 128_420, 4_554_368),
        ("vgg11", IMAGES, 10, 9_750_922, 153_293_824),
        ("vgg11", IMAGES, 100, 9_797_092, 153_339_904),
        ("resnet18", IMAGES, 200, 11_276_232, 557_977_600),
        ("resnet18-gn", IMAGES, 200, 11_276_232, 555_520_000),
        ("resnet18-nobias", IMAGES, 10, 11_173_962, 557_880_320),
        ("resnet18-nobias-gn", IMAGES, 10, 11_173_962, 555_422_720),
        ("resnet18-imagenet", IMAGES, 10, 11_181_642, 37_016_576 + 202_752),
        ("resnet18-imagenet-gn", IMAGES, 10, 11_181_642, 37_016_576),
        ("cnn-pfllib", IMAGES, 10, 878_538, 7_825_920),
        ("cnn-pfllib", (1, 28, 28), 10, 582_026, 4_267_008),
        ("conv2cifar", IMAGES, 10, 797_952, 14_693_248),
        ("conv2cifar", IMAGES, 100, 815_232, 14_710_528),
        ("mlp", (1, 28, 28), 10, 101_770, 101_632),
        ("mlp-256", (1, 28, 28), 10, 203_530, 203_264),
        ("mlp-1024", (1, 28, 28), 10, 132_490, 132_352),
        ("mlp-1024-256", (1, 28, 28), 10, 264_970, 264_704),
        ("lstm", (35,), 10_000, 7_454_800, 155_400_000),
        ("lstm", (35,), 28_914, 18_822_114, 353_997_000),
        ("vit", IMAGES, 10, 141_898, 10_683_008),
    ],
)
def test_published_counts(name, shape, classes, weights, macs):
    with torch.device("meta"):
        net = MODELS[name](shape, classes)
        assert parameters(net) == weights and net.macs_forward == macs


def test_counts_on_real_tensors_are_those_without():
    for name in ("lenet", "resnet18-imagenet", "vit"):
        net = build_model(name, IMAGES, 10, seed=0)
        assert (parameters(net), net.macs_forward) == describe_model(name)


def test_every_model_is_described():
    for name, make in MODELS.items():
        weights, macs = describe_model(name)
        assert weights > 60_000 and macs > 100_000 and (make.__doc__ or "").strip()


def test_the_bytes_that_papers_state():
    at = {name: describe_model(name)[0] * 4 for name in ("resnet18-imagenet", "mlp-1024", "mlp-1024-256", "lstm")}
    assert round(at["resnet18-imagenet"] / 2**20, 3) == 42.655
    assert at["mlp-1024"] == 529_960 and at["mlp-1024-256"] == 1_059_880
    assert round(at["lstm"] / 1e6, 3) == 29.819


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_costs_four_per_number(training):
    layer = nn.BatchNorm2d(3).train(training)
    x = torch.randn(5, 3, 4, 4)
    assert count_macs(lambda: layer(x)) == 4 * x.numel()
    assert count_macs(lambda: layer(x.clone().requires_grad_()).sum().backward()) == 4 * x.numel()


def test_fused_layers_cost_what_their_products_cost():
    """A user's own model may use them; torch alone counts 0 for each."""
    x = torch.randn(3, 7, 12)
    layers = nn.LSTM(12, 20, 2, batch_first=True)
    assert count_macs(lambda: layers(x)) == 3 * 7 * 80 * (12 + 20 + 20 + 20)
    assert count_macs(lambda: layers(x)[0].sum().backward()) == 3 * 3 * 7 * 80 * (12 + 20 + 20 + 20)
    encoder = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True, dropout=0).eval()
    products = 3 * (7 * (4 * 12 * 12 + 2 * 12 * 24) + 2 * 7 * 7 * 12)
    assert count_macs(lambda: encoder(x)) == products
    with torch.no_grad():
        assert count_macs(lambda: encoder(x)) == products
        assert count_macs(lambda: encoder.self_attn(x, x, x)) == products - 3 * 7 * 2 * 12 * 24


class GatedLayer(nn.Module):
    """The gated layer of Llama between norms, and what else has a backward pass of its own."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.norm, self.up, self.gate, self.down = (nn.RMSNorm(12), *(nn.Linear(12, 12) for _ in range(3)))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.activation(self.gate(self.norm(x))) * self.up(x))
        return x + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [nn.SiLU, nn.Mish, nn.GELU, nn.Hardswish, nn.Softplus, nn.Tanh])
def test_what_is_counted_has_the_same_bits(activation, dtype):
    torch.manual_seed(0)
    layer, x = GatedLayer(activation()).to(dtype), torch.randn(5, 7, 12, dtype=dtype)
    seen: list[tuple[Tensor, ...]] = []

    def step() -> None:
        y = layer(x)
        seen.append((y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))))

    step()
    one, attention = 5 * 7 * 12 * 12, 2 * 5 * 7 * 7 * 12
    assert count_macs(lambda: layer(x)) == 3 * one + attention
    assert count_macs(step) == 3 * (3 * one + attention) - one  # x needs no gradient through `up`
    assert all(map(torch.equal, *seen[:2]))


# slices ---------------------------------------------------------------------------------------------------------------

small: dict[str, Callable[[], Net]] = {
    "mlp": lambda: MODELS["mlp"]((1, 6, 6), 5),
    "mlp-1024": lambda: MODELS["mlp-1024"]((1, 28, 20), 5),
    "lenet": lambda: MODELS["lenet"]((1, 28, 20), 7),
    "cnn": lambda: MODELS["cnn"]((3, 32, 36), 6),
    "cnn-pfllib": lambda: MODELS["cnn-pfllib"]((1, 28, 20), 6),
    "conv2cifar": lambda: MODELS["conv2cifar"]((1, 28, 28), 6),
    "vgg11": lambda: vgg11((1, 28, 28), 6, width=8),
    "resnet18": lambda: build_resnet((3, 16, 16), 6, 8, bias=True),
    "resnet18-nobias": lambda: build_resnet((3, 16, 16), 6, 8),
    "resnet18-imagenet": lambda: build_resnet((3, 64, 64), 6, 8, small=False),
    "resnet18-gn": lambda: build_resnet((3, 16, 16), 6, 8, norm=partial(nn.GroupNorm, 2)),
    "vit": lambda: MODELS["vit"]((1, 16, 12), 6),
    "lstm": lambda: lstm((5,), 11, width=9),
}
whole = [name for name in small if not name.endswith("gn")]


def double(name: str) -> Net:
    torch.manual_seed(7)
    net = small[name]()
    return replace(net, module=net.module.double())


def some_batch(net: Net, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if net.token_inputs:
        words = torch.randint(0, net.classes, (2, size, *net.input_shape), generator=generator)
        return words[0], words[1]
    x = torch.randn(size, *net.input_shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, net.classes, (size,), generator=generator)


def some_plan(net: Net, generator: torch.Generator) -> Plan:
    """Keep from one unit to all of them, differently on each axis."""
    sizes = [int(torch.randint(1, a.size + 1, (), generator=generator)) for a in net.axes]
    kept = {a.name: torch.randperm(a.size, generator=generator)[:n].sort().values for a, n in zip(net.axes, sizes)}
    return Plan(kept)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", whole)
def test_masked_and_sliced_models_are_the_same(name, seed):
    """Law 3: logits, gradients on kept coordinates, and a local run with BatchNorm in training."""
    net = double(name)
    generator = torch.Generator().manual_seed(seed)
    plan = some_plan(net, generator)
    small = net.cut(plan)
    assert {a.name: a.size for a in small.axes} == {k: len(v) for k, v in plan.kept.items()}
    x, y = some_batch(net, 4, generator)
    batch = Batch(x, ((y, None),))
    start = {k: v + 0.1 * torch.rand_like(v) if v.is_floating_point() else v for k, v in net.initial.items()}
    cut = net.slicer.take(start, plan)
    masked = net.slicer.place(cut, start, plan)
    torch.testing.assert_close(net.forward(masked, x)[0], small.forward(cut, x)[0])

    covers = {k: net.slicer.covered_mask(k, masked[k], plan) for k in masked}
    masks = {k: m.double() for k, m in covers.items() if m is not None}
    lr = {"lr": torch.tensor(0.05, dtype=torch.float64)}
    ends, slopes = [], []
    for each, begin, mask in ((net, masked, masks), (small, cut, {})):
        rule = StepRule(each, Method(), Optimiser(momentum=0.9, weight_decay=0.01))
        course = rule.init_state(begin, {})
        slopes.append(compute_autograd_gradient(rule.make_scorer(course.buffers), course.params, batch)[0])
        for _ in range(2):
            course, _ = advance(rule, course, batch, StepContext(begin, {}, lr, {}, mask), compute_autograd_gradient)
        ends.append(course.params | course.buffers)
    torch.testing.assert_close(net.slicer.take(slopes[0], plan), slopes[1])
    torch.testing.assert_close(net.slicer.take(ends[0], plan), ends[1])


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("name", whole)
def test_a_whole_local_run_of_the_masked_model_is_that_of_the_sliced_one(name, seed):
    """Law 3: two epochs of unequal batches, from what a device is sent to what it answers; costs as well."""
    net = double(name)
    generator = torch.Generator().manual_seed(seed)
    plan = some_plan(net, generator)
    x, y = some_batch(net, 10, generator)
    site = TrainingSetup(
        Method(), net, RandomStreams(0), Optimiser(0.5), lambda device: Samples(x, y, torch.arange(10))
    )
    message = wire.pack_message(net.initial, {}, plan, net.slicer, list(net.initial))
    told = []
    for level in (False, True):
        job = Job(0, 0, replace(plan, level=level), message, Work(2.0, 0, 6, 0.001))
        task = SlicedSetups(site).narrow_task(Task(site, job, {}))
        assert (task.setup is site) == (not level)
        told.append(train_device(task).outcome)
    masked, sliced = told
    for key, entry in masked.message.body.items():
        torch.testing.assert_close(entry["value"], sliced.message.body[key]["value"], rtol=0, atol=1e-9)
    assert (masked.macs_forward, masked.message.nbytes) == (sliced.macs_forward, sliced.message.nbytes)
    assert sliced.macs_forward == net.cut(plan).macs_forward and masked.loss == pytest.approx(sliced.loss)


@pytest.mark.parametrize("name", whole)
def test_axes_leave_inputs_and_classes_alone_and_reach_every_hidden_width(name):
    net = double(name)
    generator = torch.Generator().manual_seed(0)
    one = net.cut(Plan({a.name: torch.tensor([a.size // 2]) for a in net.axes}))
    x, _ = some_batch(net, 2, generator)
    assert one.forward(one.initial, x)[0].shape == net.forward(net.initial, x)[0].shape
    for axis in net.axes:
        for part in axis.cuts:
            assert net.initial[part.tensor].shape[part.dim] == axis.size * part.span * part.copies
    touched = {part.tensor for axis in net.axes for part in axis.cuts}
    if not name.startswith(("resnet", "vit")):
        assert set(net.trainable) - touched <= {"fc2.bias", "fc3.bias", "fc.bias"}


def test_residual_channels_and_groups_are_no_axes():
    net = build_resnet((3, 16, 16), 6, 8)
    assert [a.name for a in net.axes] == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert all(len(a.cuts) == 1 + 4 + 1 for a in net.axes)
    assert find_inner_channels(small["resnet18-gn"]().module) == ()


def by_hand(net: Net) -> int:
    """The products of one pass, from the shapes of the weights and of what the layers return."""
    total = 0

    def note(layer, inputs, out):
        nonlocal total
        match layer:
            case nn.Conv2d():
                total += out.shape[2:].numel() * layer.weight.numel()
            case nn.Linear():
                total += prod(out.shape[:-1]) * layer.weight.numel()
            case nn.BatchNorm2d():
                total += 4 * out.numel()
            case LSTM():
                total += out.shape[1] * (layer.weight_ih.numel() + layer.weight_hh.numel())
            case Attention():
                total += 2 * inputs[0].shape[1] ** 2 * layer.out.weight.shape[1]

    handles = [layer.register_forward_hook(note) for layer in net.module.modules()]
    x, _ = some_batch(net, 1, torch.Generator())
    net.forward(net.initial, x)
    for handle in handles:
        handle.remove()
    return total


@pytest.mark.parametrize("name", whole)
def test_a_cut_model_costs_what_its_shapes_say(name):
    net = double(name)
    assert net.macs_forward == by_hand(net)
    plan = some_plan(net, torch.Generator().manual_seed(5))
    cut = net.cut(plan)
    assert cut.macs_forward == by_hand(cut) < net.macs_forward
    assert parameters(cut) == sum(net.slicer.take(net.initial, plan)[k].numel() for k in net.trainable)


# blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", small)
def test_blocks_cover_the_model_and_run_in_order(name):
    net = double(name)
    for tensor in net.initial:
        assert sum(block.owns(tensor) for block in net.blocks) == 1, tensor
    children = [child for block in net.blocks for child in block.children]
    assert children == [child for child, _ in net.module.named_children()]
    assert len({block.name for block in net.blocks}) == len(net.blocks) and net.blocks[-1].name == "head"
    x, _ = some_batch(net, 2, torch.Generator().manual_seed(1))
    out = x
    for child in children:
        out = net.module.eval().get_submodule(child)(out)
    torch.testing.assert_close(out, net.forward(net.initial, x)[0])


def test_the_six_blocks_of_resnet18():
    with torch.device("meta"):
        net = MODELS["resnet18-nobias"](IMAGES, 10)
    sizes = [sum(net.initial[k].numel() for k in net.trainable if b.owns(k)) for b in net.blocks]
    assert [b.name for b in net.blocks] == ["stem", "layer1", "layer2", "layer3", "layer4", "head"]
    assert sizes == [1_856, 147_968, 525_568, 2_099_712, 8_393_728, 5_130]


# many models at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", small)
def test_many_models_train_as_one_at_a_time(name):
    net = double(name)
    generator = torch.Generator().manual_seed(2)
    noise = lambda v: 0.05 * torch.rand(2, *v.shape, generator=generator, dtype=v.dtype)  # noqa: E731
    starts = {k: v + noise(v) if v.is_floating_point() else v.expand(2) for k, v in net.initial.items()}
    pairs = [some_batch(net, 3, generator) for _ in range(2)]
    x, y = (torch.stack(part) for part in zip(*pairs))
    rule = StepRule(net, Method(), Optimiser())

    def step(tensors, x, y):
        params, buffers = ({k: tensors[k] for k in keys} for keys in (net.trainable, net.buffers))
        score = rule.make_scorer(buffers)

        def loss(params):
            scored = score(params, Batch(x, ((y, None),)))
            return scored.loss, scored.buffers

        slopes, (value, after) = grad_and_value(loss, has_aux=True)(params)
        return {k: p - 0.1 * slopes[k] for k, p in params.items()}, after, value

    together = vmap(step)(starts, x, y)
    for i in range(2):
        alone = step({k: v[i].clone() for k, v in starts.items()}, x[i], y[i])
        at = tuple({k: v[i] for k, v in part.items()} for part in together[:2])
        torch.testing.assert_close((*at, together[2][i]), alone, rtol=1e-9, atol=1e-9)


def test_many_models_cost_as_much_as_one_after_the_other():
    net = double("resnet18")
    x, _ = some_batch(net, 3, torch.Generator().manual_seed(1))
    many = {k: torch.stack([v, v]) for k, v in net.initial.items()}
    for training in (False, True):
        run = lambda p, training=training: net.forward(p, x, training=training)[0]  # noqa: E731
        assert count_macs(lambda: vmap(run)(many)) == 2 * count_macs(lambda: run(net.initial))


# the language model ---------------------------------------------------------------------------------------------------


def test_the_lstm_is_torchs():
    torch.manual_seed(0)
    theirs = nn.LSTM(6, 5, 2, batch_first=True).double()
    ours = nn.Sequential(LSTM(6, 5), LSTM(5, 5)).double()
    for i, layer in enumerate(ours):
        layer.load_state_dict({k[:-3]: v for k, v in theirs.state_dict().items() if k.endswith(f"_l{i}")})
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x)[0])
    slopes = [
        torch.autograd.grad(y.square().sum(), list(m.parameters()))
        for m, y in ((ours, ours(x)), (theirs, theirs(x)[0]))
    ]
    torch.testing.assert_close(*slopes)


def test_the_lstm_has_two_derivatives():
    layer = LSTM(3, 2).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    names, weights = zip(*((k, v.detach().requires_grad_()) for k, v in layer.named_parameters()))
    run = lambda *given: torch.func.functional_call(layer, dict(zip(names, given)), (x,))  # noqa: E731
    assert torch.autograd.gradcheck(run, weights) and torch.autograd.gradgradcheck(run, weights)


def test_the_lstm_starts_like_torchs():
    torch.manual_seed(0)
    layer = LSTM(30, 40)
    assert all(0.95 < float(p.detach().abs().max()) * 40**0.5 <= 1 for p in layer.parameters())


def test_a_word_sees_only_the_words_before_it():
    net = double("lstm")
    one, _ = some_batch(net, 2, torch.Generator().manual_seed(0))
    two = one.clone()
    two[:, 3:] = 0
    a, b = (net.forward(net.initial, x)[0] for x in (one, two))
    assert a.shape == (2, 5, 11) and torch.equal(a[:, :3], b[:, :3]) and not torch.equal(a[:, 3:], b[:, 3:])


# inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (2, 36, 44)])
def test_models_take_other_sizes(name, shape):
    with torch.device("meta"):
        if name == "lstm":
            with pytest.raises(shoal.ShoalError, match="needs sequences of words"):
                MODELS[name](shape, 4)
        else:
            net = MODELS[name](shape, 4)
            assert net.forward(net.initial, torch.zeros(2, *shape))[0].shape == (2, 4)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("lstm", "mlp", "mlp-256")])
def test_models_of_images_refuse_rows(name):
    with pytest.raises(shoal.ShoalError, match=r"needs images, got inputs of shape \(12,\)") as caught:
        build_model(name, (12,), 3, seed=0)
    assert caught.value.kind.name == "no-data"


def test_the_transformer_refuses_what_it_cannot_divide():
    with pytest.raises(shoal.ShoalError, match="30x28 does not divide") as caught:
        build_model("vit", (3, 30, 28), 3, seed=0)
    assert caught.value.kind.name == "no-data"


# models of the user's own ---------------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc = nn.Linear(64, classes)
    def forward(self, x):
        return self.fc(x.flatten(1))

class Both(Net):
    def __init__(self, shape, n):
        assert tuple(shape) == (1, 8, 8)
        super().__init__(n)

class Turned(Net):
    def __init__(self, num_classes, hidden=3, *, input_shape=None):
        assert tuple(input_shape) == (1, 8, 8) and hidden == 3
        super().__init__(num_classes)

class Bare(Net):
    def __init__(self, hidden=3):
        super().__init__(10)

class Words(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.embed = nn.Embedding(classes, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.fc = nn.Linear(5, classes)
    def forward(self, x):
        return self.fc(self.lstm(self.embed(x))[0])

def made(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, classes))

def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

def own_net(input_shape, classes):
    from shoal.models.mlp import mlp
    return mlp(input_shape, classes, hidden=3)

ready = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
number = 3

def nothing(): pass
def raises(classes): raise ValueError("no such thing")
def leaves(classes): raise SystemExit(3)
def many(a, b, c): pass
def wants_width(classes, width): pass
class Locked(Net):
    def __init__(self, classes):
        super().__init__(classes)
        import threading
        self.lock = threading.Lock()
class Reversed(Net):
    def __init__(self, classes, input_shape):
        assert tuple(input_shape) == (1, 8, 8)
        super().__init__(classes)
class Wrong(Net):
    def __init__(self):
        super().__init__(9)
class Pair(Net):
    def forward(self, x):
        return super().forward(x), x
class Breaks(Net):
    def forward(self, x):
        return self.fc(x)
class Flat(Net):
    def forward(self, x):
        return super().forward(x).sum(0)
class Labels(Net):
    def forward(self, x):
        return super().forward(x).long()
class Empty(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :10]
class Frozen(Net):
    def __init__(self, classes):
        super().__init__(classes)
        self.requires_grad_(False)
class Tied(Net):
    def __init__(self, classes):
        super().__init__(classes)
        self.again = self.fc
        self.other = nn.Linear(64, classes)
        self.other.weight = self.fc.weight
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "my_models.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("name", ["Net", "Both", "Turned", "Bare", "Reversed", "made", "lazy", "own_net", "ready"])
def test_a_model_of_a_file(own, name):
    net = build_model(f"{own}:{name}", (1, 8, 8), 10, seed=1)
    assert net.forward(net.initial, torch.zeros(3, 1, 8, 8))[0].shape == (3, 10)
    assert net.macs_forward > 0 and not net.token_inputs


def test_a_file_is_called_with_a_seed_of_its_own(own):
    one, two = (build_model(f"{own}:Net", (1, 8, 8), 10, seed=1).initial for _ in range(2))
    assert tree.is_same_tree(one, two) and not tree.is_same_tree(
        one, build_model(f"{own}:Net", (1, 8, 8), 10, seed=2).initial
    )


def test_a_file_that_changed_is_read_again(own):
    assert parameters(load_model_file(f"{own}:made", (1, 8, 8), 10)) == 65 * 5 + 60
    own.write_text(OWN.replace("64, 5), nn.ReLU(), nn.Linear(5,", "64, 6), nn.ReLU(), nn.Linear(6,"))
    assert parameters(load_model_file(f"{own}:made", (1, 8, 8), 10)) == 65 * 6 + 70


def test_blocks_of_an_own_sequence(own):
    net = load_model_file(f"{own}:made", (1, 8, 8), 10)
    assert [b.children for b in net.blocks] == [("0", "1", "2"), ("3",)]


def test_an_own_language_model(own):
    net = load_model_file(f"{own}:Words", (6,), 11)
    assert net.token_inputs and net.macs_forward == 6 * (20 * 9 + 55)


def test_an_own_model_trains(own):
    result = shoal.run(model=f"{own}:Net", rounds=2, devices=4, sample=2)
    assert result.history.last("accuracy") > 0.1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Nett", "has nothing called 'Nett'"),
        ("number", "is no class and no function"),
        ("nothing", "it is nothing and no torch.nn.Module"),
        ("raises", "it raises ValueError: no such thing when it is made"),
        ("leaves", "it raises SystemExit: 3 when it is made"),
        ("many", r"it wants 3 values \(a, b, c\)"),
        ("wants_width", r"it wants 2 values \(classes, width\)"),
        ("Locked", "it cannot be copied"),
        ("Wrong", r"it returns \(2, 9\) for 2 samples and 10 classes"),
        ("Pair", "it returns a tuple and no tensor"),
        ("Breaks", "it raises RuntimeError: mat1 and mat2"),
        ("Flat", r"it returns \(10,\)"),
        ("Labels", "it returns whole numbers"),
        ("Empty", "it has no parameters to train"),
        ("Frozen", "it has no parameters to train"),
    ],
)
def test_mistakes_of_own_models_are_told_in_a_sentence(own, name, says):
    with pytest.raises(shoal.ShoalError, match=says) as caught:
        build_model(f"{own}:{name}", (1, 8, 8), 10, seed=0)
    told = str(caught.value)
    assert "\n" not in told and str(own) in told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "There is no file"),
        ("class Net(:", "cannot be loaded in line 1"),
        ("import not_there_at_all", "No module named 'not_there_at_all'"),
        ("raise SystemExit", "cannot be loaded"),
        ("\x00", "cannot be loaded"),
        ("", "has nothing called 'Net'. It has nothing at all."),
    ],
)
def test_files_that_hold_no_model(tmp_path, text, says):
    path = tmp_path / "file.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(shoal.ShoalError) as caught:
        build_model(f"{path}:Net", (1, 8, 8), 10, seed=0)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def make_shared_module(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 10)]
    module = nn.Sequential(*layers)
    if kind == "frozen":
        layers[1].requires_grad_(False)
    if kind == "tied":
        module[3] = nn.Linear(8, 8)
        module.append(nn.Linear(10, 10))
        module.append(module[5])
    return module


@pytest.mark.parametrize("kind", ["plain", "frozen", "tied"])
def test_several_nets_may_have_one_module(kind):
    module, x = make_shared_module(kind), torch.rand(4, 1, 8, 8)
    first = Net(module, (1, 8, 8), 10)
    before = first.forward(first.initial, x)[0]
    other = tree.map_tensors(lambda t: t + 1 if t.is_floating_point() else t, first.initial)
    first.forward(other, x, training=True)  # what the call leaves in the module is not what a net begins with
    for second in (Net(module, (1, 8, 8), 10), replace(first, half=True), Net(module, (1, 8, 8), 10)):
        assert second.trainable == first.trainable and tree.is_same_tree(second.initial, first.initial)
        assert second.frozen.keys() == first.frozen.keys() and second.ties == first.ties
        assert second.dtype == torch.float32 and second.macs_forward == first.macs_forward
        if not second.half:
            assert torch.equal(second.forward(second.initial, x)[0], before)
        assert torch.equal(first.forward(first.initial, x)[0], before)
    roles = Net(module, (1, 8, 8), 10, roles={"3.weight": "frozen"})
    roles.forward(roles.initial, x)
    assert Net(module, (1, 8, 8), 10).trainable == first.trainable


def test_a_module_that_a_net_has_in_use_is_refused_as_a_model():
    result = shoal.run(model=make_shared_module("plain"), devices=4, sample=2, rounds=1)
    with pytest.raises(shoal.ShoalError, match="a run or a net has it in use.*result.module()"):
        shoal.run(model=result.net.module, devices=4, sample=2, rounds=1)
    shoal.run(model=result.module(), devices=4, sample=2, rounds=1)


def test_one_module_may_be_compared_under_several_methods():
    module, keys = make_shared_module("plain"), {"devices": 4, "sample": 2, "rounds": 1, "steps": "1"}
    one = [shoal.run(method, model=module, **keys) for method in ("fedavg", "scaffold", "fedavg")]
    assert tree.is_same_tree(one[0].params, one[2].params)
    two = shoal.compare(["fedavg", "scaffold"], model=module, **keys)
    assert tree.is_same_tree(two.results["scaffold"][0].params, one[1].params)
    assert all(isinstance(own, nn.Parameter) for own in module.parameters())


def test_a_module_is_copied_and_stays_the_users():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    net = build_user_net(module, (1, 8, 8), 10)
    net.forward(tree.make_zeros(net.initial), torch.ones(2, 1, 8, 8))
    assert module(torch.ones(2, 1, 8, 8)).abs().max() > 0
    assert tree.is_same_tree(net.initial, build_user_net(module, (1, 8, 8), 10).initial)


def test_a_module_by_hand():
    net = build_user_net(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8), 10)
    assert parameters(net) == 650 and net.axes == ()
    with pytest.raises(shoal.ShoalError, match="The model cannot be used: it is a int and no torch.nn.Module"):
        build_user_net(3, (1, 8, 8), 10)
