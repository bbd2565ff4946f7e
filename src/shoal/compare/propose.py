"""Proposals of a tuning: which settings are tried next, given what has been judged so far.

A proposer sees the search space of one method and the tries that have been judged, and names those to run next, side
by side; with an empty list it is done. The plain one proposes everything at once: the whole grid, or random draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from shoal.compare.search_space import SearchSpace, Settings, ValueList
from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams

DRAWS = 8
"""Tries of each method where ranges are given and no number is."""


@dataclass(frozen=True)
class JudgedTry:
    """The settings of a try and what came of it: the mean over seeds, None where a run diverged."""

    settings: Settings
    score: float | None
    rounds: int = 0
    """How many rounds its runs were played; 0: as many as the recipe says."""
    is_stopped: bool = False
    """Whether it was given up before its last round."""


Proposer = Callable[[SearchSpace, int, int, Sequence[JudgedTry]], list[Settings]]
"""Called with a method's space, its number of tries, a seed and the judged tries; gives the settings to try next."""


def propose_grid_or_draws(
    space: SearchSpace, tries: int, seed: int, judged: Sequence[JudgedTry] = ()
) -> list[Settings]:
    """All tries at once: the grid where it has so many cells, else draws, from a grid without repetition.

    From ranges a Latin hypercube is drawn: each of as many equal parts of a range as there are tries is met once. Every
    key has a random stream of its own, so that methods are tried with the same values of what they share.
    """
    if judged:
        return []
    streams = RandomStreams(seed)
    grid = list_grid(space)
    if grid is not None:
        if tries == len(grid):
            return grid
        order = streams.make_numpy_generator("tune grid").permutation(len(grid))
        return [grid[at] for at in sorted(order[:tries])]
    shares = {key: draw_latin_shares(streams.make_numpy_generator(f"tune {key}"), tries) for key in space}
    return [{key: dimension.pick(shares[key][n]) for key, dimension in space.items()} for n in range(tries)]


def propose_grid(space: SearchSpace, tries: int, seed: int, judged: Sequence[JudgedTry] = ()) -> list[Settings]:
    """Cells of the grid; refused where a key has a range."""
    if list_grid(space) is None:
        problem = "The sampler grid tries lists of values, and a range is given."
        raise ShoalError("bad-value", problem, "Give lists such as lr=0.01,0.1, or another --sampler.")
    return propose_grid_or_draws(space, tries, seed, judged)


def draw_latin_shares(generator: np.random.Generator, tries: int) -> list[float]:
    """Numbers from 0 to 1 in random order, one from each of `tries` equal parts."""
    return ((generator.permutation(tries) + generator.random(tries)) / tries).tolist()


def list_grid(space: SearchSpace) -> list[Settings] | None:
    """Every combination of the values; None where one of the keys has a range."""
    if not all(isinstance(dimension, ValueList) for dimension in space.values()):
        return None
    lists = [dimension.values for dimension in space.values() if isinstance(dimension, ValueList)]
    return [dict(zip(space, values)) for values in product(*lists)]


def count_tries(spaces: dict[str, SearchSpace], tries: int) -> int:
    """How many tries every method gets: as many as asked for, or all of a grid; it must be the same for all.

    Who is tried more often has the better chance of a lucky draw, so unequal grids are refused.
    """
    sizes = {method: None if (grid := list_grid(space)) is None else len(grid) for method, space in spaces.items()}
    whole = [size for size in sizes.values() if size is not None]
    if not tries and len(whole) < len(sizes):
        tries = DRAWS
    if not tries and len(set(whole)) == 1:
        return whole[0]
    if not tries:
        text = ", ".join(f"{method} {size}" for method, size in sizes.items())
        raise ShoalError(
            "bad-value",
            f"The methods have grids of unequal size ({text}), and would not be tuned with equal effort.",
            f"Give --tries {min(whole)}: so many cells of each grid are drawn.",
        )
    for method, size in sizes.items():
        if size is not None and size < tries:
            raise ShoalError(
                "bad-value",
                f"{tries} tries were asked for, and {method} has only {size} combinations of values.",
                f"Give --tries {min(whole)}, more values, or a range such as lr=log:0.001:1.",
            )
    return tries
