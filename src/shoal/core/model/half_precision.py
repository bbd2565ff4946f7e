"""Half precision: layers compute in bfloat16, norms in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

BATCH_NORMS = (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)
LAYER_NORMS = (F.layer_norm, torch.layer_norm)


class Float32Norms(TorchFunctionMode):
    """While it is entered, norms of bfloat16 inputs compute in float32 and put out bfloat16.

    That is what torch's own kernels for bfloat16 inputs with float32 weights and statistics do inside, but they do not
    work under `vmap` ("expected scalar type BFloat16 but found Float"). On a GPU autocast already runs layer norm in
    float32, and there it is left alone.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        x: Any = args[0] if args else None
        if isinstance(x, Tensor) and x.dtype is torch.bfloat16:
            if func in BATCH_NORMS or (func in LAYER_NORMS and x.device.type == "cpu"):
                return func(x.float(), *args[1:], **(kwargs or {})).to(x.dtype)
        return func(*args, **(kwargs or {}))


@contextmanager
def use_half_precision(place: str) -> Iterator[None]:
    """Autocast to bfloat16 on a kind of compute device ("cpu", "cuda"), with norms in float32."""
    with torch.autocast(place, torch.bfloat16, cache_enabled=False), Float32Norms():
        yield
