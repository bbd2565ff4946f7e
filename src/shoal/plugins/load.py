"""Parts from outside the package: a user's file or program, or an installed package that offers them."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from shoal.core.compose import Method
from shoal.core.errors import ShoalError, describe_error
from shoal.core.expression import parse_method
from shoal.core.part import POINTS, Part
from shoal.engines.part_faults import list_foreign_parts, make_part_error
from shoal.parts import PRESETS, find_parts_in, find_shipped_parts
from shoal.plugins.smoke_run import SmokeSetup, smoke_test_part
from shoal.storage.python_file import load_python_file

log = logging.getLogger("shoal")

GIVEN_NAME = r"own-[0-9a-f]{16}:\w+"
"""What recipes call a part or a metric of a program: a fingerprint of its code, and its name."""
HANDED_OVER_PARTS: dict[str, type[Part]] = {}
"""Parts that a program gave as classes or objects, by `own-...:NAME`; they live as long as it does."""


def load_method(expression: str, files: Sequence[str] = ()) -> Method:
    """The method of an expression, with the parts of these files, or of the program under these names.

    Installed packages are asked only for names that nobody else knows, so a broken one harms nobody else.
    """
    known = find_shipped_parts() | load_part_files(files)
    try:
        method = parse_method(expression, known, PRESETS)
    except ShoalError as error:
        installed = load_packaged_parts() if error.kind.name == "unknown-name" else {}
        if not installed:
            raise
        method = parse_method(expression, installed | known, PRESETS)
    return method


def smoke_test_user_parts(method: Method, kind: str, setting: Callable[[], SmokeSetup]) -> None:
    """Smoke-test parts from outside the package before they are used, once for each `kind` of run."""
    for part in list_foreign_parts(method):
        key = (type(part), str(part), kind)
        if key not in PROBED_PARTS:
            misspelt = list(find_misspelt_names(type(part)))
            if not (misspelt or part.keeps_slots or any(map(part.acts_at, POINTS))):
                wording = (
                    "The part %s acts at no point of a round and changes nothing. Define one, such as "
                    "serve(self, params, state, round)."
                )
                log.warning(wording, part.name())
            for wrong, right in misspelt:
                wording = "The part %s defines `%s`, which no round calls by itself. Did you mean `%s`?"
                log.warning(wording, part.name(), wrong, right)
            smoke_test_part(part, setting())
            PROBED_PARTS.add(key)


PROBED_PARTS: set[tuple[type[Part], str, str]] = set()
"""Parts that passed the smoke test in this process: class, expression and kind of run."""


def find_misspelt_names(cls: type[Part]) -> Iterator[tuple[str, str]]:
    """Names that a part defines beside its fields, and that are almost those of a point or a declaration, with these.

    A misspelt point would never be called, and the part would do nothing without a word.
    """
    known = [name for name in dir(Part) if not name.startswith("_")]
    own = vars(cls).keys() - {field.name for field in fields(cls)} - set(known)
    for name in sorted(own):
        if near := get_close_matches(name, known, n=1, cutoff=0.8):
            yield name, near[0]


def load_packaged_parts() -> dict[str, type[Part]]:
    """Parts of installed packages: entry points of the group `shoal.parts`."""
    return collect_parts((point.name, [load_entry_point(point)]) for point in entry_points(group="shoal.parts"))


def load_part_files(files: Iterable[str]) -> dict[str, type[Part]]:
    """Parts of the user's own files, and those that the program gave."""
    return collect_parts(
        (file, [find_given_part(file)] if re.fullmatch(GIVEN_NAME, file) else read_part_file(Path(file)))
        for file in files
    )


def find_given_part(name: str) -> type[Part]:
    """The part that a program gave, by the name that recipes have for it."""
    if name not in HANDED_OVER_PARTS:
        raise make_lost_object_error("part", name, "parts=[...]")
    return HANDED_OVER_PARTS[name]


def make_lost_object_error(what: str, name: str, argument: str) -> ShoalError:
    """The error for an object that only the program which gave it had; `name` is that of recipes."""
    problem = f"The recipe names a {what} ({name.partition(':')[2]}) that a Python program had made."
    return ShoalError("no-data", problem, f"It went with the program: give it again, by {argument}.")


def collect_parts(sources: Iterable[tuple[str, Iterable[Any]]]) -> dict[str, type[Part]]:
    """Parts by name; a name that is taken, and an object that is no part, are refused."""
    parts: dict[str, type[Part]] = {}
    for source, things in sources:
        for thing in things:
            if not (isinstance(thing, type) and issubclass(thing, Part)):
                raise make_part_error(
                    source, "what it offers is no part", "Offer a class that inherits from shoal.Part."
                )
            frozen = vars(thing).get("__dataclass_params__")
            if frozen is None or not frozen.frozen:
                why = f"{thing.__name__} is not a frozen dataclass"
                raise make_part_error(source, why, "Put @dataclass(frozen=True) above it.")
            name = thing.name()
            if name in parts or name in find_shipped_parts() or name in PRESETS:
                origin = "" if source == thing.__name__ else f" of {source}"
                problem = (
                    f"The class {thing.__name__}{origin} would be called {name!r}, which is already the name of a part."
                )
                raise ShoalError("clash", problem, "Give it another name.")
            parts[name] = thing
    return parts


def load_entry_point(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise make_part_error(
            point.name, f"it cannot be loaded ({describe_error(error)})", "Repair or remove the package."
        ) from error


def read_part_file(path: Path) -> list[type[Part]]:
    """The parts that a Python file defines."""
    parts = find_parts_in(load_python_file(path))
    if not parts:
        raise make_part_error(path, "it defines no part", "Define a frozen dataclass that inherits from shoal.Part.")
    return list(parts.values())
