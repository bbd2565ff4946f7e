"""Hybrid-FL: the server's samples are one more device in every round (Yoshida et al. 2020, arXiv:1905.07210)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model.tree import Tree
from shoal.core.part import Part
from shoal.core.types import SERVER, Round


@dataclass(frozen=True)
class HybridFL(Part):
    """The server trains on its samples like one more device in every round.

    It counts n_0, in whatever measure the other replies are weighed.
    """

    cite: ClassVar = ("yoshida2020hybridfl",)
    reads: ClassVar = frozenset({"sizes"})

    def select(self, devices: Sequence[int], state: Tree, round: Round) -> tuple[Sequence[int], Tree]:
        return (devices if SERVER in devices else [*devices, SERVER]), state

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        own = torch.tensor([reply.device == SERVER for reply in round.replies])
        sizes = torch.tensor([reply.size for reply in round.replies], dtype=weights.dtype)
        mass, size = float(weights[~own].sum()), float(sizes[~own].sum())
        return torch.where(own, sizes * (mass / size if mass > 0 else 1.0), weights), state
