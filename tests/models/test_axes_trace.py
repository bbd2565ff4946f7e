"""Axes of strangers' models: which are found, and that a model cut along them is the model with those units masked."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.core.model import tree
from shoal.core.model.feature_maps import TrackPoolingInputs
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Cut, Plan
from shoal.core.model.tree import Params
from shoal.models import MODELS
from shoal.models.axes_check import is_lawful
from shoal.models.axes_trace import trace_axes
from shoal.models.resnet import build_resnet
from shoal.models.user_model import build_user_net
from shoal.models.vgg import vgg11
from shoal.parts.lib.filter_choice import choose_kept_filters
from shoal.parts.lib.unit_scores import compute_map_ranks, score_neurons

CLASSES = 5

# strangers' models, made with the sizes of the axes that they have ---------------------------------------------------


class Plain(nn.Module):
    """Convolutions with BatchNorm, then flattened maps."""

    def __init__(self, first: int = 6, second: int = 4, hidden: int = 7):
        super().__init__()
        self.conv1 = nn.Conv2d(3, first, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(first)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(second, affine=False)
        self.fc1 = nn.Linear(second * 3 * 3, hidden)
        self.fc2 = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.act(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))[:, :, :3, :3]
        return F.log_softmax(self.fc2(torch.tanh(self.fc1(x.flatten(1)))), 1)


class Residual(nn.Module):
    """Two stages whose widths meet in sums."""

    def __init__(self, stage1: int = 4, inner: int = 5, stage2: int = 6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stage1, 3, padding=1), nn.BatchNorm2d(stage1), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(stage1, inner, 3, padding=1), nn.BatchNorm2d(inner), nn.ReLU())
        self.back = nn.Sequential(nn.Conv2d(inner, stage1, 3, padding=1), nn.BatchNorm2d(stage1))
        self.down = nn.Conv2d(stage1, stage2, 1, 2, bias=False)
        self.wide = nn.Sequential(nn.Conv2d(stage1, stage2, 3, 2, 1), nn.BatchNorm2d(stage2), nn.PReLU(stage2))
        self.fc = nn.Linear(stage2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.back(self.inner(x)) + x)
        return self.fc(F.relu(self.wide(x) + self.down(x)).mean((2, 3)))


class Noisy(nn.Module):
    """A dropout that is no layer, before a BatchNorm."""

    def __init__(self, hidden: int = 6):
        super().__init__()
        self.fc1 = nn.Linear(6, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.fc2 = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(F.dropout(self.fc1(x), 0.5, self.training)))


class Single(nn.Module):
    """It computes in single precision whatever it is given."""

    def __init__(self, hidden: int = 6):
        super().__init__()
        self.fc1 = nn.Linear(6, hidden)
        self.fc2 = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x.float()).relu())


class Words(nn.Module):
    """An embedding and recurrent layers of any of torch's kinds, read at every position or at the last one."""

    def __init__(self, width: int = 6, hidden: int = 4, kind: Callable = nn.LSTM, last: bool = False, **options):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, width)
        self.rnn = kind(width, hidden, batch_first=True, **options)
        self.fc = nn.Linear((self.rnn.proj_size or hidden) * (1 + self.rnn.bidirectional), CLASSES)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.rnn(self.embed(x))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        last = torch.cat([hidden[-2], hidden[-1]], 1) if self.rnn.bidirectional else hidden[-1]
        return self.fc(last if self.last else out)


class Positions(nn.Module):
    """Words with places; all positions are flattened, so that the units of one position lie next to each other."""

    def __init__(self, width: int = 4, hidden: int = 5):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, width)
        self.place = nn.Parameter(torch.zeros(1, 3, width))
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(3 * hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.embed(x) + self.place).relu().flatten(1))


class Transformer(nn.Module):
    def __init__(self, hidden: int = 12, **options):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, hidden, batch_first=True, **options)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(self.embed(x)).mean(1))


class Attention(nn.Module):
    """Attention written by hand after a norm that is no layer; heads and width are numbers in its forward."""

    def __init__(self, hidden: int = 7):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.fc1 = nn.Linear(8, hidden)
        self.fc2 = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(self.embed(x), (8,))
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return self.fc2(F.gelu(self.fc1(x)))


