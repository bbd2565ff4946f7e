"""What the server knows from one round to the next, and how it comes to know devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree

EnrolmentCard = dict[str, Tensor]
"""What a device tells about itself at first contact."""


@dataclass(frozen=True, eq=False)
class ServerState:
    """All that the server keeps from one round to the next."""

    net: Net
    params: Params
    states: dict[str, Tree]
    cards: dict[int, EnrolmentCard] = field(default_factory=dict)
    cuts: tuple[Plan, ...] = ()
    """What each pruning left of the model before it."""
    owed: int = 0
    """Bytes of enrolment that no row has counted yet."""


class MissingEnrolment(ShoalError):
    """Devices that a part must know have not told about themselves."""

    def __init__(self, devices: Sequence[int]):
        problem = f"Device {devices[0]} did not introduce itself, and the method must know it."
        super().__init__("unreachable", problem, "Start the device; it takes part from then on.")
        self.devices = tuple(devices)

    def __reduce__(self):
        return MissingEnrolment, (self.devices,)


class EnrolmentRegister:
    """The roster of one round: cards known before, and those asked for now, whose bytes are counted."""

    def __init__(self, cards: dict[int, EnrolmentCard], enrol: Callable[[Sequence[int]], dict[int, EnrolmentCard]]):
        self.cards, self.enrol, self.nbytes = dict(cards), enrol, 0
        self.silent: set[int] = set()
        """Devices that were asked in this round and did not answer; they are not asked again."""

    def __getitem__(self, device: int) -> EnrolmentCard:
        return self.fetch_cards([device])[device]

    def fetch_cards(self, devices: Sequence[int]) -> dict[int, EnrolmentCard]:
        """The cards of these devices; those not known yet are asked for in one go."""
        strangers = [d for d in devices if d not in self.cards and d not in self.silent]
        if strangers:
            told = self.enrol(strangers)
            self.cards |= told
            self.nbytes += tree.count_tree_bytes(told)
            self.silent |= set(strangers) - set(told)
        gone = [d for d in devices if d in self.silent]
        if gone:
            raise MissingEnrolment(gone)
        return {d: self.cards[d] for d in devices}
