"""Whether what pads a batch leaves no trace: a sample's outputs must not depend on the batch that it is in.

Batch norm is told which samples are padding. A module that mixes samples in a way of its own is not, nor is one that
counts them, and there is no telling by its layers: two passes show it.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shoal.core.batch import Batch
from shoal.core.local.layer_overrides import override_layers
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.engines.batched.stack import DeviceStack

TOLERANCE = 1e-6
"""How far apart outputs, loss and buffers in float64 may be; where a model cannot compute in it, `LOOSE_TOLERANCE`."""
LOOSE_TOLERANCE = 1e-2
DOUBLED_BYTES = 1 << 28
"""The largest model, frozen tensors included, that is tried in float64; larger ones are tried as they are."""
HALF_TOLERANCE = 1e-1
"""The same for layers that compute in bfloat16, whose roundings of 1 in 256 add up from layer to layer."""


class LeavesPaddingTrace(Exception):
    """A model whose outputs or buffers depend on the padding of a batch."""


def refuse_padding_trace(stack: DeviceStack) -> None:
    """Raise LeavesPaddingTrace where a model makes something else of half a batch that is filled up than of it alone.

    Nothing is said of a model that cannot be called so.
    """
    net, samples = stack.setup.net, stack.slots[0].training.device.samples
    count = max(stack.batch // 2, 2 if net.mixes_batch else 1)
    if count >= stack.batch:
        return
    whole = samples.take_batch(torch.arange(stack.batch) % len(samples.targets))
    weight = (torch.arange(stack.batch) < count).to(net.dtype).to(net.place)
    is_small = tree.count_tree_bytes(net.initial) + tree.count_tree_bytes(dict(net.frozen)) <= DOUBLED_BYTES
    with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        for double in (True, False) if is_small else (False,):
            try:
                alone = pass_batch(net, tree.map_tensors(lambda t: t[:count], whole), double)
                filled_up = pass_batch(net, whole._replace(weight=weight), double)
            except (RuntimeError, TypeError, ValueError):
                if double:  # constants of a module may be of its own type
                    continue
                raise
            finally:
                net.reset_slots()
            tolerance = HALF_TOLERANCE if net.half else TOLERANCE if double else LOOSE_TOLERANCE
            compare_passes(alone, filled_up, count, tolerance)
            return


def pass_batch(net: Net, batch: Batch, double: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs, mean loss and buffers of a pass in training."""

    def convert(values: Any) -> Any:
        return tree.map_tensors(lambda t: t.double() if double and t.is_floating_point() else t, values)

    given: Batch = convert(batch)
    params, frozen = convert(net.initial), [convert(t) for t in net.frozen.values()]
    draw = lambda shape: torch.full(shape, 0.5, device=net.place)  # noqa: E731
    with net.substitute_frozen(frozen), override_layers(net.has_dropout, net.mixes_batch, draw, given.weight):
        outputs, _, _, buffers = net.forward(params, tree.map_tensors(torch.clone, given.inputs), training=True)
        return outputs, net.task.compute_mean_loss(outputs, given), buffers


def compare_passes(alone: tuple, filled_up: tuple, count: int, tolerance: float) -> None:
    if not are_near(filled_up[0][:count], alone[0], tolerance):
        raise LeavesPaddingTrace("what it makes of a sample depends on the batch that it is in")
    if not are_near(filled_up[1], alone[1], tolerance):
        raise LeavesPaddingTrace("the loss of a sample depends on the batch that it is in")
    for name, value in alone[2].items():
        if not are_near(filled_up[2][name], value, tolerance):
            raise LeavesPaddingTrace(f"its buffer {name} depends on the size of a batch")


def are_near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    scale = max(1.0, other.abs().nan_to_num(0, 0, 0).max().item()) if other.numel() else 1.0
    return torch.allclose(one, other, 0.0, tolerance * scale, equal_nan=True)