class Groups(nn.Module):
    """GroupNorm and LayerNorm mix units; the last hidden layer is free of them."""

    def __init__(self, hidden: int = 4):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.GroupNorm(2, 6)
        self.fc1 = nn.Linear(6, 7)
        self.norm1 = nn.LayerNorm(7)
        self.fc2 = nn.Linear(7, hidden)
        self.fc3 = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(self.norm1(self.fc1(self.norm(self.conv(x)).amax((2, 3)))))))


class Joined(nn.Module):
    """Two halves that are read as one, and a width after them."""

    def __init__(self, after: int = 6):
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3)
        self.right = nn.Conv2d(3, 4, 3)
        self.both = nn.Conv2d(8, after, 1)
        self.fc = nn.Linear(after, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.both(torch.cat([self.left(x), self.right(x)], 1)).relu().mean((2, 3)))


class Mobile(nn.Module):
    """A depthwise convolution goes along with what it is given; a grouped one is left out."""

    def __init__(self, first: int = 6, up: int = 4):
        super().__init__()
        self.deep = nn.Conv2d(first, first, 3, padding=1, groups=first)
        self.conv = nn.Conv2d(3, first, 3)
        self.point = nn.Conv2d(first, 8, 1)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2)
        self.up = nn.ConvTranspose2d(8, up, 2)
        self.fc = nn.Linear(up, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.point(self.deep(self.conv(x)).relu())).relu()
        return self.fc(self.up(x).relu().mean((2, 3)))


class Signals(nn.Module):
    """A convolution over time, and a norm of each unit alone."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.conv = nn.Conv1d(2, width, 3)
        self.norm = nn.InstanceNorm1d(width, affine=True)
        self.fc = nn.Linear(width * 6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).relu().flatten(1))


class Branching(nn.Module):
    """What runs depends on the data, and the width is written into the forward."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 4)
        self.fc2 = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if hidden.sum() > 0:
            hidden = hidden.flip(1)
        return self.fc2(hidden.view(-1, 4))


class Sorted(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).sort(1).values)


class Detached(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.fc2(self.fc1(x)).detach().numpy())


def mlp(first: int = 7, second: int = 6) -> nn.Module:
    layers = (nn.Linear(12, first), nn.Sigmoid(), nn.Dropout(), nn.Linear(first, second), nn.Linear(second, CLASSES))
    return nn.Sequential(nn.Flatten(), *layers)


IMAGE, WORDS = (3, 8, 8), (3,)
STRANGERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], dict[str, int]]] = {
    "plain": (Plain, IMAGE, {"conv1": 6, "conv2": 4, "fc1": 7}),
    "residual": (Residual, IMAGE, {"stem.0": 4, "inner.0": 5, "down": 6}),
    "mlp": (mlp, (3, 4), {"1": 7, "4": 6}),
    "noisy": (Noisy, (6,), {"fc1": 6}),
    "lstm": (Words, WORDS, {"embed": 6, "rnn": 4}),
    "lstm-last": (partial(Words, last=True), WORDS, {"embed": 6, "rnn": 4}),
    "lstm-deep": (partial(Words, num_layers=2, dropout=0.1), WORDS, {"embed": 6, "rnn": 4}),
    "lstm-both": (partial(Words, bidirectional=True, num_layers=2), WORDS, {"embed": 6, "rnn": 4}),
    "lstm-both-last": (partial(Words, bidirectional=True, last=True), WORDS, {"embed": 6, "rnn": 4}),
    "lstm-projected": (partial(Words, proj_size=3, bias=False), WORDS, {"embed": 6}),
    "gru": (partial(Words, kind=nn.GRU, last=True), WORDS, {"embed": 6, "rnn": 4}),
    "rnn": (partial(Words, kind=nn.RNN, bias=False), WORDS, {"embed": 6, "rnn": 4}),
    "positions": (Positions, WORDS, {"embed": 4, "fc1": 5}),
    "transformer": (Transformer, WORDS, {"layer.linear1": 12}),
    "transformer-first": (partial(Transformer, norm_first=True), WORDS, {"layer.linear1": 12}),
    "attention": (Attention, WORDS, {"fc1": 7}),
    "groups": (Groups, IMAGE, {"fc2": 4}),
    "joined": (Joined, IMAGE, {"both": 6}),
    "mobile": (Mobile, IMAGE, {"conv": 6, "up": 4}),
    "signals": (Signals, (2, 8), {"conv": 4}),
    "branching": (Branching, (6,), {}),
    "sorted": (Sorted, (6,), {}),
    "detached": (Detached, (6,), {}),
}
CUTTABLE = [name for name, (_, _, axes) in STRANGERS.items() if axes]


