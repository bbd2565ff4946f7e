"""Where the kernels of native_kernels.cpp take the place of torch's convolutions, max-poolings and products.

Which of the two computes an operation depends on its shapes alone, so that every run on a machine has the same bits.
The limits were measured on one core with AVX-512 and batches of 10 images (benchmarks/native.py): torch's forward pass
and input gradients are quicker for deep filters, its filter gradients for large images.
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shoal.engines.batched.native_library import load_native_kernels

aten = torch.ops.aten
MAX_PATCH = 300
"""Numbers in a patch (filter area times channels) up to which the forward pass is quicker than torch's."""
MAX_LAYER_BYTES = 3 << 19
"""Bytes of input and output together, up to which the gradient of the filters is quicker than torch's."""
MIN_PATCH_ROW = 9
"""Numbers in a row of a patch from which on the gradient of the filters is quicker than torch's."""
MAX_ROWS = 64
"""Rows of the smaller matrix (samples of a batch) up to which a product is left to the kernels."""
POOLING_DEFAULTS = ([0, 0], [1, 1], False)
"""Padding, dilation and rounding up of a max-pooling that the kernels know."""


def use_native_kernels(graph: fx.Graph, load: Callable[[], bool] = load_native_kernels) -> None:
    """Replace what the kernels can do in the program of one device on a processor, if they can be had."""
    pools = [n for n in graph.nodes if n.target is aten.max_pool2d_with_indices.default and is_native_pooling(n)]
    forward = [n for n in graph.nodes if n.target is aten.convolution.default and is_native_forward(n)]
    backward = [n for n in graph.nodes if n.target is aten.convolution_backward.default and is_native_backward(n)]
    products = [n for n in graph.nodes if n.target in PRODUCTS and is_native_product(n)]
    updates = [n for n in graph.nodes if n.target in UPDATES and is_native_update(n)]
    if not (pools or forward or backward or products or updates) or torch.get_num_threads() > 1 or not load():
        return
    for node in pools:
        replace_pooling(graph, node)
    for node in forward:
        x, filters, bias, stride, padding = get_arguments(node)[:5]
        replace_node(graph, node, torch.ops.shoal_native.conv2d.default, (x, filters, bias, stride, padding))
    for node in backward:
        replace_backward(graph, node)
    for node in products:
        *bias, left, right = get_arguments(node)
        replace_node(graph, node, torch.ops.shoal_native.matmul.default, (bias[0] if bias else None, left, right))
    for node in updates:
        arguments = (*get_arguments(node), float(get_factor(node)))
        replace_node(graph, node, torch.ops.shoal_native.add_matmul_.default, arguments)
    graph.eliminate_dead_code()


def get_arguments(node: fx.Node) -> Any:
    """The arguments of an operation; what each of them is depends on the operation."""
    return node.args


def holds_images(value: Any) -> bool:
    """Whether a value is images or filters on a processor with their channels last, the form that the kernels make."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.dim() != 4 or not value.numel():
        return False
    return value.dtype in (torch.float32, torch.float64) and value.is_contiguous(memory_format=torch.channels_last)


def is_plain_convolution(x: fx.Node, filters: fx.Node, dilation: Any, transposed: bool, groups: int) -> bool:
    images = holds_images(x.meta["val"]) and holds_images(filters.meta["val"])
    return images and set(dilation) == {1} and not transposed and groups == 1


def is_native_forward(node: fx.Node) -> bool:
    x, filters, _, _, _, dilation, transposed, _, groups = get_arguments(node)
    plain = is_plain_convolution(x, filters, dilation, transposed, groups) and holds_images(node.meta["val"])
    return plain and filters.meta["val"][0].numel() <= MAX_PATCH


def is_native_backward(node: fx.Node) -> bool:
    _, x, filters, _, _, _, dilation, transposed, _, groups, _ = get_arguments(node)
    made = [value for value in node.meta["val"][:2] if value is not None]
    return is_plain_convolution(x, filters, dilation, transposed, groups) and all(map(holds_images, made))


def is_native_pooling(node: fx.Node) -> bool:
    source, window, *more = get_arguments(node)
    options = [*more[1:], *POOLING_DEFAULTS[len(more[1:]) :]]
    values, indices = find_item(node, 0), find_item(node, 1)
    gradients = [*indices.users] if indices is not None else []
    known = tuple(options) == POOLING_DEFAULTS and window[0] * window[1] <= 256 and values is not None
    backward = all(n.target is aten.max_pool2d_with_indices_backward.default for n in gradients)
    made = [source.meta["val"], node.meta["val"][0], *(n.meta["val"] for n in gradients)]
    return known and backward and all(map(holds_images, made))


PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
UPDATES = (aten.addmm_.default, aten.baddbmm_.default)


def holds_matrices(value: Any) -> bool:
    """Whether a value is matrices on a processor in which the numbers of a row or of a column are neighbours."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.dim() not in (2, 3) or not value.numel():
        return False
    return value.dtype in (torch.float32, torch.float64) and 1 in value.stride()[-2:]


