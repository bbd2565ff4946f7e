"""Models that are a plain chain of layers, whose axes and blocks follow from the layers."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Block, Cut, make_output_rows


def build_chain(layers: Iterable[tuple[str, nn.Module]], input_shape: tuple[int, ...], classes: int) -> Net:
    """A net of convolutions and linear layers; between them only what acts on each unit alone and keeps 0 at 0."""
    module = nn.Sequential(OrderedDict(layers))
    *blocks, head = find_blocks(module)
    name, last = [(n, layer) for n, layer in module.named_children() if isinstance(layer, nn.Linear)][-1]
    rows = (make_output_rows(name, classes, last.bias is not None),)
    return Net(module, input_shape, classes, find_chain_axes(module), (*blocks, replace(head, name="head")), rows=rows)


def find_chain_axes(module: nn.Sequential) -> tuple[Axis, ...]:
    """The outputs of every layer but the last: its own rows, and the columns of the layer that reads them."""
    children = list(module.named_children())
    weighty = [(i, n, m) for i, (n, m) in enumerate(children) if isinstance(m, (nn.Conv2d, nn.Linear))]
    axes = []
    for (at, name, layer), (then, reader, after) in zip(weighty, weighty[1:]):
        size, span = len(layer.weight), after.weight.shape[1] // len(layer.weight)
        own = (Cut(f"{name}.weight", 0), *([Cut(f"{name}.bias", 0)] if layer.bias is not None else []))
        active = next((n for n, child in children[at:then] if isinstance(child, nn.ReLU)), name)
        tap = active if isinstance(layer, nn.Conv2d) else ""
        axes.append(Axis(name, size, (*own, Cut(f"{reader}.weight", 1, span=span, reads=True)), tap))
    return tuple(axes)


def find_blocks(module: nn.Sequential) -> tuple[Block, ...]:
    """One block for each child with parameters, named after it; children without any belong to the one before."""
    groups: dict[str, list[str]] = {}
    first: list[str] = []
    last = first
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            last = groups[name] = [] if groups else first
        last.append(name)
    return tuple(Block(name, tuple(children)) for name, children in groups.items())
