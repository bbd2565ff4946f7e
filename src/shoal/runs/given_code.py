"""Methods, parts, metrics and fleets that a program gives as objects, and the names that recipes have for them.

A part is written into the recipe's method as an expression, since its fields are plain values. Its class, if it is not
shipped with shoal, is named under `parts` by its name and a fingerprint of its code; so is a metric under `metrics`.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.expression import parse_method
from shoal.core.part import Part
from shoal.fleet.user_fleet import HANDED_OVER_FLEETS, GivenFleet, build_user_fleet
from shoal.parts import PRESETS, find_shipped_parts
from shoal.plugins.load import HANDED_OVER_PARTS, collect_parts, load_packaged_parts
from shoal.plugins.metrics import FORMS, HANDED_OVER_METRICS
from shoal.runs.code_fingerprint import fingerprint_code
from shoal.runs.recipe_values import fit_value

METHOD_FORMS = "Give an expression, a part, or a list of parts, such as [FedProx(0.1), Scaffold()]."


def express_method(method: Any) -> tuple[str, tuple[str, ...]]:
    """The expression of a text, a part, a method or a list of these, and the names of the parts that the program gave.

    Their classes are registered as long as the program lives.
    """
    if isinstance(method, str):
        return method, ()
    if isinstance(method, Method):
        method = method.parts
    if isinstance(method, (Part, type)):
        method = [method]
    if isinstance(method, (list, tuple)) and method and not holds_objects(method):
        if len(method) == 1 or not all(isinstance(text, str) for text in method):
            fit_value("method", method, "fedavg")
        problem = f"method lists the texts {', '.join(map(repr, method))}, which may be one method or several."
        joined = "+".join(map(str, method))
        raise ShoalError("bad-value", problem, f'Write "{joined}" for one, or shoal.compare([...]) for several.')
    if not isinstance(method, Sequence):
        raise ShoalError("bad-value", f"A {type(method).__name__} is no method.", METHOD_FORMS)
    texts, names = [], list[str]()
    for thing in method:
        if isinstance(thing, type) and issubclass(thing, Part):
            thing = make_default_part(thing)
        if isinstance(thing, str):
            texts.append(thing)
        elif isinstance(thing, Part):
            names += [] if is_findable(type(thing)) else [hand_over_part(type(thing))]
            texts.append(express_part(thing))
        else:
            raise ShoalError("bad-value", f"The method lists a {type(thing).__name__}.", METHOD_FORMS)
    return "+".join(texts) or "fedavg", tuple(dict.fromkeys(names))


def make_default_part(cls: type[Part]) -> Part:
    try:
        return cls()
    except TypeError as error:
        problem = f"{cls.__name__} is a class, and cannot be made without values ({error})."
        raise ShoalError("bad-value", problem, f"Give an object: {cls.__name__}(...).") from None


def express_part(part: Part) -> str:
    """The expression that makes an equal part; a part with values that no expression can hold is refused."""
    known = {**find_shipped_parts(), part.name(): type(part)}
    try:
        if parse_method(str(part), known, PRESETS).parts == (part,):
            return str(part)
    except ShoalError:
        pass
    problem = f"{type(part).__name__} has a value that a recipe cannot hold: {part!r:.100}."
    raise ShoalError(
        "bad-value", problem, "Make its fields numbers, texts or booleans; the rest belongs into the class."
    )


def is_findable(cls: type[Part]) -> bool:
    """Whether every program finds a part by its name: it is shipped, or an installed package offers it."""
    if find_shipped_parts().get(cls.name()) is cls:
        return True
    try:
        return load_packaged_parts().get(cls.name()) is cls
    except ShoalError:  # another package is broken
        return False


def hand_over_part(given: Any) -> str:
    """Register the class of a part for recipes of this program; the name that stands for it."""
    cls = given if isinstance(given, type) else type(given)
    if not issubclass(cls, Part):
        raise ShoalError("bad-value", f"{cls.__name__} is no part.", "Give a class that inherits from shoal.Part.")
    collect_parts([(cls.__name__, [cls])])
    name = f"own-{fingerprint_code(cls)}:{cls.name()}"
    HANDED_OVER_PARTS[name] = cls
    return name


def hand_over_metric(given: Any, name: str = "") -> str:
    """Register a metric for recipes of this program; the name that stands for it, with the name of its column."""
    name = name or getattr(given, "__name__", "") or type(given).__name__
    if not name.isidentifier():
        problem = f"A metric is called {name!r}, which no column can be."
        raise ShoalError("bad-value", problem, 'Define it by `def`, or give its name: metrics={"f1": ...}.')
    if not callable(given) and not hasattr(given, "compute"):
        raise ShoalError("bad-value", f"A {type(given).__name__} is no metric.", FORMS)
    key = f"own-{fingerprint_code(given)}:{name}"
    HANDED_OVER_METRICS[key] = given
    return key


def hand_over_fleet(given: Any) -> str:
    """Register a fleet for recipes of this program; the name that stands for it."""
    fleet = build_user_fleet(given)
    name = f"own-{fingerprint_code(fleet.fleet if isinstance(fleet, GivenFleet) else fleet)}"
    HANDED_OVER_FLEETS[name] = fleet
    return name


def name_parts(parts: Any) -> tuple[str, ...]:
    """Files as they are, and names in place of classes and objects."""
    if not holds_objects(parts):
        return fit_value("parts", parts, ())
    listed = parts if isinstance(parts, (list, tuple)) else [parts]
    return tuple(str(p) if isinstance(p, (str, Path)) else hand_over_part(p) for p in listed)


def name_metrics(metrics: Any) -> tuple[str, ...]:
    """Words as they are, and names in place of functions and objects; a dict gives columns their names."""
    if not holds_objects(metrics):
        return fit_value("metrics", metrics, ())
    if isinstance(metrics, Mapping):
        return tuple(hand_over_metric(metric, str(name)) for name, metric in metrics.items())
    listed = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    return tuple(m if isinstance(m, str) else hand_over_metric(m) for m in listed)


def name_given_code(values: dict[str, Any]) -> dict[str, Any]:
    """The recipe values with names in place of methods, parts, metrics and fleets that are objects."""
    named = dict(values)
    method, own = express_method(named["method"]) if "method" in named else (None, ())
    if own or holds_objects(named.get("parts", ())):
        named["parts"] = tuple(dict.fromkeys((*name_parts(named.get("parts", ())), *own)))
    if method is not None:
        named["method"] = method
    if holds_objects(named.get("metrics", ())):
        named["metrics"] = name_metrics(named["metrics"])
    if not isinstance(named.get("fleet", ""), str):
        named["fleet"] = hand_over_fleet(named["fleet"])
    return named


def holds_objects(value: Any) -> bool:
    """Whether a value, or something in a list of values, is neither text nor another plain value of a recipe."""
    listed = value if isinstance(value, (list, tuple)) else [value]
    return any(not isinstance(v, (str, PathLike, int, float, type(None))) for v in listed)


CODE_KINDS: dict[str, tuple[dict[str, Any], Callable[[Any], tuple[str, ...]]]] = {
    "parts": (HANDED_OVER_PARTS, name_parts),
    "metrics": (HANDED_OVER_METRICS, name_metrics),
    "fleet": (HANDED_OVER_FLEETS, lambda fleet: (hand_over_fleet(fleet),)),
}
"""By recipe key, where code of the program is registered, and what registers it."""


def hand_over_code_again(path: Path, recorded: Mapping[str, Sequence[str]], given: Mapping[str, Any]) -> None:
    """Register parts, metrics and a fleet that are given for a run that is resumed; others than its own are refused.

    `recorded` are the names in its recipe, by key.
    """
    for key, objects in given.items():
        is_named = isinstance(objects, str) if key == "fleet" else not holds_objects(objects)
        if is_named or objects is None:
            continue
        known = [name for name in recorded[key] if name.startswith("own-")]
        for name in CODE_KINDS[key][1](objects):
            if not name.startswith("own-") or name in known:
                continue
            label, labels = name.partition(":")[2], [other.partition(":")[2] for other in known]
            what = f"{key.removesuffix('s')} {label}".strip()
            if label in labels:
                problem = f"The {what} is not the one that {path} was begun with: its code or its settings differ."
                advice = f"Give the same {what} as then, or start anew with another `out`."
                raise ShoalError("other-recipe", problem, advice)
            raise ShoalError("other-recipe", f"{path} was begun without a {what} of a program.", "Leave it out.")
