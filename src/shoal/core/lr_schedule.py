"""Schedules of the learning rate: a factor on it that depends on the number of the local step, or of the round."""

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from shoal.core.errors import ShoalError

SCHEDULE_KINDS = ("", "linear", "cosine", "step")


@dataclass(frozen=True)
class LrSchedule:
    """The factor on the learning rate at step t of T, from 0; T is `length`, or where that is 0 all steps there are.

    warm-up   (t + 1) / warmup at the first `warmup` steps; the schedule itself begins after them, at s = t - warmup
    linear    from 1 to `end` in a straight line, over S = T - warmup steps: 1 + (end - 1) s / S
    cosine    from 1 to `end` along half a cosine: end + (1 - end) (1 + cos(pi s / S)) / 2
    step      times `end` after every `length` steps: end ** floor(s / length)

    These are LinearLR, CosineAnnealingLR and StepLR of torch behind a warm-up by LinearLR. Beyond T it is `end`.
    """

    kind: str = ""
    length: int = 0
    end: float = 0.0
    warmup: int = 0

    def __post_init__(self):
        if self.kind not in SCHEDULE_KINDS or (self.kind == "step" and not self.length):
            problem = f"{self.kind!r} of length {self.length} is no schedule of a learning rate."
            raise ShoalError("bad-value", problem, "Use linear, cosine, or step with a length.")

    def __bool__(self) -> bool:
        """Whether the learning rate changes at all."""
        return bool(self.kind or self.warmup)

    def compute_factor(self, step: Tensor, steps: Tensor | float) -> Tensor:
        """The factor at a step out of so many, or those at several steps."""
        past = (step - self.warmup).clamp(min=0)
        if self.kind == "step":
            factor = torch.pow(self.end, (past / self.length).floor())
        elif self.kind:
            rest = (self.length or steps) - self.warmup
            share = (past / (rest.clamp(min=1) if isinstance(rest, Tensor) else max(rest, 1))).clamp(max=1)
            shape = (1 - share) if self.kind == "linear" else (1 + (pi * share).cos()) / 2
            factor = self.end + (1 - self.end) * shape
        else:
            factor = torch.ones_like(past)
        return factor * ((step + 1) / self.warmup).clamp(max=1) if self.warmup else factor

    def list_factors(self, steps: int) -> list[float]:
        """The factors at each of so many steps."""
        if not self:
            return [1.0] * steps
        return self.compute_factor(torch.arange(steps, dtype=torch.float64), float(steps)).tolist()

    def sum_factors(self, steps: int) -> float:
        """The sum of the factors over so many steps; without a schedule, their number."""
        return sum(self.list_factors(steps)) if self else steps

    def scale_lr(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The numbers of a local step with the learning rate of this step."""
        # one dimension: vmap turns numbers that meet tensors without any into tensors, which TorchScript does not take
        step, steps = numbers["step"].reshape(1), numbers["steps"].reshape(1)
        return numbers | {"lr": numbers["lr"] * self.compute_factor(step, steps).reshape(())}


CONSTANT_LR = LrSchedule()
