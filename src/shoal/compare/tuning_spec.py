"""What a tuning consists of: methods, what is tried, how often and with how many seeds, and the file that stores it."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.compare.optuna_samplers import OPTUNA_SAMPLERS
from shoal.compare.propose import count_tries
from shoal.compare.pruning import list_rungs
from shoal.compare.search_space import (
    SearchSpace,
    Settings,
    apply_settings,
    parse_search_space,
    refuse_unused_dimensions,
    select_dimensions,
)
from shoal.core.compose import Method
from shoal.core.errors import ShoalError, unknown_name_error
from shoal.plugins.load import load_method
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import TUNING_FILE, read_recipe_file
from shoal.runs.recipe_values import format_toml
from shoal.storage.files import write_bytes

SAMPLERS = ("random", "grid", *OPTUNA_SAMPLERS)
LATER_KEYS: dict[str, Any] = {"sampler": "random", "pruner": "none", "side_by_side": 4, "final_seeds": 0}
"""Keys that files of earlier tunings lack, and what those meant."""
ON_TEST_HALF: dict[str, Any] = {"validation": 0.0, "stratify_validation": False, "evaluate_test": True}
"""Recipe keys of a winner's runs, which train on all training samples."""
VALIDATION = 0.1
"""The share of the training samples that tries are judged on, where the recipe names none."""


@dataclass(frozen=True)
class TuningSpec:
    """Methods, each tried with equally many settings from the same search space; tries are judged on validation data.

    Whatever the recipe says, samples are held back from training and the test half is not looked at.
    """

    methods: tuple[str, ...]
    recipe: Recipe
    over: tuple[str, ...]
    """What is tried, such as `lr=log:0.001:1` and `fedprox.mu=0.01,0.1`."""
    tries: int = 0
    """Of each method; 0 for a whole grid, or for 8 draws where there are ranges."""
    seeds: int = 1
    sampler: str = "random"
    """Who proposes: random, grid, or one of Optuna's."""
    pruner: str = "none"
    """Who is given up early: none, median or halving."""
    side_by_side: int = 4
    """Tries that a sampler which goes by results proposes at a time."""
    final_seeds: int = 0
    """Seeds with which the winners are run on the test half in the end; none of them was used to choose."""

    def __post_init__(self):
        twice = [m for m in self.methods if self.methods.count(m) > 1]
        if not self.methods or twice:
            found = f"{twice[0]} is listed twice" if twice else "no method is listed"
            raise ShoalError("bad-value", f"Nothing can be tuned: {found}.", "Give different methods.")
        if not 1 <= self.seeds <= 1000 or not 0 <= self.tries <= 10_000:
            found = f"{self.tries} tries and {self.seeds} seeds were asked for"
            raise ShoalError("bad-value", f"{found}.", "Give up to 10,000 tries and 1 to 1000 seeds.")
        if not 0 <= self.final_seeds <= 1000 or not 1 <= self.side_by_side <= 1000:
            found = f"final_seeds is {self.final_seeds} and side_by_side is {self.side_by_side}"
            raise ShoalError("bad-value", f"{found}.", "Give 0 to 1000 final seeds, and 1 to 1000 tries side by side.")
        if self.sampler not in SAMPLERS:
            raise unknown_name_error("sampler", self.sampler, SAMPLERS)
        list_rungs(self.pruner, self.recipe.rounds)
        held_back = self.recipe.validation or VALIDATION
        own = {"keep_best": False, "patience": 0, "evaluate_test": False, "stratify_validation": True}
        recipe = replace(self.recipe, validation=held_back, method=self.methods[0], **own)
        object.__setattr__(self, "recipe", recipe)
        refuse_unused_dimensions(self.space, self.loaded_methods)
        object.__setattr__(self, "tries", count_tries(self.spaces, self.tries))

    @cached_property
    def space(self) -> SearchSpace:
        return parse_search_space(self.over)

    @cached_property
    def loaded_methods(self) -> dict[str, Method]:
        return {method: load_method(method, self.recipe.parts) for method in self.methods}

    @property
    def spaces(self) -> dict[str, SearchSpace]:
        """The search space of each method: all keys of the recipe, and the options of its own parts."""
        return {name: select_dimensions(self.space, method) for name, method in self.loaded_methods.items()}

    def make_recipes(self, method: str, number: int, settings: Settings) -> list[Recipe]:
        """The recipes of one try, one per seed."""
        recipe = apply_settings(replace(self.recipe, method=method), settings)
        load_method(recipe.method, recipe.parts)
        out = f"{self.recipe.out}/{self.methods.index(method)}-try-{number}" if self.recipe.out else ""
        seeds = range(recipe.seed, recipe.seed + self.seeds)
        return [replace(recipe, seed=s, out=f"{out}/seed-{s}" if out else "") for s in seeds]

    def make_final_recipes(self, method: str, settings: Settings) -> list[Recipe]:
        """The recipes of a winner, one per final seed, on all training samples and judged on the test half."""
        recipe = apply_settings(replace(self.recipe, method=method, **ON_TEST_HALF), settings)
        out = f"{self.recipe.out}/{self.methods.index(method)}-final" if self.recipe.out else ""
        seeds = range(recipe.seed + self.seeds, recipe.seed + self.seeds + self.final_seeds)
        return [replace(recipe, seed=s, out=f"{out}/seed-{s}" if out else "") for s in seeds]


def write_tuning_file(path: Path, spec: TuningSpec) -> None:
    """Write the file of a tuning into its folder."""
    text = f"methods = {format_toml(spec.methods)}\nover = {format_toml(spec.over)}\n"
    text += f"tries = {spec.tries}\nseeds = {spec.seeds}\n"
    text += "".join(f"{key} = {format_toml(getattr(spec, key))}\n" for key in LATER_KEYS)
    write_bytes(path / TUNING_FILE, (text + spec.recipe.to_toml()).encode())


def read_tuning_file(path: Path) -> TuningSpec:
    """Read the file of a tuning from its folder, in which its runs lie."""
    keys = read_recipe_file(path / TUNING_FILE)
    methods, over = (keys.pop(key, None) for key in ("methods", "over"))
    tries, seeds = (keys.pop(key, None) for key in ("tries", "seeds"))
    later = {key: keys.pop(key) for key in LATER_KEYS if key in keys}
    texts = [methods, over]
    if (
        any(type(value) is not type(LATER_KEYS[key]) for key, value in later.items())
        or not all(isinstance(t, list) and all(isinstance(m, str) for m in t) for t in texts)
        or not all(type(number) is int for number in (tries, seeds))
    ):
        problem = f"{path / TUNING_FILE} names no methods, values, tries and seeds."
        raise ShoalError("damaged", problem, "Restore it, or start anew in another folder.")
    assert methods is not None and over is not None and tries is not None and seeds is not None
    recipe = Recipe().with_values(**keys | {"out": str(path)})
    return TuningSpec(tuple(methods), recipe, tuple(over), tries, seeds, **later)
