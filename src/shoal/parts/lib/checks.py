"""Checks of hyper-parameters when a part is made, and of the model when a run begins."""

from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from math import isfinite

import torch

from shoal.core.batch import Batch
from shoal.core.builtin_tasks import TASKS
from shoal.core.errors import ShoalError, describe_error
from shoal.core.model.inputs import describe_inputs
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis
from shoal.core.part import Part
from shoal.core.types import Round
from shoal.parts.lib.curvature import FlatLoss


def require(part: Part, rule: str, holds: bool) -> None:
    """Refuse a part whose numbers are not finite, are integers beyond 64 bits, or break a rule."""
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    finite = all(isfinite(v) for v in values.values() if isinstance(v, float))
    small = all(abs(v) < 2**63 for v in values.values() if isinstance(v, int))
    if not (holds and finite and small):
        given = ", ".join(f"{k}={v!r}" for k, v in values.items())
        raise ValueError(f"{part.name()} needs {rule}, got {given}")


def require_axes(part: Part, net: Net, usable: Sequence[Axis], widen: str = "") -> None:
    """Refuse a model of which a part could leave nothing out.

    `usable` are those of the model's axes that the part may cut; `widen` is the option that lets it cut the others.
    """
    if usable:
        return
    advice = "Use lenet, cnn, vgg11, resnet18, lstm or vit."
    if net.axes:
        advice = f"Write {widen}." if widen else advice
    elif net.frozen:
        advice = "Frozen layers are never cut; of lora(...), with a and b shared, the ranks are units."
    elif find_spec("torch_pruning") is None:
        advice += ' For a module of your own install "shoal[axes]".'
    problem = f"{part.name()} leaves out units, and this model has none that it could leave out."
    raise ShoalError("bad-part", problem, advice)


def require_curvature(part: Part, net: Net) -> None:
    """Refuse a model whose loss has no second derivative that torch could take, tried on two samples."""
    inputs = net.make_example_inputs(2)
    try:
        outputs = net.forward(net.initial, inputs)[0]
        if net.task.has_class_logits:
            targets = torch.zeros(outputs.shape[:-1], dtype=torch.long, device=net.place)
        elif net.task.name in TASKS:
            targets = torch.zeros_like(outputs)
        else:
            return  # nobody knows here what its targets look like
        loss = FlatLoss(net, net.initial, Batch(inputs, ((targets, None),)))
        at = loss.flatten(net.initial)
        loss.build_hessian_product(at)(torch.ones_like(at))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why = describe_error(error)
        problem = f"{part.name()} measures the curvature of the loss, which torch cannot do for this model ({why})."
        raise ShoalError("bad-part", problem, "Write rule='fixed' and a rate, or replace that operation.") from error


def require_one_tensor(part: Part, net: Net, use: str) -> None:
    """Refuse a model whose inputs are a dict or tuple of tensors; `use` says what the part does with inputs."""
    if net.example is not None:
        problem = f"{part.name()} {use} one tensor of inputs, and this model takes {describe_inputs(net.example)}."
        raise ShoalError("bad-part", problem, f"Leave {part.name()} out, or give inputs as one tensor.")


def require_server(part: Part, round: Round, use: str) -> None:
    """Refuse a run without samples on the server; `use` says what the part does with them."""
    if round.server is None:
        problem = f"{part.name()} {use} samples of the server, and there are none."
        raise ShoalError("no-data", problem, "Give it some: --server-data share:0.05.")


def require_no_momentum(part: Part, round: Round, why: str) -> None:
    """Refuse a recipe whose local optimiser has momentum; `why` says what the part needs plain steps for."""
    if round.optimiser.momentum > 0:
        problem = f"{part.name()} cannot be used with local momentum {round.optimiser.momentum:g}: {why}."
        raise ShoalError("clash", problem, "Leave `momentum` at 0.")
