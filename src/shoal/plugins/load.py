"""Parts from outside the package: a user's own file, or an installed package that offers them."""

import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import extract_tb
from typing import Any

from shoal.core.compose import Method
from shoal.core.errors import ShoalError, told
from shoal.core.expression import parse
from shoal.core.part import Part
from shoal.engines.deterministic import deterministic_fault
from shoal.parts import PRESETS, parts_in, shipped
from shoal.plugins.smoke_run import Setting, probe
from shoal.runs.recipe import Recipe
from shoal.storage.python_file import module_of


def method_of(recipe: Recipe) -> Method:
    """The recipe's method.

    Installed packages are asked only for names that nobody else knows, so a broken one harms nobody else.
    """
    known = shipped() | in_files(recipe.parts)
    try:
        method = parse(recipe.method, known, PRESETS)
    except ShoalError as error:
        installed = in_packages() if error.kind.name == "unknown-name" else {}
        if not installed:
            raise
        method = parse(recipe.method, installed | known, PRESETS)
    return method


def strangers_in(method: Method) -> list[Part]:
    """The parts of a method that are not of this package."""
    return [part for part in method.parts if shipped().get(part.name()) is not type(part)]


def probe_strangers(method: Method, kind: str, setting: Callable[[], Setting]) -> None:
    """Look at parts that are not of this package before they are used; once for each `kind` of run."""
    for part in strangers_in(method):
        key = (type(part), str(part), kind)
        if key not in PROBED:
            probe(part, setting())
            PROBED.add(key)


PROBED: set[tuple[type[Part], str, str]] = set()
"""What was found in order in this process."""


def in_packages() -> dict[str, type[Part]]:
    """Parts of installed packages: entry points of the group `shoal.parts`."""
    return joined((point.name, [loaded(point)]) for point in entry_points(group="shoal.parts"))


def in_files(files: Iterable[str]) -> dict[str, type[Part]]:
    """Parts of the user's own files."""
    return joined((file, parts_of(Path(file))) for file in files)


def joined(sources: Iterable[tuple[str, Iterable[Any]]]) -> dict[str, type[Part]]:
    """Parts by name; a name that is taken and a thing that is no part are refused."""
    found: dict[str, type[Part]] = {}
    for source, things in sources:
        for thing in things:
            if not (isinstance(thing, type) and issubclass(thing, Part)):
                raise broken(source, "what it offers is no part", "Offer a class that inherits from shoal.Part.")
            frozen = vars(thing).get("__dataclass_params__")
            if frozen is None or not frozen.frozen:
                why = f"{thing.__name__} is not a frozen dataclass"
                raise broken(source, why, "Put @dataclass(frozen=True) above it.")
            name = thing.name()
            if name in found or name in shipped() or name in PRESETS:
                raise ShoalError("clash", f"{name} of {source} is already the name of a part.", "Give it another name.")
            found[name] = thing
    return found


def loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise broken(point.name, f"it cannot be loaded ({told(error)})", "Repair or remove the package.") from error


def parts_of(path: Path) -> list[type[Part]]:
    """The parts that a Python file defines."""
    found = parts_in(module_of(path))
    if not found:
        raise broken(path, "it defines no part", "Define a frozen dataclass that inherits from shoal.Part.")
    return list(found.values())


def blamed(error: Exception, method: Method) -> ShoalError | None:
    """The part of a stranger that an exception came through, if any: it is no bug of ours.

    Nor is an operation that torch refuses because the recipe is `deterministic`, whoever asked for it.
    """
    if fault := deterministic_fault(error):
        return fault
    files = {inspect.getfile(type(p)): p for p in strangers_in(method)}
    for frame in reversed(extract_tb(error.__traceback__)):
        if frame.filename in files:
            why = f"raises {told(error)} in `{frame.name}`, line {frame.lineno}"
            return broken(
                files[frame.filename].name(), f"it {why}", "Correct it there; a run with --out can be resumed."
            )
    return None


def broken(source: object, why: str, advice: str) -> ShoalError:
    return ShoalError("bad-part", f"{source} cannot be used: {why}.", advice)
