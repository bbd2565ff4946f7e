"""The error class of the package and its registry of kinds, each with an exit code of its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class ErrorKind:
    """One kind of error: exit code, name and meaning. A published code is never given another meaning."""

    code: int
    name: str
    meaning: str


ERROR_KINDS = {
    kind.name: kind
    for kind in (
        ErrorKind(2, "usage", "the command line itself could not be read"),
        ErrorKind(
            10,
            "unknown-name",
            "there is no method, value, data set, model, split, fleet, engine or recipe key of that name",
        ),
        ErrorKind(11, "bad-value", "a value is of the wrong type or out of its range"),
        ErrorKind(12, "bad-expression", "a method expression could not be read"),
        ErrorKind(13, "clash", "two parts of a method cannot be used together"),
        ErrorKind(14, "bad-part", "a part, model or metric of the user's own cannot be used"),
        ErrorKind(15, "bad-recipe", "a recipe file could not be read"),
        ErrorKind(16, "no-data", "there is no data to train on, or it does not fit the split or the model"),
        ErrorKind(20, "folder-exists", "the run folder is already in use"),
        ErrorKind(21, "no-run", "the folder holds no run"),
        ErrorKind(22, "damaged", "a file of a run or of a data set, or a message, is damaged"),
        ErrorKind(23, "other-recipe", "a checkpoint belongs to another recipe"),
        ErrorKind(24, "disk", "a file could not be written or read"),
        ErrorKind(30, "missing-extra", "an optional package is not installed"),
        ErrorKind(31, "no-device", "the compute device asked for is not there"),
        ErrorKind(32, "unreachable", "a server, a device or a key of a federation is not there"),
        ErrorKind(
            40, "nothing-learnt", "every round was void: the run is complete, and the model is what it was before it"
        ),
        ErrorKind(70, "bug", "something went wrong that is not the user's doing"),
        ErrorKind(130, "interrupted", "stopped by the user; the run can be resumed"),
        ErrorKind(143, "terminated", "stopped by SIGTERM, which schedulers send; the run can be resumed"),
    )
}


class ShoalError(Exception):
    """An error that a user can act on: `problem` says what was found and why it cannot work, `advice` what to do."""

    def __init__(self, kind: str, problem: str, advice: str):
        super().__init__(problem)
        self.kind = ERROR_KINDS[kind]
        self.problem = problem
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.problem} {self.advice}"

    def __reduce__(self):
        return ShoalError, (self.kind.name, self.problem, self.advice)


def describe_error(error: BaseException) -> str:
    """Type and message of any exception in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__


def unknown_name_error(what: str, name: str, known: Iterable[str]) -> ShoalError:
    """The error for a name that is not among those known, with the nearest one as advice."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(names)}."
    return ShoalError("unknown-name", f"There is no {what} called {name[:80]!r}.", hint)
