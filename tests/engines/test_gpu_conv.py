"""Every form of a convolution computes what torch does, and only plain convolutions of several devices take one."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn, vmap
from torch.func import functional_call, grad
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.engines.batched import gpu_conv
from shoal.engines.batched.conv_products import find_windows, make_patches
from shoal.engines.batched.gpu_conv import (
    FILTER_GRADIENT_FORMS,
    INPUT_GRADIENT_FORMS,
    OUTPUT_FORMS,
    ConvCase,
    backpropagate,
    choose_convolution_forms,
    convolve,
    count_patch_bytes,
)

aten = torch.ops.aten
Params = dict[str, Tensor]


class Drawn(NamedTuple):
    """A grouped convolution of several devices."""

    x: Tensor
    filters: Tensor
    bias: Tensor
    geometry: tuple[Any, ...]

    @property
    def output_gradient(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = aten.convolution(self.x, self.filters, None, *self.geometry).shape
        return torch.randn(shape, dtype=torch.float64, generator=generator)


@st.composite
def convolutions(draw: Any) -> Drawn:
    few, side = st.integers(1, 3), st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))
    devices, batch, channels, outputs = (draw(few) for _ in range(4))
    sizes, kernel, stride, padding = zip(draw(side), draw(side))
    assume(all(size + 2 * pad >= taps for size, taps, pad in zip(sizes, kernel, padding)))
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, devices * channels, *sizes), (devices * outputs, channels, *kernel), (devices * outputs,))
    x, filters, bias = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return Drawn(x, filters, bias, ([*stride], [*padding], [1, 1], False, [0, 0], devices))


@pytest.mark.parametrize("form", OUTPUT_FORMS)
@given(drawn=convolutions(), has_bias=st.booleans())
def test_every_form_of_a_convolution_finds_the_same(form: str, drawn: Drawn, has_bias: bool):
    bias = drawn.bias if has_bias else None
    made = convolve(drawn.x, drawn.filters, bias, *drawn.geometry, form=form)
    assert made.is_contiguous()
    expected = aten.convolution(drawn.x, drawn.filters, bias, *drawn.geometry)
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-10)


MASKS = st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any)


@pytest.mark.parametrize("of_filters", FILTER_GRADIENT_FORMS)
@pytest.mark.parametrize("of_input", INPUT_GRADIENT_FORMS)
@given(drawn=convolutions(), mask=MASKS)
def test_every_form_of_a_gradient_finds_the_same(of_input: str, of_filters: str, drawn: Drawn, mask: tuple[bool, ...]):
    call = (drawn.output_gradient, drawn.x, drawn.filters, [len(drawn.bias)], *drawn.geometry, [*mask])
    made = backpropagate(*call, forms=(of_input, of_filters))
    for own, expected, wanted in zip(made, aten.convolution_backward(*call), mask, strict=True):
        assert (own is not None) == wanted
        if own is not None:
            assert own.is_contiguous()
            torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ((1, 3, 1, 1), slice(1, 2)),  # one pixel: only the tap in the middle sees it
        ((2, 3, 2, 1), slice(1, 3)),  # the only window begins in the padding
        ((2, 3, 1, 1), slice(0, 3)),
        ((32, 7, 2, 3), slice(0, 7)),
        ((2, 7, 2, 3), slice(3, 5)),
        ((1, 1, 3, 1), slice(0, 1)),  # no window sees the image: a tap over padding stays
    ],
)
def test_taps_that_only_meet_padding_are_left_out(side: tuple[int, ...], kept: slice):
    assert find_windows(*side).kept_taps == kept


DEVICES = 4


def trace_stacked(loss: Any, *sizes: tuple[int, ...], devices: int = DEVICES) -> tuple[Any, list[Tensor], Any]:
    """The program of a loss's gradient in its first arguments, all but the last, stacked for devices."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(devices, *size, dtype=torch.float64, generator=generator) for size in sizes]
    step = vmap(grad(loss, tuple(range(len(sizes) - 1))))
    return make_fx(step)(*tensors), tensors, step


def find_forms(program: Any) -> list[Any]:
    """The forms that convolutions and gradients have taken, in their order."""
    nodes = [n for n in program.graph.nodes if n.target in (convolve, backpropagate)]
    return [n.kwargs.get("form") or n.kwargs["forms"] for n in nodes]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[ConvCase]:
    """Products everywhere; what the rule was asked."""
    asked: list[ConvCase] = []

    def pick_product(case: ConvCase) -> str:
        asked.append(case)
        return "product"

    monkeypatch.setattr(gpu_conv, "pick_form", pick_product)
    return asked


