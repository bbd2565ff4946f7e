"""Counting multiply-accumulates with torch's FLOP counter, with rules for operations it misses, and a cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shoal.core.model.dynamo_import import call_without_dynamo
from shoal.core.model.flops_by_width import FlopsByWidth, count_models_to_cut
from shoal.core.model.plan import Axis, Plan

if TYPE_CHECKING:
    from shoal.core.model.net import Net


class NoModules:
    """In place of what notes the modules in which operations are: only their sum is wanted.

    Torch's own puts hooks on what modules are given, which fail on parameters, as parametrised layers are given them.
    """

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class FlopCache:
    """Multiply-accumulates by key; the key holds all shapes that a cost depends on, so each is counted once."""

    def __init__(self):
        self.known: dict[tuple, int] = {}
        self.drawn: dict[tuple, list[torch.Size]] = {}
        """The shapes of the random numbers that layers draw in a step, by the same keys."""
        self.made_bytes: dict[tuple, int] = {}
        """Bytes of all tensors that a step makes, by the same keys."""
        self.slices: dict[tuple, int] = {}
        """Multiply-accumulates of one sample through a submodel, by its widths."""
        self.widths: FlopsByWidth | None = None

    def run_and_count(self, key: tuple, work: Callable[[], object]) -> int:
        """Call `work`, and return its multiply-accumulates."""
        if key in self.known:
            work()
        else:
            self.known[key] = count_macs(work)
        return self.known[key]

    def count_forward(self, net: "Net", plan: Plan) -> int:
        """Multiply-accumulates of one sample through the submodel that a plan trains."""
        key = make_width_key(plan, net.axes) if plan.kept else ()
        if not key:
            return net.macs_forward
        if key not in self.slices:
            if len(self.slices) == count_models_to_cut(len(net.axes)):
                self.widths = verify_width_formula(FlopsByWidth(net), self.slices)
            counts = (
                self.widths.predict_macs(dict(key)) if self.widths else net.cut(replace(plan, masks={})).macs_forward
            )
            self.slices[key] = counts
        return self.slices[key]


def verify_width_formula(widths: FlopsByWidth, measured: dict[tuple, int]) -> FlopsByWidth | None:
    """The formula if it agrees with all costs that were measured, else None."""
    return widths if all(widths.predict_macs(dict(key)) == macs for key, macs in measured.items()) else None


def count_macs(work: Callable[[], object]) -> int:
    """The multiply-accumulates of a piece of torch code while it runs; 4 for each output of batch norm."""
    mode = getattr(flop_counter, "_FlopCounterMode", None)
    counter: Any = FlopCounterMode(display=False, custom_mapping=FLOP_RULES)
    counter.mod_tracker = NoModules()
    with call_without_dynamo(getattr(mode, "__torch_dispatch__", None)), counter:
        work()
    return counter.get_total_flops() // 2


def make_mask_key(plan: Plan) -> tuple:
    """What the cost of a masked model depends on: which axes are masked, since it computes all units anyway."""
    return tuple(sorted(plan.kept))


def make_width_key(plan: Plan, axes: Sequence[Axis]) -> tuple:
    """What the cost of a plan depends on: how many units of each axis it keeps."""
    return tuple(sorted((axis.name, len(plan.kept[axis.name])) for axis in axes if axis.name in plan.kept))


# Rules for operations that torch's counter does not know. They are given shapes and return operations, two for each
# multiply-accumulate.


def count_batch_norm(x, *_, **__) -> int:
    """4 multiply-accumulates for each output, as papers count; the element-wise backward pass counts as nothing."""
    return 2 * 4 * prod(x)


def count_rnn(x, *weights, **_) -> int:
    """A fused recurrent layer: every matrix is applied at every position of every sequence."""
    return 2 * prod(x[:-1]) * sum(prod(w) for w in weights if is_matrix(w))


def count_rnn_layer(x, w_ih, w_hh, *_, **__) -> int:
    return count_rnn(x, w_ih, w_hh)


def count_rnn_layers(x, weights, *_, **__) -> int:
    return count_rnn(x, *weights)


def double_for_backward(forward: Callable[..., int]) -> Callable[..., int]:
    """A backward pass makes two products for each one of the forward pass."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def count_attention_scores(query, key, value, *_, **__) -> int:
    """Torch has this rule for the kernels of a GPU and not for that of a processor."""
    return sdpa_flop_count(query, key, value)


def count_attention_backward(grad, query, key, value, *_, **__) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def count_attention(query, key, value, _width, _heads, qkv, _qkv_bias, out, *_, **__) -> int:
    """Fused multi-head attention: projections, then scores and weighted sums over positions."""
    (batch, length, width), others = query, key[1]
    return 2 * batch * (length * (prod(qkv) + prod(out)) + 2 * length * others * width)


def count_encoder_layer(x, width, heads, qkv, qkv_bias, out, *rest, **_) -> int:
    """A fused Transformer encoder layer: attention and the two layers of its MLP."""
    up, down = rest[8], rest[10]
    return count_attention(x, x, x, width, heads, qkv, qkv_bias, out) + 2 * prod(x[:-1]) * (prod(up) + prod(down))


def count_nothing(*_, **__) -> int:
    """Of an operation without products. A rule keeps torch's counter from computing it in other pieces than its kernel
    does, which would change the last bits of what is counted beside what is not."""
    return 0


def is_matrix(shape) -> bool:
    return isinstance(shape, (tuple, torch.Size)) and len(shape) == 2


aten = torch.ops.aten
FLOP_RULES = {
    getattr(aten, operation): rule
    for operation, rule in {
        "native_batch_norm": count_batch_norm,
        "_native_batch_norm_legit": count_batch_norm,
        "_native_batch_norm_legit_functional": count_batch_norm,
        "_native_batch_norm_legit_no_training": count_batch_norm,
        "_batch_norm_with_update": count_batch_norm,
        "_batch_norm_with_update_functional": count_batch_norm,
        "_batch_norm_no_update": count_batch_norm,
        "cudnn_batch_norm": count_batch_norm,
        "miopen_batch_norm": count_batch_norm,
        "mkldnn_rnn_layer": count_rnn_layer,
        "mkldnn_rnn_layer_backward": double_for_backward(count_rnn_layer),
        "_cudnn_rnn": count_rnn_layers,
        "_cudnn_rnn_backward": double_for_backward(count_rnn_layers),
        "miopen_rnn": count_rnn_layers,
        "miopen_rnn_backward": double_for_backward(count_rnn_layers),
        "_scaled_dot_product_flash_attention_for_cpu": count_attention_scores,
        "_scaled_dot_product_flash_attention_for_cpu_backward": count_attention_backward,
        "_native_multi_head_attention": count_attention,
        "_transformer_encoder_layer_fwd": count_encoder_layer,
    }.items()
    if hasattr(aten, operation)  # other releases of torch have others
} | {
    getattr(aten, operation).default: count_nothing
    for operation in ("silu_backward", "mish_backward", "_fused_rms_norm", "native_channel_shuffle")
    if hasattr(aten, operation)
}