def is_native_product(node: fx.Node) -> bool:
    *bias, left, right = get_arguments(node)
    values = [n.meta.get("val") for n in (left, right)]
    if node.kwargs or not all(map(holds_matrices, values)) or values[0].shape[-2] > MAX_ROWS:
        return False
    columns = values[1].shape[-1]
    fits = (columns,) if values[0].dim() == 2 else (len(values[0]), 1, columns)
    return not bias or tuple(bias[0].meta["val"].shape) == fits


def is_native_update(node: fx.Node) -> bool:
    own, left, right = (n.meta.get("val") for n in get_arguments(node))
    if not all(map(holds_matrices, (own, left, right))) or own.stride(-1) != 1:
        return False
    return set(node.kwargs) <= {"alpha"} and isinstance(get_factor(node), (int, float)) and right.shape[-2] <= MAX_ROWS


def get_factor(node: fx.Node) -> Any:
    return node.kwargs.get("alpha", 1)


def replace_backward(graph: fx.Graph, node: fx.Node) -> None:
    """The gradients of a convolution, each by what is quicker for its shapes."""
    grad, x, filters, bias_sizes, stride, padding, *rest, wanted = get_arguments(node)
    native = [wants and quick for wants, quick in zip(wanted, choose_native_gradients(node))]
    others = [wants and not own for wants, own in zip(wanted, native)]
    with graph.inserting_before(node):
        kernels = graph.call_function(
            torch.ops.shoal_native.conv2d_backward.default, (grad, x, filters, stride, padding, *native)
        )
        by_torch = graph.call_function(
            aten.convolution_backward.default, (grad, x, filters, bias_sizes, stride, padding, *rest, others)
        )
    for made, mask in ((kernels, native), (by_torch, others)):
        made.meta["val"] = tuple(value if own else None for value, own in zip(node.meta["val"], mask))
    for item in list(node.users):
        number = get_arguments(item)[1]
        item.args = (kernels if native[number] else by_torch, number)


def choose_native_gradients(node: fx.Node) -> tuple[bool, bool, bool]:
    """Whether the kernels are quicker than torch for the gradients of the input, of the filters and of the bias.

    That of the bias alone, as of a layer whose filters are frozen, is left to torch.
    """
    grad, x, filters = (n.meta["val"] for n in get_arguments(node)[:3])
    padding = get_arguments(node)[5]
    by_input = not any(padding)
    by_filters = (
        x.nbytes + grad.nbytes <= MAX_LAYER_BYTES * x.element_size() // 4
        and filters.shape[1] * filters.shape[3] >= MIN_PATCH_ROW
    )
    wants_filters = get_arguments(node)[10][1]
    return by_input, by_filters, by_filters and wants_filters


def replace_pooling(graph: fx.Graph, node: fx.Node) -> None:
    """A max-pooling and its gradient; with the ReLU in front of it and its gradient if nothing else reads that."""
    source, window, *more = get_arguments(node)
    stride = list(more[0]) if more and more[0] else window
    values, indices = find_item(node, 0), find_item(node, 1)
    assert values is not None and isinstance(source, fx.Node)
    gradients = list(indices.users) if indices is not None else []
    fused = source.target is aten.relu.default and is_relu_of_pooling(source, node, gradients)
    inner = source.args[0] if fused else source
    with graph.inserting_before(node):
        pooled = graph.call_function(torch.ops.shoal_native.max_pool2d.default, (inner, window, stride, fused))
        own_values, places = (graph.call_function(getitem, (pooled, i)) for i in (0, 1))
    own_values.meta = dict(values.meta)
    places.meta["val"] = torch.empty(values.meta["val"].numel(), dtype=torch.uint8, device="meta")
    pooled.meta["val"] = (own_values.meta["val"], places.meta["val"])
    for gradient in gradients:
        end = next(iter(gradient.users)) if fused else gradient
        sizes = list(source.meta["val"].shape)
        arguments = (gradient.args[0], own_values, places, sizes, window, stride, fused)
        replace_node(graph, end, torch.ops.shoal_native.max_pool2d_backward.default, arguments)
    values.replace_all_uses_with(own_values)


def is_relu_of_pooling(relu: fx.Node, pooling: fx.Node, gradients: list[fx.Node]) -> bool:
    """Whether a ReLU is read by this pooling and by its gradients alone, and by the gradient of the ReLU after them."""
    ends = [n for g in gradients for n in g.users]
    after = all(n.target is aten.threshold_backward.default and n.args[1:] == (relu, 0) for n in ends)
    alone = all(len(g.users) == 1 for g in gradients)
    return after and alone and set(relu.users) <= {pooling, *gradients, *ends}


def find_item(node: fx.Node, index: int) -> fx.Node | None:
    """The node that reads one result of an operation that has several."""
    return next((n for n in node.users if n.target is getitem and n.args[1] == index), None)


def replace_node(graph: fx.Graph, node: fx.Node, target: Any, arguments: tuple) -> None:
    with graph.inserting_before(node):
        made = graph.call_function(target, arguments)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
