"""Whether a traced step may stand for the step as it is written.

A trace holds the operations of one call. What drew random numbers by itself, chose sizes by the values of tensors, or
read numbers past torch, would be repeated as it was in that call, with numbers that are wrong for all others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shoal.core.model import tree
from shoal.engines.batched.hyperparams import filter_hyperparams
from shoal.engines.batched.stack import DeviceStack

aten = torch.ops.aten
DROPOUT_ARGUMENTS = ("dropout_p", "dropout")
"""What operations with dropout inside call its share; without any they draw nothing."""
PACKING_OPS = (aten._pack_padded_sequence.default,)
"""Operations that are followed by others which read sizes past torch."""
TOLERANCES = {torch.float64: 1e-6, torch.complex128: 1e-6}
"""By type, how far apart changes in one step may be, as a share of the largest; 1e-2 of other types."""


def refuse_unrepeatable_operations(graph: fx.Graph) -> None:
    """Raise ValueError where operations give something else in every call."""
    for node in graph.nodes:
        if draws_random_numbers(node):
            raise ValueError(f"{node.target} draws random numbers by itself")
        if has_sizes_by_values(node):
            raise ValueError(f"the sizes of what {node.target} gives depend on values of tensors")


def draws_random_numbers(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip((argument.name for argument in arguments), node.args)) | node.kwargs
    shares = [given[name] for name in DROPOUT_ARGUMENTS if name in given]
    return not shares or any(share != 0 for share in shares)


def has_sizes_by_values(node: fx.Node) -> bool:
    """Whether the shape of a result depends on values; that of an index does where it is a mask."""
    if node.target is aten.index.Tensor:
        indices: Any = node.args[1]
        values = [index.meta.get("val") for index in indices if isinstance(index, fx.Node)]
        return any(isinstance(v, Tensor) and v.dtype in (torch.bool, torch.uint8) for v in values)
    return node.target in PACKING_OPS or torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def refuse_other_numbers(
    module: fx.GraphModule, function: Callable[..., Any], example: Sequence[Tensor], stack: DeviceStack
) -> None:
    """Raise ValueError where a trace gives other numbers than the step itself for other samples than it was made of.

    Both run the same operations in the same order, so that they agree to the last bits or not at all.
    """
    first, samples = stack.slots[0], stack.slots[0].training.device.samples
    carried = len(tree.collect_tensors(first.training.state))
    fixed = len(tree.collect_tensors(first.fixed)) + len(filter_hyperparams(stack.setup, stack.hyperparams))
    others, place = list(example), carried + fixed + len(stack.data)
    others[place] = (others[place] + 1) % len(samples.targets)
    with torch.no_grad():
        found, expected = (call(*others) for call in (module, function))
    pairs = zip(tree.collect_tensors(list(found)), tree.collect_tensors(list(expected)), strict=True)
    before = [*example[:carried], torch.zeros(())]
    if not all(agree_on_change(one, other, start) for (one, other), start in zip(pairs, before, strict=True)):
        raise ValueError("it depends on more than its tensors: traced, it gives other numbers than as it is written")


def agree_on_change(found: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Whether two tensors are as far from what was there before, in the same directions."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (found.is_floating_point() or found.is_complex()) or torch.equal(found, expected):
        return torch.equal(found, expected)
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    if not found.numel():
        return True
    change, apart = (
        (one - two).abs().nan_to_num(0, 0, 0).max().item() for one, two in ((expected, before), (found, expected))
    )
    rounding = 8 * torch.finfo(found.dtype).eps * expected.abs().nan_to_num(0, 0, 0).max().item()
    return apart <= TOLERANCES.get(found.dtype, 1e-2) * change + rounding
