"""The nouns of a round: what parts are given and what they return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.fleet_protocol import Fleet
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.streams import RandomStreams, part_stream_name

if TYPE_CHECKING:
    from shoal.core.model.net import Net
    from shoal.core.wire import Message


SERVER = -1
"""The server's own device number when it takes part as a pseudo-device."""


class Batch(NamedTuple):
    """One mini-batch. `weight` is 0 for padding (None: no padding); each target list has its own weight (Mixup)."""

    inputs: Tensor
    targets: tuple[tuple[Tensor, Tensor | None], ...]
    weight: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one value per sample, padding left out."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp(min=1)


class BatchScore(NamedTuple):
    """The score of one mini-batch. `features` are the inputs of the last layer, `taps` outputs asked for by name."""

    loss: Tensor
    logits: Tensor
    features: Tensor
    taps: dict[str, Tensor]
    buffers: dict[str, Tensor]
    aux: dict[str, Tensor]


class Scorer(Protocol):
    def __call__(self, params: Params, batch: Batch, /) -> BatchScore: ...


class Local(NamedTuple):
    """What a part may read inside one local step; tensors only, so that many devices can share one call.

    `anchor` is what was received, `got` what the part's own `send` put beside it, `numbers` hold lr, step, steps,
    epoch and size, `draws` what the part's `draw` drew for this step, `state` what its `begin` or last `step` left;
    `net` runs the model with any parameters.
    """

    net: "Net"
    anchor: Params
    got: dict[str, Any]
    numbers: dict[str, Tensor]
    draws: dict[str, Tensor]
    state: Tree


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows of a data set by index; nothing is copied until a batch is taken. The index is always in main memory."""

    inputs: Tensor
    targets: Tensor
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def take_batch(self, rows: Tensor) -> Batch:
        rows = rows.to(self.inputs.device)
        return Batch(self.inputs.index_select(0, rows), ((self.targets.index_select(0, rows), None),))

    def take_all(self) -> Batch:
        return self.take_batch(self.index)

    def join(self, other: "Samples") -> "Samples":
        """Both sets together; they must be rows of the same data set."""
        return Samples(self.inputs, self.targets, torch.cat((self.index, other.index)))


@dataclass(frozen=True, eq=False)
class Device:
    """One device in one round as one of its parts sees it, outside compiled code."""

    id: int
    round: int
    samples: Samples
    net: "Net"
    numbers: dict[str, Tensor]
    anchor: Params
    covered: dict[str, Tensor]
    """Which elements arrived, for tensors that did not arrive whole (a tensor that is missing: all False)."""
    got: dict[str, Any]
    plan: Plan
    streams: RandomStreams
    part: str
    shared: Samples | None = None
    """The server's samples, where it hands them out: at `data`."""

    def generator(self, purpose: str = "") -> torch.Generator:
        """The part's own stream on this device in this round; a purpose gives it further ones."""
        return self.streams.make_torch_generator(part_stream_name(self.part, purpose), self.round, self.id)

    def has_request(self, request: str) -> bool:
        """Whether the part's `send` made this request in this round."""
        return request in self.got


@dataclass(frozen=True)
class Work:
    """How much a device trains and how fast it learns in one round."""

    epochs: float
    steps: int
    batch: int
    lr: float


@dataclass(frozen=True, eq=False)
class Job:
    """All that a device is told in one round."""

    device: int
    round: int
    plan: Plan
    message: "Message"
    work: Work


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came back from a job: a message, or the reason why there is none."""

    device: int
    message: "Message | None" = None
    problem: str = ""
    steps: int = 0
    samples: int = 0
    loss: float = float("nan")
    macs_forward: int = 0
    macs_work: int = 0
    finite: bool = False
    """Whether the numbers of the message were looked at before it was encoded, by somebody the server trusts."""


@dataclass(frozen=True, eq=False)
class Reply:
    """A decoded outcome. `covered` lists the tensors that did not come back whole, and which elements did."""

    device: int
    size: int
    delta: Params
    covered: dict[str, Tensor]
    report: Mapping[str, Mapping[str, Any]]
    outcome: Outcome


@dataclass(frozen=True)
class Optimiser:
    """The recipe's own local optimiser: SGD, fresh in every round."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    """The largest norm of a gradient; 0 for no bound."""


class Roster(Protocol):
    """What devices told about themselves at first contact; asked when first needed, and counted then."""

    def __getitem__(self, device: int) -> dict[str, Tensor]: ...

    def fetch_cards(self, devices: Sequence[int]) -> dict[int, dict[str, Tensor]]: ...


@dataclass(frozen=True, eq=False)
class Round:
    """What the server knows at a moment of a round; fields are filled in as the round goes on."""

    number: int
    net: "Net"
    anchor: Params
    """The parameters at the start of the round."""
    sizes: np.ndarray
    """Samples held by each device of the population."""
    sample: int
    """How many devices are to be asked."""
    streams: RandomStreams
    roster: Roster
    work: Work
    optimiser: Optimiser
    fleet: Fleet
    server: Samples | None = None
    """The server's own samples, where the recipe gives it any."""
    learn: Callable[[Params, Work], Params] = lambda params, work: params
    """Where so much plain training on those samples takes parameters."""
    devices: Sequence[int] = ()
    plans: Mapping[int, Plan] = field(default_factory=dict)
    replies: Sequence[Reply] = ()
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    params: Params = field(default_factory=dict)
    """The new parameters, once there are any: at `prune` and `evaluate`."""
    part: str = ""
    """The part that is looking, so that its draws come from its own stream."""
    own_weights: bool = False
    """Whether a part sets the weights of replies, so that they do not start from numbers of samples."""

    def generator(self, purpose: str = "") -> np.random.Generator:
        """The part's own stream on the server in this round."""
        return self.streams.make_numpy_generator(part_stream_name(self.part, purpose), self.number)

    @property
    def population_shares(self) -> np.ndarray:
        """The share of each device in a mean over the whole population: by samples, as replies are weighed.

        Where a part sets the weights of replies, every device that holds data has the same share.
        """
        mass = self.sizes > 0 if self.own_weights else self.sizes
        return mass / mass.sum()

    @property
    def eligible(self) -> np.ndarray:
        """The devices that hold data and are there; nobody else is ever selected."""
        there = self.fleet.get_available_mask(self.number)
        return np.flatnonzero(self.sizes > 0 if there is None else (self.sizes > 0) & there)
