"""One fake mode for all that a trace notes down; torch would make one for every tensor, which doubles its time."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from shoal.core.model.torch_fallback import log_fallback


@contextmanager
def share_fake_mode() -> Iterator[None]:
    """Let all traces inside share a fake mode."""
    try:
        from torch._guards import TracingContext, tracing
        from torch._subclasses.fake_tensor import FakeTensorMode

        shared = tracing(TracingContext(FakeTensorMode()))
    except (ImportError, AttributeError, TypeError):
        log_fallback("torch._guards", "every tensor of a trace gets a fake mode of its own")
        shared = nullcontext()
    with shared:
        yield
