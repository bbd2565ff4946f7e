"""Gradient checkpointing: the layers of a stack keep only their inputs, and are computed again on the way back.

Chen, Xu, Zhang, Guestrin 2016 (arXiv:1604.06174). It goes by hooks of autograd, which neither `vmap` nor traced steps
know, so it is for devices that train one after the other.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn

from shoal.core.errors import ShoalError

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What is entered while a layer is computed first, and while it is computed again."""
Repeat = Callable[[AbstractContextManager[Any]], AbstractContextManager[Any]]
"""From what gives a layer its random numbers again, all that is entered while it is computed again."""


class DrawingMode(Protocol):
    """What layers draw random numbers by, so that a layer which is computed again has the same."""

    def record_draws(self) -> Contexts: ...


entered_overrides: ContextVar[Any] = ContextVar("entered_overrides", default=None)
"""The `DrawingMode` that is entered now, or None."""


def find_repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of every `nn.ModuleList` whose members are two or more of one class, but for lists inside of those."""
    found: list[nn.Module] = []
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList) else []
        if len(members) > 1 and len({type(member) for member in members}) == 1:
            found += members
        else:
            found += find_repeated_layers(child)
    return found


def require_repeated_layers(module: nn.Module, name: str) -> None:
    """Refuse a model without a stack of layers, of which nothing could be computed again."""
    if not find_repeated_layers(module):
        problem = f"gradient_checkpointing works on layers of one kind in an nn.ModuleList, and {name[:80]} has none."
        raise ShoalError("bad-value", problem, "Leave it out; accumulate saves memory with any model.")


@contextmanager
def checkpoint_layers(layers: list[nn.Module], repeat: Repeat) -> Iterator[None]:
    """Inside, calls of these layers keep their inputs only, where a gradient is wanted.

    `repeat` is called when one of them is computed first.
    """
    checkpoint: Any = import_module("torch.utils.checkpoint").checkpoint

    def make_contexts() -> Contexts:
        mode: DrawingMode | None = entered_overrides.get()
        first, drawn = mode.record_draws() if mode else (ExitStack(), ExitStack())
        return first, repeat(drawn)

    def call_checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": make_contexts}
        return checkpoint(forward, *args, **settings, **kwargs)

    for layer in layers:
        layer.__dict__["forward"] = partial(call_checkpointed, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
