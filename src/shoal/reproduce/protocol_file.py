"""Protocols in files: the sections [fair] and [authors] of a table, and what authors share over their tables."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.reproduce.protocol import AUTHORS, LAST_EVALUATIONS, LEAST_SEEDS, ClockData, Expressions, Protocol
from shoal.reproduce.reading import Reading
from shoal.reproduce.table_checks import (
    KEYS,
    TEXTS,
    Check,
    are_expressions,
    bad_table_error,
    check_keys,
    is_count,
    is_number,
    is_number_mapping,
    is_text,
)

SHARED = Path(__file__).with_name("protocols")
"""Protocols that several tables of one paper have in common; a table names its own as `authors = "NAME"`."""


def is_smoothing(value: Any) -> bool:
    fits = isinstance(value, list) and len(value) == 2 and all(map(is_count, value))
    return fits and value[0] % 2 == 1 and value[1] < value[0]


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def are_clock_models(value: Any) -> bool:
    wanted = {"training", "params", "macs"}
    return isinstance(value, dict) and all(
        is_number_mapping(own) and set(own) == wanted and min(own.values()) > 0 for own in value.values()
    )


def are_runs(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value)) and all(map(are_expressions, value.values()))


def are_variants(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(own, list) and all(map(is_text, own)) for own in value.values())


RUNS: Check = (are_runs, "method expressions by the names of rows", {})
FAIR_KEYS: dict[str, Check] = {
    "set": KEYS,
    "seeds": (is_count, "a number from 1 to 1000", LEAST_SEEDS),
    "last": (is_count, "a number of evaluations from 1 to 1000", LAST_EVALUATIONS),
    "run": RUNS,
    "tuned": RUNS,
    "notes": TEXTS,
}
"""Keys of [fair]. Neither a maximum nor a list to choose from: nothing is picked by test data."""
AUTHORS_KEYS: dict[str, Check] = {
    "set": KEYS,
    "seeds": (is_count, "a number from 1 to 1000", 1),
    "last": (is_count, "a number of evaluations from 1 to 1000", 1),
    "maximum": (lambda v: isinstance(v, bool), "true or false", False),
    "best_round": (lambda v: isinstance(v, bool), "true or false", False),
    "smooth": (is_smoothing, "an odd window and a degree below it, such as [39, 3]", []),
    "run": RUNS,
    "variants": (are_variants, "lists of models by the model that they stand beside", {}),
    "clock": (lambda v: isinstance(v, dict), "a table of constants", {}),
    "notes": TEXTS,
}
CLOCK_KEYS: dict[str, Check] = {
    "up": (is_positive, "MiB a second above 0", None),
    "down": (is_positive, "MiB a second above 0", None),
    "devices": (is_count, "a number from 1 to 1000", None),
    "models": (are_clock_models, "training, params and macs, above 0, by model and data", None),
    "training_factors": (is_number_mapping, "numbers by method", {}),
    "transfer_factors": (is_number_mapping, "numbers by method", {}),
    "varying": TEXTS,
}
FAIR_SECTION: Check = (lambda v: isinstance(v, dict), "a table [fair]", {})
AUTHORS_SECTION: Check = (
    lambda v: isinstance(v, dict) or is_text(v),
    "a table [authors], or the name of a shared protocol",
    "",
)


def build_fair_protocol(keys: Mapping[str, Any]) -> tuple[Protocol, dict[str, Expressions]]:
    """The protocol `fair`, and the expressions that tuning found, by method."""
    own = check_keys(keys, FAIR_KEYS, "[fair]")
    for method, expressions in (own["run"] | own["tuned"]).items():
        refuse_lists(method, expressions)
    reading = Reading(last=own["last"])
    protocol = Protocol(set=own["set"], seeds=own["seeds"], reading=reading, run=own["run"], notes=tuple(own["notes"]))
    return protocol, own["tuned"]


def refuse_lists(method: str, expressions: Expressions) -> None:
    """Outside of [authors] nobody chooses from a list."""
    texts = [expressions] if isinstance(expressions, str) else expressions.values()
    if any("{" in text for text in texts):
        found = f"{method} has a list in braces, of which the best would be picked by test data"
        raise bad_table_error(found, "Give one expression, or move the list to [authors]")


def build_authors_protocol(keys: Mapping[str, Any] | str) -> Protocol | None:
    """The protocol `authors`, from a section or by the name of a shared one; None where there is neither."""
    if not keys:
        return None
    own = check_keys(read_shared_protocol(keys) if isinstance(keys, str) else keys, AUTHORS_KEYS, "[authors]")
    reading = Reading(own["last"], own["maximum"], tuple(own["smooth"]) or None, best_round=own["best_round"])
    clock = None
    if own["clock"]:
        constants = check_keys(own["clock"], CLOCK_KEYS, "[authors.clock]")
        constants["varying"] = tuple(constants["varying"])
        clock = ClockData(**constants)
    variants = {model: tuple(others) for model, others in own["variants"].items()}
    return Protocol(AUTHORS, own["set"], own["seeds"], reading, own["run"], variants, clock, tuple(own["notes"]))


def read_shared_protocol(name: str) -> dict[str, Any]:
    """The keys of a protocol that comes with the package."""
    known = {file.stem: file for file in SHARED.glob("*.toml")}
    if name not in known:
        found = f"There is no shared protocol called {name[:80]!r}"
        raise bad_table_error(found, f"Those that come with the package are: {', '.join(sorted(known))}")
    return tomllib.loads(known[name].read_text(encoding="utf-8"))
