"""The data types of a round, which parts are given and return: devices, jobs, replies, the round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.errors import ShoalError
from shoal.core.fleet_protocol import Fleet
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.optimiser import Optimiser
from shoal.core.short_repr import make_short_repr
from shoal.core.streams import RandomStreams, part_stream_name
from shoal.core.telling import Telling, make_told_key

if TYPE_CHECKING:
    from shoal.core.model.net import Net
    from shoal.core.wire import Message


SERVER = -1
"""The device number of the server where it trains in the cohort like a device."""


def raise_outside_step(params: Params) -> Tensor:
    """The loss of all parts is known only after every part's `objective` has been asked."""
    problem = "`local.loss_at` was called outside of `step`."
    raise ShoalError("bad-part", problem, "In `objective`, call the scorer that is given as `inner`.")


class Local(NamedTuple):
    """What a part may read inside one local step; tensors only, so that steps of many devices can be batched.

    `anchor` is what was received, `got` what the part's own `send` put beside it, `numbers` hold lr (of this step),
    step, steps, epoch and size, `draws` what the part's `draw` drew for this step, `state` what its `begin` or last
    `step` left; `net` runs the model with any parameters. At `step`, `loss_at(params)` is the local objective of all
    parts on the batch of this step, at any parameters.
    """

    net: "Net"
    anchor: Params
    got: dict[str, Any]
    numbers: dict[str, Tensor]
    draws: dict[str, Tensor]
    state: Tree
    loss_at: Callable[[Params], Tensor] = raise_outside_step

    def __repr__(self) -> str:
        return make_short_repr(self)


@dataclass(frozen=True, eq=False)
class Device:
    """One device in one round as a part sees it outside local steps: at data, begin, draw, end and measure."""

    id: int
    round: int
    samples: Samples
    net: "Net"
    numbers: dict[str, Tensor]
    anchor: Params
    covered: dict[str, Tensor]
    """Which elements arrived, for tensors that did not arrive whole (all False for one that did not arrive)."""
    got: dict[str, Any]
    plan: Plan
    streams: RandomStreams
    part: str
    shared: Samples | None = None
    """The server's samples, if it has any; only at `data`."""
    told: dict[str, Tensor] | None = None
    """What parts have told on this device in this round; None where the server did not ask."""

    def __repr__(self) -> str:
        return make_short_repr(self)

    def tell(self, name: str, value: float | Tensor) -> None:
        """Put a number beside the reply, where the server asks for it; the part's `metrics` must have it `on_device`.

        It appears in the row of the round as the column `part.name`, reduced over devices as its `over` says.
        """
        if self.told is not None:
            self.told[make_told_key(self.part, name)] = torch.as_tensor(value).detach()

    def generator(self, purpose: str = "") -> torch.Generator:
        """A generator at the start of the part's stream for this device and round; each purpose has its own stream."""
        return self.streams.make_torch_generator(part_stream_name(self.part, purpose), self.round, self.id)

    @property
    def lr_sum(self) -> Tensor:
        """The learning rates of all local steps of the round, added up; `numbers` hold the one before its schedule."""
        return self.numbers["lr_sum"] if "lr_sum" in self.numbers else self.numbers["lr"] * self.numbers["steps"]

    def has_request(self, request: str) -> bool:
        """Whether the part's `send` made this request in this round."""
        return request in self.got


@dataclass(frozen=True)
class Work:
    """How long a device trains in a round (`steps`, or `epochs` where steps is 0), batch size, and learning rate."""

    epochs: float
    steps: int
    batch: int
    lr: float