def stranger(name: str, *sizes: int) -> Net:
    torch.manual_seed(3)
    make, shape, _ = STRANGERS[name]
    return build_user_net(make(*sizes).double(), shape, CLASSES)


def axes_in(net: Net) -> dict[str, Axis]:
    return {axis.name: axis for axis in net.axes}


# which are found ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRANGERS)
def test_which_axes_are_found(name):
    assert {axis.name: axis.size for axis in stranger(name).axes} == STRANGERS[name][2]


def test_a_sum_is_one_axis_with_all_that_meets_in_it():
    axes = axes_in(stranger("residual"))
    norm = ("weight", "bias", "running_mean", "running_var")
    made = {Cut(f"{conv}.{key}", 0) for conv in ("stem.0", "back.0") for key in ("weight", "bias")}
    normed = {Cut(f"{bn}.{key}", 0) for bn in ("stem.1", "back.1") for key in norm}
    read = {Cut(f"{conv}.weight", 1, reads=True) for conv in ("inner.0", "down", "wide.0")}
    assert set(axes["stem.0"].cuts) == made | normed | read and axes["stem.0"].tap == "into inner.0"
    assert Cut("wide.2.weight", 0) in axes["down"].cuts and axes["down"].tap == "into fc"


def test_what_a_unit_of_each_kind_owns():
    plain = axes_in(stranger("plain"))
    assert plain["conv2"].cuts[-1] == Cut("fc1.weight", 1, span=9, reads=True)
    assert [plain[name].tap for name in ("conv1", "conv2", "fc1")] == ["into conv2", "into fc1", ""]
    net, x = stranger("plain"), torch.randn(4, *IMAGE).double()
    assert torch.equal(seen_at(net, "into fc1", x), seen_at(net, "bn2", x).relu())
    assert axes_in(stranger("positions"))["fc1"].cuts[-1] == Cut("fc2.weight", 1, copies=3, reads=True)
    words = axes_in(stranger("lstm-both"))
    ends = [f"l{layer}{way}" for layer in (0, 1) for way in ("", "_reverse")]
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    assert set(words["rnn"].cuts) == {
        *(Cut(f"rnn.{kind}_{end}", 0, copies=4) for kind in kinds for end in ends),
        *(Cut(f"rnn.weight_hh_{end}", 1, reads=True) for end in ends),
        *(Cut(f"rnn.weight_ih_{end}", 1, copies=2, reads=True) for end in ends[2:]),
        Cut("fc.weight", 1, copies=2, reads=True),
    }
    assert {c for c in words["embed"].cuts if c.reads} == {Cut(f"rnn.weight_ih_{e}", 1, reads=True) for e in ends[:2]}


def test_the_channels_of_a_stage_are_seen_where_its_first_reader_reads_them():
    """ResNet's ReLU runs twice in a block: what it makes of the sum is also what the whole block puts out."""
    net = build_resnet(IMAGE, CLASSES, 4)
    found = {axis.name: axis for axis in trace_axes(net.module, IMAGE, False)}
    stages = {"conv1": "relu"} | {f"layer{i}.0.conv2": f"layer{i}.0" for i in (2, 3, 4)}
    inner = {f"{axis.name}.conv1": axis.tap for axis in net.axes}
    assert found.keys() == (stages | inner).keys()
    x = torch.randn(2, *IMAGE)
    for name, known in (stages | inner).items():
        assert torch.equal(seen_at(net, found[name].tap, x), seen_at(net, known, x))
    assert all(set(found[f"{axis.name}.conv1"].cuts) == set(axis.cuts) for axis in net.axes)


def seen_at(net: Net, tap: str, x: Tensor) -> Tensor:
    with TrackPoolingInputs():
        return net.forward(net.initial, x, (tap,))[2][tap]


@pytest.mark.parametrize(
    "net",
    [
        lambda: MODELS["mlp"]((1, 6, 6), 5),
        lambda: MODELS["lenet"]((1, 28, 20), 7),
        lambda: MODELS["cnn"]((3, 32, 36), 6),
        lambda: MODELS["cnn-pfllib"]((1, 28, 20), 6),
        lambda: MODELS["conv2cifar"]((1, 28, 28), 6),
        lambda: vgg11((1, 28, 28), 6, width=4),
    ],
)
def test_axes_that_a_model_states_are_those_that_are_found(net):
    stated = net()
    found = build_user_net(stated.module, stated.input_shape, stated.classes)
    of = lambda net: {(axis.name, axis.size, bool(axis.tap), frozenset(axis.cuts)) for axis in net.axes}  # noqa: E731
    assert of(found) == of(stated)
    x = torch.randn(2, *stated.input_shape)
    for one, other in zip(found.axes, stated.axes):
        assert not one.tap or torch.equal(seen_at(stated, one.tap, x), seen_at(stated, other.tap, x))


