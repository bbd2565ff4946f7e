"""Bytes of all tensors that a piece of torch code makes, counted by a dispatch mode, a private interface of torch."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from shoal.core.model.dynamo_import import call_without_dynamo
from shoal.core.model.torch_fallback import log_fallback

ResultType = TypeVar("ResultType")


def count_made_bytes(work: Callable[[], ResultType]) -> tuple[ResultType, int]:
    """What `work` returns, and the bytes of all tensors that it makes; views count like what they look at.

    They are 0 where torch does not let us count them: what a stack of devices needs is found by tracing a step then.
    """
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        log_fallback("torch.utils._python_dispatch.TorchDispatchMode", "a step is traced to see what memory it takes")
        return work(), 0
    total = 0

    class MadeBytesCounter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal total
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (list, tuple)) else (result,):
                total += tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
            return result

    with call_without_dynamo(MadeBytesCounter.__torch_dispatch__), MadeBytesCounter():
        result = work()
    return result, total
