"""Multiply-accumulates, as torch's own counter sees them, counted once for all that they depend on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shoal.core.model.flops_by_width import Widths, counts_needed
from shoal.core.model.plan import Axis, Plan

if TYPE_CHECKING:
    from shoal.core.model.net import Net


class Tally:
    """What pieces of work cost. The cost of a piece follows from shapes, so it is counted once for each key."""

    def __init__(self):
        self.known: dict[tuple, int] = {}
        self.drawn: dict[tuple, list[torch.Size]] = {}
        """What the layers draw in a step, by the same keys."""
        self.slices: dict[tuple, int] = {}
        """What one sample costs, by the widths of the slice it goes through."""
        self.widths: Widths | None = None

    def of(self, key: tuple, work: Callable[[], object]) -> int:
        """Do the work, and say what it costs."""
        if key in self.known:
            work()
        else:
            self.known[key] = counted(work)
        return self.known[key]

    def forward(self, net: "Net", plan: Plan) -> int:
        """One sample through the slice that a plan trains."""
        key = kept(plan, net.axes)
        if not key:
            return net.macs_forward
        if key not in self.slices:
            if len(self.slices) == counts_needed(len(net.axes)):
                self.widths = trusted(Widths(net), self.slices)
            counts = self.widths.cost(dict(key)) if self.widths else net.cut(replace(plan, masks={})).macs_forward
            self.slices[key] = counts
        return self.slices[key]


def trusted(widths: Widths, counted: dict[tuple, int]) -> Widths | None:
    """The formula, if it gives all that was counted."""
    return widths if all(widths.cost(dict(key)) == macs for key, macs in counted.items()) else None


def counted(work: Callable[[], object]) -> int:
    """The multiply-accumulates that a piece of torch code really does, and 4 for each number BatchNorm makes."""
    with FlopCounterMode(display=False, custom_mapping=RULES) as counter:
        work()
    return counter.get_total_flops() // 2


def masked(plan: Plan) -> tuple:
    """What the cost of a masked model depends on: it computes all of itself, whatever the masks leave."""
    return tuple(sorted(plan.kept))


def kept(plan: Plan, axes: Sequence[Axis]) -> tuple:
    """What the cost of a plan depends on: how many units of each axis it keeps."""
    return tuple(sorted((axis.name, len(plan.kept[axis.name])) for axis in axes if axis.name in plan.kept))


# Rules for what torch's counter passes over. They are given shapes, and count operations: two a multiply-accumulate.


def batch_norm(x, *_, **__) -> int:
    """Papers count 4 for each number. The backward pass is element-wise work and not counted."""
    return 2 * 4 * prod(x)


def rnn(x, *weights, **_) -> int:
    """A recurrent layer in one operation: every matrix meets every position of every sequence."""
    return 2 * prod(x[:-1]) * sum(prod(w) for w in weights if matrix(w))


def rnn_layer(x, w_ih, w_hh, *_, **__) -> int:
    return rnn(x, w_ih, w_hh)


def rnn_layers(x, weights, *_, **__) -> int:
    return rnn(x, *weights)


def twice(forward: Callable[..., int]) -> Callable[..., int]:
    """A backward pass makes two products for each one of the forward pass."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def scores(query, key, value, *_, **__) -> int:
    """Torch has this rule for the kernels of a GPU and not for that of a processor."""
    return sdpa_flop_count(query, key, value)


def scores_backward(grad, query, key, value, *_, **__) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def attention(query, key, value, _width, _heads, qkv, _qkv_bias, out, *_, **__) -> int:
    """Multi-head attention in one operation: its projections, then scores and sums over positions."""
    (batch, length, width), others = query, key[1]
    return 2 * batch * (length * (prod(qkv) + prod(out)) + 2 * length * others * width)


def encoder_layer(x, width, heads, qkv, qkv_bias, out, *rest, **_) -> int:
    """A whole Transformer layer in one operation."""
    up, down = rest[8], rest[10]
    return attention(x, x, x, width, heads, qkv, qkv_bias, out) + 2 * prod(x[:-1]) * (prod(up) + prod(down))


def matrix(shape) -> bool:
    return isinstance(shape, (tuple, torch.Size)) and len(shape) == 2


aten = torch.ops.aten
RULES = {
    aten.native_batch_norm: batch_norm,
    aten._native_batch_norm_legit: batch_norm,
    aten._native_batch_norm_legit_functional: batch_norm,
    aten._native_batch_norm_legit_no_training: batch_norm,
    aten._batch_norm_with_update: batch_norm,
    aten._batch_norm_with_update_functional: batch_norm,
    aten._batch_norm_no_update: batch_norm,
    aten.cudnn_batch_norm: batch_norm,
    aten.miopen_batch_norm: batch_norm,
    aten.mkldnn_rnn_layer: rnn_layer,
    aten.mkldnn_rnn_layer_backward: twice(rnn_layer),
    aten._cudnn_rnn: rnn_layers,
    aten._cudnn_rnn_backward: twice(rnn_layers),
    aten.miopen_rnn: rnn_layers,
    aten.miopen_rnn_backward: twice(rnn_layers),
    aten._scaled_dot_product_flash_attention_for_cpu: scores,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: scores_backward,
    aten._native_multi_head_attention: attention,
    aten._transformer_encoder_layer_fwd: encoder_layer,
}
