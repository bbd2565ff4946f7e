"""Power-of-Choice: of some candidates those with the highest loss take part (Cho et al. 2022, arXiv:2010.01243)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shoal.core.metric import Metric
from shoal.core.model.tree import Params, Tree
from shoal.core.types import SERVER, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.mean_loss import ReportsMeanLoss
from shoal.parts.lib.population_values import put_at_devices
from shoal.parts.selection import draw_cohort

CHANCES = ("size", "equal")


@dataclass(frozen=True)
class PoC(ReportsMeanLoss):
    """Draws d candidates; those of them take part whose loss was the highest when they last trained (rpow-d).

    `d` is the number of candidates, at least as many as take part. `chances` is how they are drawn: by `size`, in
    proportion to their samples, or with `equal` chances. A device that never reported counts as one of infinite loss;
    of equal ones the lowest number goes first. The loss is the mean over the batches of the device's last round: the
    server cannot ask candidates for that of the current model before it has selected them (pow-d).
    """

    cite: ClassVar = ("cho2022poc",)
    reads: ClassVar = frozenset({"extras", "sizes"})
    sets: ClassVar = frozenset({"select"})
    metrics: ClassVar = (
        Metric("loss", "mean loss that devices reported", better="down", drawn=True),
        Metric("known", "share of devices whose loss is known", "share"),
    )

    d: int = 20
    chances: str = "size"

    def __post_init__(self):
        require(self, "d >= 1", self.d >= 1)
        require(self, f"chances in {CHANCES}", self.chances in CHANCES)

    def init_server(self, round: Round) -> Tree:
        if self.chances == "size" and not round.own_weights:
            round.log("size counts twice, in the draw and in the weights of replies; chances='equal' draws without it")
        losses = torch.zeros(round.population, dtype=torch.float64)
        return {"loss": losses, "seen": torch.zeros_like(losses, dtype=torch.bool)}

    def select(self, devices: Sequence[int], state: Tree, round: Round) -> tuple[Sequence[int], Tree]:
        eligible, seen = round.eligible, state["seen"].cpu().numpy()
        round.tell("known", float(seen.mean()))
        if not len(eligible):
            return [], state
        sizes = round.sizes[eligible].astype(np.float64)
        chances = sizes / sizes.sum() if self.chances == "size" else None
        candidates = draw_cohort(eligible, max(self.d, round.sample), chances, round)
        losses = np.where(seen, state["loss"].cpu().numpy(), np.inf)
        # sorted is stable and candidates are in rising order
        return sorted(sorted(candidates, key=lambda device: -losses[device])[: round.sample]), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        replies = [r for r in round.replies if r.device != SERVER]
        losses = [float(r.report[self.name()]["loss"]) for r in replies]
        return params, {
            "loss": put_at_devices(state["loss"], [r.device for r in replies], losses),
            "seen": put_at_devices(state["seen"], [r.device for r in replies], [True] * len(replies)),
        }
