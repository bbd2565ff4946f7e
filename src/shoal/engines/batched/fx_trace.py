"""Tracing a function into a graph of plain tensor operations with make_fx, a private interface of torch."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from shoal.core.model.torch_fallback import log_fallback
from shoal.engines.batched.fake_mode import share_fake_mode

Trace = Callable[[Callable[..., Any], Sequence[Tensor], bool], fx.GraphModule | None]
"""What traces: `trace_function`, or something that finds what it traced before."""


def trace_function(function: Callable[..., Any], example: Sequence[Tensor], fake: bool) -> fx.GraphModule | None:
    """The operations of a function, from an example of its tensors; with `fake` nothing is computed.

    None where torch cannot trace at all; an exception is one of the function, which then cannot be traced.
    """
    try:
        from torch.fx.experimental.proxy_tensor import make_fx

        tracer = make_fx(function, tracing_mode="fake" if fake else "real", _allow_non_fake_inputs=fake)
    except (ImportError, AttributeError, TypeError):
        log_fallback("torch.fx.experimental.proxy_tensor.make_fx", "steps run as they are written")
        return None
    with torch.no_grad(), nullcontext() if fake else share_fake_mode():
        return tracer(*example)
