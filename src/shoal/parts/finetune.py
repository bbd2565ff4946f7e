"""Fine-tuning: every device trains a copy of its model before it uses it; the baseline of personal methods."""

from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.core.part import Neutral, Part
from shoal.core.types import Work
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class FineTune(Part):
    """Before a device uses its model it trains a copy on its own samples, of which nothing is kept.

    `epochs` is how long, `lr` the learning rate; 0 is that of the recipe in the round.
    """

    cite: ClassVar = ()
    neutral: ClassVar = Neutral({})

    epochs: float = 1.0
    lr: float = 0.0

    def __post_init__(self):
        require(self, "epochs > 0 and lr >= 0", self.epochs > 0 and self.lr >= 0)

    def finetune(self, work: Work) -> Work:
        return replace(work, epochs=self.epochs, steps=0, lr=self.lr or work.lr)
