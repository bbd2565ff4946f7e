"""Parts from outside the package: a user's own file, or an installed package that offers them."""

import importlib.util
import sys
from hashlib import blake2b
from importlib.metadata import entry_points
from pathlib import Path

from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.expression import parse
from shoal.core.part import Part
from shoal.parts import PRESETS, parts_in, shipped
from shoal.probe import probe
from shoal.recipe import Recipe


def method_of(recipe: Recipe) -> Method:
    """The recipe's method; parts that are not of this package are looked at before they are used."""
    own = shipped()
    method = parse(recipe.method, own | strangers(recipe.parts), PRESETS)
    for part in method.parts:
        if own.get(part.name()) is not type(part):
            probe(part)
    return method


def strangers(files: tuple[str, ...]) -> dict[str, type[Part]]:
    """Parts of installed packages (entry points of the group `shoal.parts`) and of the user's files."""
    found: dict[str, type[Part]] = {}
    for point in entry_points(group="shoal.parts"):
        try:
            part = point.load()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:160]
            raise ShoalError(
                "bad-part", f"The installed part {point.name} cannot be loaded ({why}).", "Repair or remove it."
            ) from error
        found[part.name()] = part
    for file in files:
        found |= in_file(Path(file))
    clash = sorted(found.keys() & (shipped().keys() | PRESETS.keys()))
    if clash:
        raise ShoalError(
            "clash", f"{clash[0]} is already the name of a part of shoal.", "Give your class another name."
        )
    return found


def in_file(path: Path) -> dict[str, type[Part]]:
    """The parts that a Python file defines. The file is run: it is the user's own."""
    if not path.is_file():
        raise ShoalError("bad-part", f"There is no file {path}.", "Give the path of a Python file with parts.")
    name = "shoal_parts_" + blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ShoalError("bad-part", f"{path} is not a Python file.", "Its name must end in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            why = f"{type(error).__name__}: {error}"[:160]
            raise ShoalError("bad-part", f"{path}{where} cannot be loaded ({why}).", "Correct the file.") from error
    found = parts_in(sys.modules[name])
    if not found:
        raise ShoalError(
            "bad-part", f"{path} defines no part.", "Define a frozen dataclass that inherits from shoal.Part."
        )
    for cls in found.values():
        if "__dataclass_fields__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
            raise ShoalError(
                "bad-part",
                f"{cls.__name__} in {path} is not a frozen dataclass.",
                "Put @dataclass(frozen=True) above it.",
            )
    return found