@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-nobias-gn"])
def test_group_norm_leaves_none(name):
    assert trace_axes(MODELS[name]((3, 16, 16), 6).module, (3, 16, 16), False) == ()


# what its units are judged by ----------------------------------------------------------------------------------------


class Viewed(nn.Module):
    """A convolution of 3 filters, what is done with its maps, and a layer that reads them."""

    def __init__(self, then: Callable[["Viewed", Tensor], Tensor], reader: nn.Module, maker: nn.Module | None = None):
        super().__init__()
        self.conv = maker or nn.Conv2d(3, 3, 3, padding=1)
        self.pool, self.act, self.reader, self.fc = nn.MaxPool2d(2), nn.ReLU(), reader, nn.LazyLinear(CLASSES)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        x = self.reader(self.then(self, self.conv(x)))
        return self.fc((x[0] if isinstance(x, tuple) else x).flatten(1))


def conv2() -> nn.Module:
    return nn.Conv2d(3, 4, 1)


VIEWS: dict[str, tuple[Callable, Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "function": (lambda m, x: F.relu(x), conv2, torch.relu),
    "method": (lambda m, x: x.relu(), conv2, torch.relu),
    "in place": (lambda m, x: F.relu(x, inplace=True), conv2, torch.relu),
    "by hand": (lambda m, x: x * torch.sigmoid(x), conv2, F.silu),
    "sliced": (lambda m, x: F.relu(x)[:, :, :3, :3], conv2, torch.relu),
    "pooled by a function": (lambda m, x: F.max_pool2d(F.relu(x), 2), conv2, torch.relu),
    "pooled by a layer": (lambda m, x: m.pool(F.relu(x)), conv2, torch.relu),
    "pooled twice": (lambda m, x: m.pool(F.avg_pool2d(F.relu(x), 2)), conv2, torch.relu),
    "pooled by layers": (lambda m, x: m.pool(m.act(x)), conv2, torch.relu),
    "pooled first": (lambda m, x: F.relu(F.max_pool2d(x, 2)), conv2, lambda x: F.relu(F.max_pool2d(x, 2))),
    "pooled first, in place": (
        lambda m, x: F.relu(F.max_pool2d(x, 2), inplace=True),
        conv2,
        lambda x: F.relu(F.max_pool2d(x, 2)),
    ),
    "dropped out": (lambda m, x: F.dropout2d(F.gelu(x), 0.5, m.training), conv2, F.gelu),
    "flattened": (lambda m, x: F.relu(x).flatten(1), lambda: nn.Linear(192, 4), torch.relu),
    "viewed": (lambda m, x: F.relu(x).view(len(x), -1), lambda: nn.Linear(192, 4), torch.relu),
    "mean": (lambda m, x: F.elu(x).mean((2, 3)), lambda: nn.Linear(3, 4), F.elu),
    "pooled to one": (lambda m, x: F.adaptive_avg_pool2d(F.elu(x), 1).flatten(1), lambda: nn.Linear(3, 4), F.elu),
    "nothing": (lambda m, x: x, conv2, lambda x: x),
    "no maps": (lambda m, x: F.relu(x.amax((2, 3))), lambda: nn.Linear(3, 4), lambda x: x),
}


@pytest.mark.parametrize("name", VIEWS)
def test_filters_are_judged_by_what_the_next_layer_reads_before_pooling(name):
    """Where there is no map after the activation, as in the last case, by the maps of the convolution."""
    then, reader, expected = VIEWS[name]
    torch.manual_seed(0)
    module = Viewed(then, reader())
    x = torch.randn(6, *IMAGE)
    module(x)
    net = build_user_net(module, IMAGE, CLASSES)
    axis = axes_in(net)["conv"]
    made = F.conv2d(x, net.initial["conv.weight"], net.initial["conv.bias"], padding=1)
    torch.testing.assert_close(seen_at(net, axis.tap, x), expected(made), rtol=1e-4, atol=1e-6)
    assert torch.equal(score_neurons(net, net.initial, x)["conv"], compute_map_ranks(seen_at(net, axis.tap, x)))


def test_sums_and_depthwise_convolutions_are_judged_where_they_are_read():
    net, x = stranger("residual"), torch.randn(4, *IMAGE).double()
    assert torch.equal(seen_at(net, "into fc", x), (seen_at(net, "wide", x) + seen_at(net, "down", x)).relu())
    net, axes = stranger("mobile"), axes_in(stranger("mobile"))
    assert [axes[name].tap for name in ("conv", "up")] == ["into point", "into fc"]
    assert torch.equal(seen_at(net, "into point", x), seen_at(net, "deep", x).relu())


def test_a_filter_that_never_gets_through_the_activation_goes_first():
    """The first filter has the richest map before the ReLU and an empty one after it; the second is a mere edge."""
    net = build_user_net(Viewed(lambda m, x: F.max_pool2d(F.relu(x), 2), conv2()), IMAGE, CLASSES)
    x = torch.rand(6, *IMAGE)
    params = {k: v.clone() for k, v in net.initial.items()}
    params["conv.weight"][0], params["conv.bias"][0] = -params["conv.weight"][0].abs(), -1.0
    params["conv.weight"][1], params["conv.bias"][1] = 0.0, 1.0
    params["conv.weight"][2], params["conv.bias"][2] = params["conv.weight"][2].abs(), 1.0
    found = score_neurons(net, params, x)
    assert found["conv"].tolist() == pytest.approx([0.0, 1 / 8, 1.0])
    kept = choose_kept_filters(net, params, found, {axis.name: 0.34 for axis in net.axes})
    assert kept["conv"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("maker", "reader", "shape", "as_matrix"),
    [
        (lambda: nn.Conv1d(2, 3, 3), lambda: nn.Conv1d(3, 4, 1), (2, 9), lambda x: x.unsqueeze(2)),
        (lambda: nn.Conv3d(1, 3, 2), lambda: nn.Conv3d(3, 4, 1), (1, 4, 4, 4), lambda x: x.flatten(2, 3)),
        (lambda: nn.ConvTranspose2d(2, 3, 2), conv2, (2, 4, 4), lambda x: x),
    ],
)
def test_signals_and_volumes_have_ranks_too(maker, reader, shape, as_matrix):
    torch.manual_seed(0)
    module = Viewed(lambda m, x: F.relu(x), reader(), maker())
    x = torch.randn(5, *shape)
    module(x)
    net = build_user_net(module, shape, CLASSES)
    expected = torch.linalg.matrix_rank(as_matrix(module.conv(x).relu()))
    most = min(as_matrix(module.conv(x)).shape[-2:])
    torch.testing.assert_close(score_neurons(net, net.initial, x)["conv"], expected.float().mean(0) / most)


@pytest.mark.parametrize(
    "method", ["hrank(at=2, rate=0.4)", "fedap(at=2, steps=5)", "fedad(check=1, force=0, steps=5)"]
)
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_whole_runs_of_a_model_with_functions(method, engine):
    """PyTorch's own example of a first network: functions for activations, one pooling for both convolutions."""
    setting = {"data": "digits", "rounds": 3, "devices": 4, "sample": 2, "server_data": "share:0.1", "batch": 64}
    run = shoal.run(method, model=First(), engine=engine, fleet="tiers:1:0.1", **setting)
    assert [axis.tap for axis in run.net.axes] == ["into conv2", "into fc1", "", ""]
    assert run.history.rows[2]["macs_forward"] <= run.history.rows[0]["macs_forward"]
    if method.startswith("hrank"):
        assert len(run.params["conv1.bias"]) == 4 and len(run.params["conv2.bias"]) == 10


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 2 * 2, 20)
        self.fc2 = nn.Linear(20, 12)
        self.fc3 = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))))


