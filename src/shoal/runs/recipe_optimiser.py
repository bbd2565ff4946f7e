"""The optimiser of a recipe, and its learning rates over rounds."""

from collections.abc import Callable
from math import ceil, inf
from typing import TYPE_CHECKING

import torch

from shoal.core.lr_schedule import SCHEDULE_KINDS, LrSchedule
from shoal.core.optimiser import Optimiser
from shoal.runs.recipe_values import bad_value_error

if TYPE_CHECKING:
    from shoal.runs.recipe import Recipe

OPTIMISER_KEYS = (
    "optimiser",
    "momentum",
    "nesterov",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "clip",
    "local_lr_schedule",
    "local_lr_warmup",
    "batch",
    "accumulate",
    "lr_groups",
)
"""The keys of a recipe that make its optimiser."""
SCHEDULE_FORMS = {
    "lr_schedule": "linear:ROUNDS, cosine:ROUNDS, either with :END behind it, or step:ROUNDS:FACTOR",
    "local_lr_schedule": "linear or cosine, either with :STEPS or :STEPS:END behind it, or step:STEPS:FACTOR",
}
"""What the keys of schedules take."""


def make_optimiser(recipe: "Recipe") -> Optimiser:
    """The optimiser of local training."""
    return Optimiser(
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
        kind=recipe.optimiser,
        nesterov=recipe.nesterov,
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        eps=recipe.eps,
        schedule=parse_lr_schedule("local_lr_schedule", recipe.local_lr_schedule, recipe.local_lr_warmup),
        micro_batch=ceil(recipe.batch / recipe.accumulate) if recipe.accumulate > 1 else 0,
        lr_groups=parse_lr_groups(recipe.lr_groups),
    )


def make_round_lr(recipe: "Recipe") -> Callable[[int], float]:
    """Round -> the learning rate of its first local step: `lr` times its decay and its schedule over rounds."""
    schedule = parse_lr_schedule("lr_schedule", recipe.lr_schedule, recipe.lr_warmup)

    def compute_round_lr(round: int) -> float:
        try:
            lr = recipe.lr * recipe.lr_decay**round
        except OverflowError:
            lr = inf
        if not schedule:
            return lr
        return lr * float(schedule.compute_factor(torch.tensor(float(round), dtype=torch.float64), inf))

    return compute_round_lr


def parse_lr_schedule(key: str, text: str, warmup: int = 0) -> LrSchedule:
    """`cosine:100:0.1` as a schedule; over rounds, of which there may be more later, it must say how many it takes."""
    kind, *numbers = text.replace(" ", "").split(":")
    try:
        length = int(numbers[0]) if numbers else 0
        end = float(numbers[1]) if len(numbers) > 1 else 0.0
    except ValueError:
        length, end = -1, 0.0
    needed = 2 if kind == "step" else 1 if kind and key == "lr_schedule" else 0
    known = kind in SCHEDULE_KINDS and needed <= len(numbers) <= (2 if kind else 0)
    if not known or not (0 < length < 10**9 or not numbers) or not 0 <= end <= 1:
        raise bad_value_error(key, text, SCHEDULE_FORMS[key])
    return LrSchedule(kind, length, end, warmup)


def parse_lr_groups(text: str) -> tuple[tuple[str, float], ...]:
    """`head.*=10,conv*=0.1` as patterns of names with the factors on their learning rates."""
    groups = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        pattern, _, given = word.rpartition("=")
        try:
            factor = float(given)
        except ValueError:
            factor = -1.0
        if not pattern.strip() or not 0 <= factor <= 1e6:
            raise bad_value_error("lr_groups", text, "NAME=FACTOR, several with commas between, like head.*=10")
        groups.append((pattern.strip(), factor))
    return tuple(groups)
