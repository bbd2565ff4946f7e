"""The outputs of a model for many samples, for evaluations: by the model as it is, or by what an engine has for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from shoal.core.model.inputs import Inputs
from shoal.core.model.net import Net
from shoal.core.model.tree import Params


class ForwardPass(Protocol):
    """Computes the outputs of a model for some samples, without gradients."""

    def __call__(self, net: Net, params: Params, inputs: Inputs, /) -> Tensor: ...


def run_model(net: Net, params: Params, inputs: Inputs) -> Tensor:
    """The outputs by the model as it is."""
    return net.forward(params, inputs)[0]


_forward_pass: ContextVar[ForwardPass] = ContextVar("forward_pass", default=run_model)


def compute_outputs(net: Net, params: Params, inputs: Inputs) -> Tensor:
    """The outputs of a model, by the forward pass that is in use."""
    return _forward_pass.get()(net, params, inputs)


@contextmanager
def use_forward_pass(forward_pass: ForwardPass) -> Iterator[None]:
    """Inside, evaluations compute outputs in this way."""
    token = _forward_pass.set(forward_pass)
    try:
        yield
    finally:
        _forward_pass.reset(token)