# the law --------------------------------------------------------------------------------------------------------------


def some_plan(net: Net, generator: torch.Generator) -> Plan:
    sizes = {a.name: int(torch.randint(1, a.size + 1, (), generator=generator)) for a in net.axes}
    return Plan({a.name: torch.randperm(a.size, generator=generator)[: sizes[a.name]].sort().values for a in net.axes})


def some_inputs(net: Net, generator: torch.Generator) -> Tensor:
    if net.token_inputs:
        return torch.randint(0, CLASSES, (4, *net.input_shape), generator=generator)
    return torch.randn(4, *net.input_shape, generator=generator, dtype=torch.float64)


def slopes(net: Net, params: Params, x: Tensor, training: bool) -> tuple[Tensor, Params]:
    """What a net says; its gradients, and its buffers after the pass."""
    leaves = {name: params[name].clone().requires_grad_() for name in net.trainable}
    logits, _, _, buffers = net.forward(params | leaves, x, training=training)
    loss = (logits * torch.linspace(-1, 2, CLASSES)).square().sum()
    return logits, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())))) | buffers


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", CUTTABLE)
def test_masked_and_sliced_models_are_the_same(name, seed):
    """Law 3: logits, gradients on kept coordinates and statistics; and a model made with these widths is that model."""
    net, generator = stranger(name), torch.Generator().manual_seed(seed)
    plan, x = some_plan(net, generator), some_inputs(net, generator)
    shift = lambda v: v + 0.1 * torch.rand(v.shape, generator=generator) if v.is_floating_point() else v  # noqa: E731
    start = tree.map_tensors(shift, net.initial)
    cut = net.slicer.take(start, plan)
    small, fresh = net.cut(plan), stranger(name, *map(len, plan.kept.values()))
    masked = net.slicer.place(cut, start, plan)
    for training in (False, net.mixes_batch and name != "noisy"):
        logits, moved = slopes(net, masked, x, training)
        for each in (small, fresh):
            alike, ended = slopes(each, cut, x, training)
            torch.testing.assert_close(alike, logits)
            torch.testing.assert_close(ended, net.slicer.take(moved, plan))
    assert small.macs_forward == fresh.macs_forward
    assert small.shapes == fresh.shapes == tuple((k, v.shape, v.dtype) for k, v in cut.items())
    assert tree.count_tree_bytes(cut) == tree.count_tree_bytes(fresh.initial)