@dataclass(frozen=True, eq=False)
class Job:
    """What a device is sent in one round: the message, the plan that cut it, and how long to train."""

    device: int
    round: int
    plan: Plan
    message: "Message"
    work: Work


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came back from a job: a message, or `problem`, the reason why there is none; and what training cost.

    `loss` is the mean training loss, `macs_forward` the multiply-accumulates of one sample through the trained slice,
    `macs_work` those of all that the device computed.
    """

    device: int
    message: "Message | None" = None
    problem: str = ""
    steps: int = 0
    samples: int = 0
    loss: float = float("nan")
    macs_forward: int = 0
    macs_work: int = 0
    finite: bool = False
    """Whether the sender, if it is trusted, has checked before encoding that all numbers are finite."""

    def __repr__(self) -> str:
        return make_short_repr(self)


@dataclass(frozen=True, eq=False)
class Reply:
    """A device's reply, decoded and at full shape.

    `delta` is what it trained minus the anchor, `size` its number of samples, `report` what parts measured, by part;
    `covered` has a mask for each tensor that did not come back whole.
    """

    device: int
    size: int
    delta: Params
    covered: dict[str, Tensor]
    report: Mapping[str, Mapping[str, Any]]
    outcome: Outcome
    plan: Plan = WHOLE_MODEL
    """Which part of the model the device was sent and trained."""
    anchor: Params = field(default_factory=dict)
    """The global model that it was sent, at full shape."""
    round: int = 0
    """The round in which it was sent."""
    count: int = 1
    """For how many devices it stands."""

    def __repr__(self) -> str:
        return make_short_repr(self)


class Roster(Protocol):
    """The enrolment cards of devices, by device number; a device is asked for its card when it is first looked up."""

    def __getitem__(self, device: int) -> dict[str, Tensor]: ...

    def fetch_cards(self, devices: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """Several cards at once, by device."""
        ...


@dataclass(frozen=True, eq=False)
class Round:
    """What the server knows in a round; devices, plans, replies, weights and params are filled in as it goes on."""

    number: int
    net: "Net"
    anchor: Params
    """The parameters at the start of the round."""
    sizes: np.ndarray
    """Samples held by each device of the population."""
    sample: int
    """How many devices to select."""
    streams: RandomStreams
    roster: Roster
    work: Work
    optimiser: Optimiser
    fleet: Fleet
    server: Samples | None = None
    """The server's own samples, if the recipe gives it any."""
    learn: Callable[[Params, Work], Params] = lambda params, work: params
    """(parameters, work) -> the parameters after plain training on the server's samples."""
    devices: Sequence[int] = ()
    plans: Mapping[int, Plan] = field(default_factory=dict)
    replies: Sequence[Reply] = ()
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    params: Params = field(default_factory=dict)
    """The new global model; only at `prune`, `observe` and `evaluate`."""
    part: str = ""
    """The name of the part that is given this round; `generator` is of its stream."""
    own_weights: bool = False
    """Whether a part sets the weights of replies; otherwise they start from numbers of samples."""
    telling: Telling = field(default_factory=Telling)
    """What parts have told in this pass of the round."""

    def __repr__(self) -> str:
        return make_short_repr(self)

    def tell(self, name: str, value: float | Tensor) -> None:
        """Put a number into the row of this round, as the column `part.name`; it must be among the part's `metrics`.

        What is told while a round is tried and thrown away does not count.
        """
        self.telling.add_number(self.part, name, value)

    def log(self, text: str) -> None:
        """Say something to the user, once in a run for each text; it is kept in the row, too."""
        self.telling.add_words(self.part, text)

    def generator(self, purpose: str = "") -> np.random.Generator:
        """A generator at the start of the part's stream on the server in this round."""
        return self.streams.make_numpy_generator(part_stream_name(self.part, purpose), self.number)

    @property
    def population(self) -> int:
        """How many devices there are, with data or without."""
        return len(self.sizes)

    @property
    def population_shares(self) -> np.ndarray:
        """One number per device, summing to 1: its share in a mean over the population, by numbers of samples.

        Where a part sets the weights of replies, every device that holds data has the same share.
        """
        sizes = self.sizes > 0 if self.own_weights else self.sizes
        return sizes / sizes.sum()

    @property
    def eligible(self) -> np.ndarray:
        """The numbers of the devices that hold data and are available; `select` chooses among them."""
        available = self.fleet.get_available_mask(self.number)
        return np.flatnonzero(self.sizes > 0 if available is None else (self.sizes > 0) & available)
