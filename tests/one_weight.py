"""A model of one weight on the squared loss, small enough to work every number out by hand.

Every sample is x = 1 with an integer target y, so a device's gradient is w - mean(y).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.batch import Batch, BatchScore, Samples, Scorer
from shoal.core.compose import compose
from shoal.core.local.device import TrainingSetup
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.round import Loop
from shoal.core.session import Session, play_round
from shoal.core.streams import RandomStreams
from shoal.core.types import Local, Optimiser, Work
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.fleet.fleets import UniformFleet
from shoal.storage.memory import DeviceMemory


@dataclass(frozen=True)
class Squared(Part):
    """Half the squared distance of the output from the target."""

    replaces_loss: ClassVar = True

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def half(params: Params, batch: Batch) -> BatchScore:
            output = (batch.inputs * params["weight"]).sum(-1)
            scored = inner(params, batch)
            return scored._replace(loss=batch.mean((output - batch.targets[0][0]).square() / 2))

        return half


class OneWeight(nn.Module):
    def __init__(self, start: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, 1), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).expand(-1, 8)


PLAIN = Optimiser()


def one_weight(
    parts: Sequence[Part],
    targets: Sequence[Sequence[int]],
    rounds: int = 1,
    lr: float = 0.1,
    steps: Callable[[int], int] = lambda device: 1,
    optimiser: Optimiser = PLAIN,
    x: Sequence[float] | None = None,
    start: float = 0.0,
) -> tuple[list[float], list[float], list[dict]]:
    """The weight that is broadcast and the one that is judged after each round, and the rows; from w = `start`."""
    sent, judged, rows = [], [], []
    session = start_one_weight(parts, targets, lr, steps, optimiser, x, start)
    for _ in range(rounds):
        row = play_round(session)
        assert session.server_state
        sent.append(float(session.server_state.params["weight"]))
        judged.append(row["accuracy"])
        rows.append(row)
    return sent, judged, rows


def start_one_weight(
    parts: Sequence[Part],
    targets: Sequence[Sequence[int]],
    lr: float = 0.1,
    steps: Callable[[int], int] = lambda device: 1,
    optimiser: Optimiser = PLAIN,
    x: Sequence[float] | None = None,
    start: float = 0.0,
) -> Session:
    """The run before its first round."""
    net = Net(OneWeight(start), (1,), 8)
    method, streams = compose([*parts, Squared()]), RandomStreams(0)
    net = method.model(net)
    ends = np.cumsum([0, *map(len, targets)])
    y = torch.tensor([v for own in targets for v in own])
    scale = torch.ones(len(targets)) if x is None else torch.tensor(x)
    inputs = torch.cat([s.repeat(len(own)) for s, own in zip(scale, targets)]).double().unsqueeze(1)

    def samples(device: int) -> Samples:
        return Samples(inputs, y, torch.arange(ends[device], ends[device + 1]))

    sizes = np.array([len(own) for own in targets])
    loop = Loop(
        method,
        LocalDevices(TrainingSetup(method, net, streams, optimiser, samples), DeviceMemory(), SerialEngine()),
        UniformFleet(),
        streams,
        sizes,
        len(targets),
        lambda round, device: Work(0.0, steps(device), 1000, lr),
        lambda net, params: {"accuracy": float(params["weight"])},
        lambda number: True,
        optimiser,
    )
    return Session(loop, net)
