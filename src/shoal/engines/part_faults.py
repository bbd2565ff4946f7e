"""Blame for an exception in training: a part that is not shipped with shoal, or an operation that torch refuses."""

import inspect
from traceback import extract_tb

from shoal.core.compose import Method
from shoal.core.errors import ShoalError, describe_error
from shoal.core.part import Part
from shoal.engines.deterministic import explain_nondeterminism
from shoal.parts import find_shipped_parts


def explain_fault(error: Exception, method: Method) -> ShoalError | None:
    """The error to show where the traceback leads through a part that is not shipped; None where it does not.

    An operation that torch refuses because the recipe is `deterministic` is explained first, wherever it was called.
    """
    if fault := explain_nondeterminism(error):
        return fault
    files = {file: part for part in list_foreign_parts(method) for file in list_code_files(type(part))}
    for frame in reversed(extract_tb(error.__traceback__)):
        if frame.filename in files:
            why = f"raises {describe_error(error)} in `{frame.name}`, line {frame.lineno}"
            return make_part_error(
                files[frame.filename].name(), f"it {why}", "Correct it there; a run with --out can be resumed."
            )
    return None


def describe_line(error: Exception, cls: type[Part]) -> str:
    """The last line of a part's own code that an exception came through, as the end of a sentence; "" where none is."""
    files = list_code_files(cls)
    own = [frame for frame in extract_tb(error.__traceback__) if frame.filename in files]
    return f" in `{own[-1].name}`, line {own[-1].lineno}" if own else ""


def list_code_files(cls: type[Part]) -> set[str]:
    """Where the methods of a part were written; of a cell of a notebook, what Python calls the cell."""
    own = [vars(base).values() for base in cls.__mro__ if issubclass(base, Part) and base is not Part]
    functions = [getattr(value, "__func__", value) for values in own for value in values]
    # what `dataclass` makes of the fields is in no file
    return {f.__code__.co_filename for f in functions if inspect.isfunction(f)} - {"<string>"}


def list_foreign_parts(method: Method) -> list[Part]:
    """The parts of a method that are not shipped with shoal."""
    return [part for part in method.parts if find_shipped_parts().get(part.name()) is not type(part)]


def make_part_error(source: object, why: str, advice: str) -> ShoalError:
    return ShoalError("bad-part", f"{source} cannot be used: {why}.", advice)
