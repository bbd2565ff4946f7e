"""What a comparison consists of: methods, varied values, seeds and budgets, and the file that stores them."""

import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from shoal.compare.budgets import CHEAPEST, COST_COLUMNS, Budgets
from shoal.core.errors import ShoalError
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import COMPARISON_FILE, parse_recipe_pairs, read_recipe_file, split_pairs
from shoal.runs.recipe_values import format_toml
from shoal.storage.files import write_bytes

BUDGET_FILE_KEYS = {kind: f"budget_{kind}" for kind in COST_COLUMNS}
"""The keys of budgets in the file of a comparison."""


@dataclass(frozen=True)
class ComparisonSpec:
    """What a comparison consists of: every method, with every value that is varied, with every seed."""

    methods: tuple[str, ...]
    recipe: Recipe
    seeds: int = 1
    vary: tuple[str, ...] = ()
    """`key=value,value,...` for keys of the recipe."""
    budgets: Budgets = CHEAPEST

    def __post_init__(self):
        twice = [m for m in self.methods if self.methods.count(m) > 1]
        if not self.methods or twice or not 1 <= self.seeds <= 1000:
            found = f"{twice[0]} is listed twice" if twice else f"{len(self.methods)} methods and {self.seeds} seeds"
            raise ShoalError(
                "bad-value", f"A comparison cannot be made: {found}.", "Give different methods and 1 to 1000 seeds."
            )
        for key in self.varied_values:
            if key in ("method", "seed", "out", "rounds", "headline", "target") or len(
                set(self.varied_values[key])
            ) < len(self.varied_values[key]):
                raise ShoalError(
                    "bad-value", f"{key} cannot be varied like this.", "Give different values of another recipe key."
                )

    @property
    def varied_values(self) -> dict[str, list[str]]:
        """The values of each key that is varied."""
        pairs = split_pairs(list(self.vary), "--vary lr=0.05,0.1")
        return {key: [v.strip() for v in values.split(",")] for key, values in pairs.items()}

    def make_recipes(self) -> dict[str, list[Recipe]]:
        """The recipes by label, which is the method with its varied values; one recipe per seed."""
        variants = [dict(zip(self.varied_values, values)) for values in product(*self.varied_values.values())]
        recipes: dict[str, list[Recipe]] = {}
        for number, (method, other) in enumerate(product(self.methods, variants)):
            label = ", ".join([method, *(f"{key}={value}" for key, value in other.items())])
            folder = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:60]
            out = str(Path(self.recipe.out) / f"{number}-{folder}") if self.recipe.out else ""
            recipe = self.recipe.with_values(
                method=method, **parse_recipe_pairs([f"{key}={value}" for key, value in other.items()])
            )
            seeds = range(recipe.seed, recipe.seed + self.seeds)
            recipes[label] = [replace(recipe, seed=s, out=f"{out}/seed-{s}" if out else "") for s in seeds]
        return recipes


def write_comparison_file(path: Path, spec: ComparisonSpec) -> None:
    """Write the file of a comparison into its folder."""
    recipe = replace(spec.recipe, method=spec.methods[0])
    text = f"methods = {format_toml(spec.methods)}\nseeds = {spec.seeds}\nvary = {format_toml(spec.vary)}\n"
    budgets_by_key = {key: getattr(spec.budgets, kind) for kind, key in BUDGET_FILE_KEYS.items()}
    text += "".join(f"{key} = {format_toml(budgets)}\n" for key, budgets in budgets_by_key.items() if budgets)
    write_bytes(path / COMPARISON_FILE, (text + recipe.to_toml()).encode())


def read_comparison_file(path: Path) -> ComparisonSpec:
    """Read the file of a comparison from its folder, in which its runs lie."""
    keys = read_recipe_file(path / COMPARISON_FILE)
    methods, seeds, vary = keys.pop("methods", None), keys.pop("seeds", None), keys.pop("vary", [])
    budgets = {kind: keys.pop(key, []) for kind, key in BUDGET_FILE_KEYS.items()}
    texts = [methods, vary]
    if not all(isinstance(t, list) and all(isinstance(m, str) for m in t) for t in texts) or type(seeds) is not int:
        raise ShoalError(
            "damaged",
            f"{path / COMPARISON_FILE} names no methods and seeds.",
            "Restore it, or start anew in another folder.",
        )
    if not all(isinstance(given, list) for given in budgets.values()):
        raise ShoalError(
            "damaged",
            f"A budget in {path / COMPARISON_FILE} is no list of costs.",
            "Restore it, or take that line out.",
        )
    parsed = Budgets(**{kind: tuple(given) for kind, given in budgets.items()})
    return ComparisonSpec(tuple(methods), Recipe().with_values(**keys | {"out": str(path)}), seeds, tuple(vary), parsed)
