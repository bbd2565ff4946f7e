"""FedMLB: local blocks must make sense to the blocks of the received model (Kim et al. 2022, arXiv:2207.06936)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Scorer
from shoal.core.model.net import Net
from shoal.core.part import Neutral, Part
from shoal.core.types import Local
from shoal.parts.lib.checks import require
from shoal.parts.lib.hybrid_paths import add_hybrid_paths, find_block_ends, require_blocks


@dataclass(frozen=True)
class FedMLB(Part):
    """Adds the losses of hybrid paths, which start in the local model and end in the received one.

    There is one path for every block at which it can change over. `cross` weighs the cross-entropy of these paths,
    `distil` the divergence of their predictions from the local one, at the temperature `heat`.
    """

    cite: ClassVar = ("kim2022fedmlb",)
    neutral: ClassVar = Neutral({"cross": 0.0, "distil": 0.0})

    cross: float = 1.0
    distil: float = 1.0
    heat: float = 1.0

    def __post_init__(self):
        require(self, "cross and distil >= 0, heat > 0", min(self.cross, self.distil) >= 0 and self.heat > 0)

    @property
    def needs_class_logits(self) -> bool:
        """What is distilled are probabilities of classes."""
        return self.distil > 0

    def model(self, net: Net) -> Net:
        require_blocks(self, net)
        return net

    def taps(self, net: Net) -> tuple[str, ...]:
        return find_block_ends(net)

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        paths = range(1, len(local.net.blocks))
        return add_hybrid_paths(inner, local, paths, self.cross, self.distil, self.heat)
