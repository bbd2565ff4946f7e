"""What the server knows from one round to the next, and how it comes to know devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.core import tree
from shoal.core.net import Net
from shoal.core.plan import Plan
from shoal.core.tree import Params, Tree

Card = dict[str, Tensor]
"""What a device tells about itself at first contact."""


@dataclass(frozen=True, eq=False)
class Standing:
    """All that the server keeps from one round to the next."""

    net: Net
    params: Params
    states: dict[str, Tree]
    cards: dict[int, Card] = field(default_factory=dict)
    cuts: tuple[Plan, ...] = ()
    """What each pruning left of the model before it."""
    owed: int = 0
    """Bytes of enrolment that no row has counted yet."""


class Register:
    """The roster of one round: cards known before, and those asked for now, whose bytes are counted."""

    def __init__(self, cards: dict[int, Card], enrol: Callable[[Sequence[int]], dict[int, Card]]):
        self.cards, self.enrol, self.nbytes = dict(cards), enrol, 0

    def __getitem__(self, device: int) -> Card:
        return self.ask([device])[device]

    def ask(self, devices: Sequence[int]) -> dict[int, Card]:
        """The cards of these devices; those not known yet are asked for in one go."""
        strangers = [d for d in devices if d not in self.cards]
        if strangers:
            told = self.enrol(strangers)
            self.cards |= told
            self.nbytes += tree.nbytes(told)
        return {d: self.cards[d] for d in devices}
