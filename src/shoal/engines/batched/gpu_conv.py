"""Which form the convolutions of many devices take on a GPU.

Vectorised over devices, a convolution is a grouped one with a group for each device, for which cuDNN is often slow. The
same can be had with channels last, or as batched matrix products (`conv_products`). `pick_form` decides by shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shoal.engines.batched.conv_products import (
    find_both_windows,
    fold_input_gradient,
    make_patches,
    multiply_filter_gradient,
    multiply_forward,
    multiply_input_gradient,
)

aten = torch.ops.aten
CHANNELS_LAST = {"memory_format": torch.channels_last}
ARRANGING_OPS = (aten.permute.default, aten.view.default, aten._unsafe_view.default, aten.clone.default)
SHARES_PATCHES = True
"""Whether patches of the forward pass are kept for the filters' gradient: memory for time."""


@dataclass(frozen=True)
class ConvCase:
    """What decides about the form of a convolution, or of one of its gradients."""

    wanted: str
    """output, input gradient or filter gradient."""
    devices: int
    batch: int
    channels: int
    outputs: int
    taps: int
    """Taps of a filter that meet the image, not only its padding."""
    pixels: int
    """Of an output image."""
    stride: int
    is_half: bool
    """Whether it is computed in two bytes."""


def pick_form(case: ConvCase) -> str:
    """The quickest form: one of OUTPUT_FORMS, INPUT_GRADIENT_FORMS or FILTER_GRADIENT_FORMS.

    Measured on an H200 (`benchmarks/large_models.py`), ms a step of a device, compiled, TF32: ResNet18, 10 devices of
    50 images, 0.95 grouped, 0.39 with folds and 0.36 with products alone; with group norm 0.96 and, with folds, 0.33.
    CNN, 10 devices of 10 images, 0.046 grouped, 0.039 with products alone, 0.036 with folds; LeNet 0.034, 0.030, 0.029.
    With 100 devices of 10 images, the gradient of 32 filters of 3x3x3 takes 489 us grouped and 192 us as a product; a
    forward pass of 64 filters of 3x3x32 takes 396 us, and 189 us with its channels last.
    """
    if case.devices < 32 or case.channels >= 64:
        return "fold" if case.wanted == "input gradient" and case.channels < 64 else "product"
    if case.channels >= 16:
        return "channels last"
    if case.wanted == "filter gradient" and case.channels * case.taps <= 32:
        return "product"
    return "grouped"


def choose_convolution_forms(graph: fx.Graph, width: int) -> None:
    """Let the convolutions of a traced program of `width` devices take the quickest form for their shapes.

    Only those with as many groups as devices: the others are of layers that have groups themselves, or whose filters
    all devices share.
    """
    shared: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.convolution.default:
            x, filters, _, *geometry = node.args
            if is_one_group_per_device(filters, geometry, width):
                form = pick_form(describe_case("output", x, filters, geometry))
                if form != "grouped":
                    patches = share_patches(shared, node, x, filters, geometry) if form == "product" else None
                    node.target, node.kwargs = convolve, {"form": form, "patches": patches}
        elif node.target is aten.convolution_backward.default:
            _, x, filters, _, *geometry, mask = node.args
            if is_one_group_per_device(filters, geometry, width):
                cases = (describe_case(f"{of} gradient", x, filters, geometry) for of in ("input", "filter"))
                forms = tuple(map(pick_form, cases))
                if forms != ("grouped", "grouped"):
                    needs = mask[1] and forms[1] == "product"
                    patches = share_patches(shared, node, x, filters, geometry) if needs else None
                    node.target, node.kwargs = backpropagate, {"forms": forms, "patches": patches}


def share_patches(
    shared: dict[tuple, fx.Node], node: fx.Node, x: fx.Node, filters: fx.Node, geometry: Sequence[Any]
) -> fx.Node | None:
    """The patches that a product multiplies, which are made before the first one that needs them."""
    if not SHARES_PATCHES:
        return None
    kernel, (stride, padding, *_, groups) = tuple(filters.meta["val"].shape[2:]), geometry
    key = (*find_origin(x), kernel, *stride, *padding)
    if key not in shared:
        given = (kernel, stride, padding, groups)
        with node.graph.inserting_before(node):
            shared[key] = node.graph.call_function(make_patches, (x, *given))
        shared[key].meta["val"] = make_patches(x.meta["val"].to("meta"), *given)
    return shared[key]


def find_origin(x: fx.Node) -> tuple[Any, ...]:
    """What a tensor was before its dimensions were only arranged anew, and how they were.

    Nothing has overwritten it between a convolution and its gradient: autograd would refuse that.
    """
    arranged: list[Any] = []
    node: Any = x
    while node.target in ARRANGING_OPS:
        arranged.append((node.target, repr(node.args[1:])))
        node = node.args[0]
    return node, *arranged


def is_one_group_per_device(filters: fx.Node, geometry: Sequence[Any], width: int) -> bool:
    """Whether a convolution is over images, of several devices with one group each, not dilated and not transposed."""
    _, _, dilation, transposed, _, groups = geometry
    return filters.meta["val"].dim() == 4 and groups == width > 1 and set(dilation) == {1} and not transposed


