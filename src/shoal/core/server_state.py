"""The server state between rounds, and the register of enrolment cards that devices send at first contact."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree

log = logging.getLogger("shoal")
EnrolmentCard = dict[str, Tensor]
"""Named tensors that a device sends once, when the server first needs to know about it."""


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the server keeps from round to round: net, global model, states of parts, enrolment cards of devices."""

    net: Net
    params: Params
    states: dict[str, Tree]
    cards: dict[int, EnrolmentCard] = field(default_factory=dict)
    cuts: tuple[Plan, ...] = ()
    """One plan per pruning: what it left of the model before it."""
    owed: int = 0
    """Bytes of enrolment cards received before the first round, which its row counts."""


class MissingEnrolment(ShoalError):
    """Devices whose enrolment cards a part needs have not sent them, or have sent what no part can use."""

    def __init__(self, devices: Sequence[int]):
        problem = f"Device {devices[0]} did not introduce itself as declared, and the method must know it."
        super().__init__("unreachable", problem, "Start the device; it takes part from then on.")
        self.devices = tuple(devices)

    def __reduce__(self):
        return MissingEnrolment, (self.devices,)


class EnrolmentRegister:
    """The roster of one round: cards known before it, and cards fetched in it, whose bytes are in `nbytes`."""

    def __init__(
        self,
        cards: dict[int, EnrolmentCard],
        enrol: Callable[[Sequence[int]], dict[int, EnrolmentCard]],
        find_fault: Callable[[EnrolmentCard], str] = lambda card: "",
    ):
        self.cards, self.enrol, self.find_fault, self.nbytes = dict(cards), enrol, find_fault, 0
        self.silent: set[int] = set()
        """Devices that were asked in this round and sent no card that can be used; they are not asked again."""

    def __getitem__(self, device: int) -> EnrolmentCard:
        return self.fetch_cards([device])[device]

    def fetch_cards(self, devices: Sequence[int]) -> dict[int, EnrolmentCard]:
        """The cards of these devices; those not known yet are asked for together."""
        unknown = [d for d in devices if d not in self.cards and d not in self.silent]
        if unknown:
            cards = self.enrol(unknown)
            self.nbytes += tree.count_tree_bytes(cards)
            faults = {device: self.find_fault(card) for device, card in cards.items()}
            for device in (d for d, fault in faults.items() if fault):
                log.warning("device %d, enrolment: %s", device, faults[device])
            self.cards |= {device: card for device, card in cards.items() if not faults[device]}
            self.silent |= set(unknown) - set(self.cards)
        missing = [d for d in devices if d in self.silent]
        if missing:
            raise MissingEnrolment(missing)
        return {d: self.cards[d] for d in devices}
