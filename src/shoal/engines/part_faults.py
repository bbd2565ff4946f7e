"""Whose fault an exception is: of a part that is not of this package, or of an operation that torch refuses."""

import inspect
from traceback import extract_tb

from shoal.core.compose import Method
from shoal.core.errors import ShoalError, describe_error
from shoal.core.part import Part
from shoal.engines.deterministic import deterministic_fault
from shoal.parts import find_shipped_parts


def blamed(error: Exception, method: Method) -> ShoalError | None:
    """The part of a stranger that an exception came through, if any: it is no bug of ours.

    Nor is an operation that torch refuses because the recipe is `deterministic`, whoever asked for it.
    """
    if fault := deterministic_fault(error):
        return fault
    files = {inspect.getfile(type(p)): p for p in strangers_in(method)}
    for frame in reversed(extract_tb(error.__traceback__)):
        if frame.filename in files:
            why = f"raises {describe_error(error)} in `{frame.name}`, line {frame.lineno}"
            return broken(
                files[frame.filename].name(), f"it {why}", "Correct it there; a run with --out can be resumed."
            )
    return None


def strangers_in(method: Method) -> list[Part]:
    """The parts of a method that are not of this package."""
    return [part for part in method.parts if find_shipped_parts().get(part.name()) is not type(part)]


def broken(source: object, why: str, advice: str) -> ShoalError:
    return ShoalError("bad-part", f"{source} cannot be used: {why}.", advice)