@pytest.mark.parametrize("name", CUTTABLE)
def test_units_that_nobody_reads_are_as_if_cut_out(name):
    net, generator = stranger(name), torch.Generator().manual_seed(5)
    plan, x = some_plan(net, generator), some_inputs(net, generator)
    kept = {a.name: torch.zeros(a.size).double().index_fill(0, plan.kept[a.name], 1) for a in net.axes}
    unread = net.forward(net.slicer.scale_unit_outputs(net.initial, kept), x)[0]
    torch.testing.assert_close(unread, net.cut(plan).forward(net.slicer.take(net.initial, plan), x)[0])


@pytest.mark.parametrize("name", ["plain", "residual", "lstm-both", "positions", "mobile", "signals"])
def test_the_trial_sees_every_damage(name):
    """An axis without one of its cuts, or with one that does not say that it reads, breaks the law."""
    net = stranger(name)
    x = some_inputs(net, torch.Generator().manual_seed(0))
    assert is_lawful(net, list(net.axes), x)
    for at, axis in enumerate(net.axes):
        for one in axis.cuts:
            rest = tuple(cut for cut in axis.cuts if cut != one)
            for cuts in (rest, (*rest, replace(one, reads=False))) if one.reads else (rest,):
                damaged = [*net.axes[:at], replace(axis, cuts=cuts), *net.axes[at + 1 :]]
                assert not is_lawful(net, damaged, x), (axis.name, one)


def test_a_model_that_insists_on_its_precision():
    net = build_user_net(Single(), (6,), CLASSES)
    assert [(axis.name, axis.size) for axis in net.axes] == [("fc1", 6)]


# manners --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "lstm", "transformer", "detached"])
def test_looking_for_axes_leaves_no_trace(name, capfd):
    make, shape, _ = STRANGERS[name]
    module = make().train()
    before, words = tree.map_tensors(torch.clone, module.state_dict()), shape == WORDS
    state, layers = torch.get_rng_state(), str(module)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        once = trace_axes(module, shape, words)
    assert once == trace_axes(module, shape, words) and not told and not any(capfd.readouterr())
    assert torch.equal(state, torch.get_rng_state()) and module.training and str(module) == layers
    assert tree.is_same_tree(before, module.state_dict())
    assert not any(layer._forward_hooks or "forward" in vars(layer) for layer in module.modules())


def test_without_torch_pruning_there_are_no_axes(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    net = stranger("plain")
    assert net.axes == () and net.macs_forward > 0


def test_a_model_without_numbers_has_no_axes():
    with torch.device("meta"):
        assert trace_axes(mlp(), (3, 4), False) == ()
