"""Which runs train in the same calls, and how they are divided among processes."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import ceil

from shoal.plugins.load import load_method
from shoal.runs.recipe import Recipe

SAME_CALLS = {"method", "seed", "out", "split", "target", "lr", "lr_decay", "lr_schedule", "lr_warmup"}
SAME_CALLS |= {"momentum", "beta1", "beta2", "eps", "weight_decay", "clip"}
"""Recipe keys in which runs may differ and still train in the same calls, their methods only in values of parts."""
MAX_OPEN_RUNS = 32
"""Runs that are open at the same time."""


def group_similar_recipes(recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
    """Groups of recipes that differ only in SAME_CALLS, so that one engine can train their devices together."""
    keys = [f.name for f in fields(Recipe) if f.name not in SAME_CALLS]
    groups: dict[tuple, list[Recipe]] = {}
    for recipe in recipes:
        parts = tuple(type(p) for p in load_method(recipe.method, recipe.parts).parts)
        groups.setdefault((parts, *(getattr(recipe, key) for key in keys)), []).append(recipe)
    for group in groups.values():
        for first in range(0, len(group), MAX_OPEN_RUNS):
            yield group[first : first + MAX_OPEN_RUNS]


def divide_among_processes(recipes: Sequence[Recipe], workers: int) -> list[list[Recipe]]:
    """Shares that processes take one after the other, in the order of the recipes.

    Similar runs stay together, as they train in the same calls, but for the last ones, which are divided so that no
    process is left without work while others have several runs.
    """
    groups = list(group_similar_recipes(recipes))
    last = len(groups) % workers
    whole, divided = groups[: len(groups) - last], groups[len(groups) - last :]
    pieces = ceil(workers / last) if last else 1
    return whole + [group[first::pieces] for group in divided for first in range(min(pieces, len(group)))]