UNLIKE: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "depthwise": (lambda w, x: F.conv2d(x, w, groups=3).square().sum(), ((3, 1, 3, 3), (2, 3, 5, 5))),
    "dilated": (lambda w, x: F.conv2d(x, w, dilation=2).square().sum(), ((2, 3, 2, 2), (2, 3, 5, 5))),
    "transposed": (lambda w, x: F.conv_transpose2d(x, w).square().sum(), ((3, 2, 2, 2), (2, 3, 5, 5))),
    "of a line": (lambda w, x: F.conv1d(x, w).square().sum(), ((2, 3, 2), (2, 3, 5))),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_convolutions_of_another_kind_are_left_as_they_are(name: str, products: list[ConvCase]):
    loss, sizes = UNLIKE[name]
    program, *_ = trace_stacked(loss, *sizes)
    choose_convolution_forms(program.graph, DEVICES)
    assert not products and not find_forms(program)
    assert any(n.target is aten.convolution.default for n in program.graph.nodes)


def test_filters_that_devices_share_and_a_device_alone_are_left_as_they_are(products: list[ConvCase]):
    filters = torch.randn(2, 3, 3, 3)
    program = make_fx(vmap(lambda x: F.conv2d(x, filters)))(torch.randn(DEVICES, 2, 3, 5, 5))
    choose_convolution_forms(program.graph, DEVICES)
    alone = make_fx(lambda x: F.conv2d(x, filters))(torch.randn(2, 3, 5, 5))
    choose_convolution_forms(alone.graph, 1)
    assert not products


def test_the_rule_is_asked_by_shapes(products: list[ConvCase]):
    loss = lambda w, x: F.conv2d(x, w, padding=1, stride=2).square().sum()  # noqa: E731
    program, *_ = trace_stacked(loss, (5, 3, 3, 3), (6, 3, 2, 7))
    choose_convolution_forms(program.graph, DEVICES)
    case = ConvCase("output", DEVICES, batch=6, channels=3, outputs=5, taps=6, pixels=4, stride=2, is_half=False)
    assert products[0] == case
    assert {own.wanted for own in products} == {"output", "input gradient", "filter gradient"}


@pytest.mark.parametrize("devices", [31, 32])
def test_convolutions_of_many_devices_take_another_form_and_find_the_same(devices: int):
    def loss(few: Tensor, deep: Tensor, images: Tensor) -> Tensor:
        seen = F.conv2d(images, few, padding=(1, 0), stride=(2, 1)).relu()
        return F.conv2d(seen, deep, padding=1).square().mean()

    sizes = ((32, 3, 3, 3), (5, 32, 2, 3), (4, 3, 9, 8))
    program, tensors, step = trace_stacked(loss, *sizes, devices=devices)
    choose_convolution_forms(program.graph, devices)
    program.recompile()
    forms = find_forms(program)
    many = "channels last" in forms and ("grouped", "product") in forms
    assert many if devices == 32 else ("product" in forms and ("fold", "product") in forms)
    for made, expected in zip(program(*tensors), step(*tensors)):
        torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-12)


class SmallResidual(nn.Module):
    """A convolutional net with what is about ResNet18: BatchNorm, strides, images of one pixel, a sum; and a bias."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 5, 2, 2), nn.BatchNorm2d(4)
        self.deep, self.deep_norm = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)
        self.short = nn.Conv2d(4, 6, 1, 2, bias=False)
        self.last, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.stem(x)).relu(), 2)
        x = self.deep_norm(self.deep(x)) + self.short(x)
        return self.head(self.last(x.relu()).mean((2, 3)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(("compiled", "shared"), [(0, 0), (0, 1), pytest.param(1, 1, marks=pytest.mark.whole)])
def test_a_step_of_a_net_with_batch_norm_computes_the_same_in_products(
    compiled: int, shared: int, products: list[ConvCase], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_conv, "SHARES_PATCHES", bool(shared))
    torch.manual_seed(0)
    net = SmallResidual().double()

    def step(params: Params, buffers: Params, x: Tensor) -> tuple[Params, Params]:
        def loss(params: Params) -> tuple[Tensor, Params]:
            own = {k: v.clone() for k, v in buffers.items()}
            return functional_call(net, params | own, (x,)).square().mean(), own

        return grad(loss, has_aux=True)(params)

    params = {k: torch.randn(DEVICES, *v.shape).double() * 0.5 for k, v in net.named_parameters()}
    buffers = {k: torch.stack([v] * DEVICES) for k, v in net.named_buffers()}
    tensors = params, buffers, torch.randn(DEVICES, 5, 3, 8, 8).double()
    program = make_fx(vmap(step))(*tensors)
    expected = program(*tensors)
    choose_convolution_forms(program.graph, DEVICES)
    program.recompile()
    assert find_forms(program) == ["product"] * 4 + [("product", "product")] * 4
    made_patches = [n for n in program.graph.nodes if n.target is make_patches]
    assert [len(n.users) for n in made_patches] == [2] * 4 * shared  # once each, for a product forward and one back
    made = (torch.compile(program, dynamic=False) if compiled else program)(*tensors)
    torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-12)


def test_patches_take_the_bytes_that_are_counted():
    program, *_ = trace_stacked(
        lambda w, x: F.conv2d(x, w, padding=1).square().sum(), (5, 3, 3, 3), (6, 3, 2, 7), devices=1
    )
    made = make_patches(torch.empty(6, 3, 2, 7, dtype=torch.float64), (3, 3), (1, 1), (1, 1), 1)
    assert count_patch_bytes(program.graph) == made.nbytes
