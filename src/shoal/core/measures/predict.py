"""The outputs of a model for many samples, for evaluations: by the model as it is, or by what an engine has for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from shoal.core.model.inputs import Inputs
from shoal.core.model.net import Net
from shoal.core.model.tree import Params


class Predictor(Protocol):
    """Computes the outputs of a model for some samples, without gradients."""

    def __call__(self, net: Net, params: Params, inputs: Inputs, /) -> Tensor: ...


def run_model(net: Net, params: Params, inputs: Inputs) -> Tensor:
    """The outputs by the model as it is."""
    return net.forward(params, inputs)[0]


_predictor: ContextVar[Predictor] = ContextVar("predictor", default=run_model)


def predict(net: Net, params: Params, inputs: Inputs) -> Tensor:
    """The outputs of a model, by the predictor that is in use."""
    return _predictor.get()(net, params, inputs)


@contextmanager
def use_predictor(predictor: Predictor) -> Iterator[None]:
    """Inside, evaluations compute outputs by this predictor."""
    token = _predictor.set(predictor)
    try:
        yield
    finally:
        _predictor.reset(token)
