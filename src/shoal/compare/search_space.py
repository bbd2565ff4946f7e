"""The search space of a tuning: which values of the recipe and of parts are tried, as texts such as lr=log:0.001:1."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import exp, isfinite, log
from typing import Any

from shoal.core.compose import Method
from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.expression import make_part
from shoal.core.part import Part
from shoal.plugins.load import load_method
from shoal.runs.recipe import DEFAULTS, Recipe
from shoal.runs.recipe_files import split_pairs
from shoal.runs.recipe_values import parse_value

TUNED_KEYS = (
    "epochs steps batch normalise augment optimiser lr lr_decay lr_schedule lr_warmup local_lr_schedule "
    "local_lr_warmup momentum nesterov beta1 beta2 eps weight_decay clip"
).split()
"""Recipe keys that can be tuned: those of local training. The others say what the task is, or how it is computed."""
RANGES = ("log", "uniform")
DIGITS = 4
"""Significant digits of drawn values, so that a printed command gives the very value that was tried."""

Settings = dict[str, Any]
"""The values of one try, by recipe key or by part.option."""


@dataclass(frozen=True)
class ValueList:
    """Values that are tried as they are."""

    values: tuple[Any, ...]

    def pick(self, share: float) -> Any:
        """The value so far along the list, from 0 to 1."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]


@dataclass(frozen=True)
class ValueRange:
    """Numbers between two ends, spread evenly, or with `log` evenly by their logarithm."""

    low: float
    high: float
    log: bool

    def pick(self, share: float) -> float:
        """The number so far along the range, from 0 to 1, with few digits."""
        if self.log:
            value = exp(log(self.low) + share * (log(self.high) - log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return self.fit(value)

    def fit(self, value: float) -> float:
        """The value with few digits, and inside the range."""
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


SearchSpace = Mapping[str, ValueList | ValueRange]


def parse_search_space(over: Sequence[str]) -> SearchSpace:
    """What `lr=log:0.001:1`, `momentum=uniform:0:0.9` and `fedprox.mu=0.01,0.1` say, by key."""
    space: dict[str, ValueList | ValueRange] = {}
    for text in over:
        for key, values in split_pairs([text], "--over lr=0.01,0.1").items():
            if key in space:
                raise search_error(f"{key} is given twice.", "Give all its values in one --over.")
            if "." not in key and key not in TUNED_KEYS:
                if key in DEFAULTS:
                    raise search_error(f"{key} cannot be tuned.", f"These can: {', '.join(TUNED_KEYS)}, part.option.")
                raise unknown_name_error("key to tune", key, TUNED_KEYS)
            space[key] = parse_dimension(key, values)
    if not space:
        raise search_error("There is nothing to tune.", "Say what is tried, such as --over lr=0.01,0.03,0.1.")
    return space


def parse_dimension(key: str, text: str) -> ValueList | ValueRange:
    """The values of one key: a range `log:LOW:HIGH` or `uniform:LOW:HIGH`, or a list."""
    kind, *ends = text.split(":")
    if kind in RANGES:
        if "." not in key and not is_number_key(key):
            raise search_error(f"{key} is no number, and {text!r} is a range.", "Give a list of values.")
        try:
            low, high = map(float, ends)
        except ValueError:
            raise search_error(f"{key}={text} is no range.", f"Write {key}={kind}:LOW:HIGH.") from None
        if not (isfinite(low) and isfinite(high) and low < high and (kind == "uniform" or low > 0)):
            wanted = "0 < LOW < HIGH" if kind == "log" else "LOW < HIGH"
            raise search_error(f"The range {key}={text} is empty.", f"Write {key}={kind}:LOW:HIGH with {wanted}.")
        return ValueRange(low, high, kind == "log")
    values = tuple(parse_list_value(key, value.strip()) for value in text.split(","))
    if len(set(values)) < len(values):
        raise search_error(f"{key} has a value twice: {text}.", "Give different values.")
    return ValueList(values)


def is_number_key(key: str) -> bool:
    return key == "epochs" or (type(DEFAULTS[key]) in (int, float))


def parse_list_value(key: str, text: str) -> Any:
    """A value of a list: by the type of its recipe key, or for a part's option a number, True, False or a text."""
    if "." not in key:
        return parse_value(key, text, DEFAULTS[key])
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, (bool, int, float, str)) else text


def select_dimensions(space: SearchSpace, method: Method) -> SearchSpace:
    """What of a search space concerns a method: all keys of the recipe, and the options of its parts."""
    return {key: d for key, d in space.items() if "." not in key or find_part(method, key) is not None}


def refuse_unused_dimensions(space: SearchSpace, methods: Mapping[str, Method]) -> None:
    """A part's option that no method has would be tuned for nobody."""
    for key in space:
        if "." in key and not any(find_part(method, key) for method in methods.values()):
            part = key.partition(".")[0]
            known = sorted({p.name() for method in methods.values() for p in method.parts})
            advice = f"Their parts are: {', '.join(known)}." if known else "They have no parts."
            raise ShoalError("unknown-name", f"None of the methods has a part called {part!r}, to tune {key}.", advice)


def find_part(method: Method, key: str) -> Part | None:
    """The part of a method that `part.option` names."""
    return next((part for part in method.parts if part.name() == key.partition(".")[0]), None)


def apply_settings(recipe: Recipe, settings: Settings) -> Recipe:
    """The recipe with the values of a try: in its keys, and in the expression of its method."""
    keys = {key: fit_number(value, DEFAULTS[key]) for key, value in settings.items() if "." not in key}
    options = {key: value for key, value in settings.items() if "." in key}
    if not options:
        return recipe.with_values(**keys)
    parts = []
    for part in load_method(recipe.method, recipe.parts).parts:
        own = {key.partition(".")[2]: value for key, value in options.items() if key.partition(".")[0] == part.name()}
        parts.append(str(change_options(part, own) if own else part))
    return recipe.with_values(**keys, method="+".join(parts))


def read_settings(recipe: Recipe, settings: Settings) -> Settings:
    """The values of a try as its recipe has them: drawn ones may have been rounded to whole numbers."""
    parts, found = load_method(recipe.method, recipe.parts).parts, dict[str, Any]()
    for key, value in settings.items():
        name, _, option = key.rpartition(".")
        part = next((part for part in parts if part.name() == name), None)
        tried = getattr(part, part.renamed_options.get(option, option), value) if part else DEFAULTS.get(key)
        found[key] = fit_number(value, tried)
    return found


def change_options(part: Part, options: Mapping[str, Any]) -> Part:
    """The part with other values, checked as those of an expression are."""
    present = {f.name: getattr(part, f.name) for f in fields(part)}
    options = {part.renamed_options.get(key, key): value for key, value in options.items()}
    fitted = {key: fit_number(value, present.get(key)) for key, value in options.items()}
    return make_part(part.name(), present | fitted, {part.name(): type(part)})


def fit_number(value: Any, default: Any) -> Any:
    """A drawn number as a whole one where the default is whole."""
    return round(value) if type(default) is int and type(value) is float else value


def search_error(problem: str, advice: str) -> ShoalError:
    return ShoalError("bad-value", problem, advice)