def describe_case(wanted: str, x: fx.Node, filters: fx.Node, geometry: Sequence[Any]) -> ConvCase:
    images, own = x.meta["val"], filters.meta["val"]
    stride, padding, *_, groups = geometry
    down, across = find_both_windows(images.shape, own.shape, stride, padding)
    return ConvCase(
        wanted,
        devices=groups,
        batch=len(images),
        channels=own.shape[1],
        outputs=own.shape[0] // groups,
        taps=down.taps * across.taps,
        pixels=down.count * across.count,
        stride=max(stride),
        is_half=images.element_size() == 2,
    )


def count_patch_bytes(graph: fx.Graph) -> int:
    """What all patches of a program of one device take up where products multiply them."""
    total = 0
    for node in graph.nodes:
        if node.target is aten.convolution.default and node.args[1].meta["val"].dim() == 4 and not node.args[6]:
            x, filters, _, *geometry = node.args
            case = describe_case("output", x, filters, geometry)
            total += case.batch * case.pixels * case.channels * case.taps * x.meta["val"].element_size()
    return total


def convolve(
    x: Tensor, filters: Tensor, bias: Tensor | None, *geometry: Any, form: str, patches: Tensor | None = None
) -> Tensor:
    """A convolution in this form, in torch's ordinary memory format."""
    made = OUTPUT_FORMS[form](x, filters, *geometry, **({} if patches is None else {"patches": patches}))
    return (made if bias is None else made + bias[:, None, None]).contiguous()


def backpropagate(
    grad: Tensor,
    x: Tensor,
    filters: Tensor,
    bias_sizes: list[int] | None,
    *geometry_and_mask: Any,
    forms: tuple[str, str],
    patches: Tensor | None = None,
) -> list[Tensor | None]:
    """The gradients that are wanted of a convolution's input, filters and bias: the first two in these forms."""
    *geometry, (wants_input, wants_filters, wants_bias) = geometry_and_mask
    if forms == ("channels last", "channels last"):
        images = (t.contiguous(**CHANNELS_LAST) for t in (grad, x, filters))
        made = aten.convolution_backward(*images, bias_sizes, *geometry_and_mask)
        return [None if t is None else t.contiguous() for t in made]
    given, known = (grad, x, filters, *geometry), {} if patches is None else {"patches": patches}
    return [
        INPUT_GRADIENT_FORMS[forms[0]](*given).contiguous() if wants_input else None,
        FILTER_GRADIENT_FORMS[forms[1]](*given, **known).contiguous() if wants_filters else None,
        grad.sum((0, 2, 3)) if wants_bias else None,
    ]


def convolve_channels_last(x: Tensor, filters: Tensor, *geometry: Any) -> Tensor:
    return aten.convolution(x.contiguous(**CHANNELS_LAST), filters.contiguous(**CHANNELS_LAST), None, *geometry)


def backpropagate_grouped(mask: list[bool], *given: Any) -> Tensor:
    """The one gradient that the mask asks for."""
    grad, x, filters, *geometry = given
    return aten.convolution_backward(grad, x, filters, None, *geometry, mask)[mask.index(True)]


def backpropagate_channels_last(mask: list[bool], *given: Any) -> Tensor:
    return backpropagate_grouped(mask, *(t.contiguous(**CHANNELS_LAST) for t in given[:3]), *given[3:])


OF_INPUT, OF_FILTERS = [True, False, False], [False, True, False]

OUTPUT_FORMS: dict[str, Callable[..., Tensor]] = {
    "grouped": lambda x, filters, *geometry: aten.convolution(x, filters, None, *geometry),
    "channels last": convolve_channels_last,
    "product": lambda x, filters, *geometry, **known: multiply_forward(
        x, filters, *geometry[:2], devices=geometry[-1], **known
    ),
}
"""(x, filters, stride, padding, dilation, transposed, output padding, groups) -> output without bias."""
INPUT_GRADIENT_FORMS: dict[str, Callable[..., Tensor]] = {
    "grouped": lambda *given: backpropagate_grouped(OF_INPUT, *given),
    "channels last": lambda *given: backpropagate_channels_last(OF_INPUT, *given),
    "product": lambda *given: multiply_input_gradient(*given[:5], devices=given[-1]),
    "fold": lambda *given: fold_input_gradient(*given[:5], devices=given[-1]),
}
"""(gradient of the output, x, filters, stride, padding, dilation, transposed, output padding, groups) -> gradient."""
FILTER_GRADIENT_FORMS: dict[str, Callable[..., Tensor]] = {
    "grouped": lambda *given: backpropagate_grouped(OF_FILTERS, *given),
    "channels last": lambda *given: backpropagate_channels_last(OF_FILTERS, *given),
    "product": lambda *given, **known: multiply_filter_gradient(*given[:5], devices=given[-1], **known),
}
"""(gradient of the output, x, filters, stride, padding, dilation, transposed, output padding, groups) -> gradient."""
