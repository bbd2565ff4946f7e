"""The error class of the package and its registry of kinds, each with an exit code of its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from os import sep
from pathlib import Path
from traceback import extract_tb


@dataclass(frozen=True)
class ErrorKind:
    """One kind of error: exit code, name and meaning. A published code is never given another meaning."""

    code: int
    name: str
    meaning: str
    cause: str
    """What typically leads to it, in Markdown, for docs/reference/exit-codes.md."""
    remedy: str
    """What to do about it, likewise."""


ERROR_KINDS = {
    kind.name: kind
    for kind in (
        ErrorKind(
            2,
            "usage",
            "the command line itself could not be read",
            "a flag that does not exist; no method for `compare`",
            "`shoal run --help`",
        ),
        ErrorKind(
            10,
            "unknown-name",
            "there is no method, value, data set, model, split, fleet, engine or recipe key of that name",
            "a typing error (`fedpox`); a part of your own without `--parts`",
            "take the name it suggests; `shoal list methods`",
        ),
        ErrorKind(
            11,
            "bad-value",
            "a value is of the wrong type or out of its range",
            "`fedprox(mu=-1)`, `--sample 50` with 20 devices, changing `lr` on resume, `export` onto a file that "
            "is there",
            "give a value in the range it names",
        ),
        ErrorKind(
            12,
            "bad-expression",
            "a method expression could not be read",
            "`fedprox(0.1)`: the value has no name",
            "write `fedprox(mu=0.1)`, parts with `+` between them",
        ),
        ErrorKind(
            13,
            "clash",
            "two parts of a method cannot be used together",
            "`median+trimmedmean`, `uniform+weighted`; a part of your own with the name of a shipped one",
            "keep one of the two it names",
        ),
        ErrorKind(
            14,
            "bad-part",
            "a part, model or metric of the user's own cannot be used",
            "it raises, changes what it is given, branches on a tensor, forgets to return its state; the file is "
            "not there or cannot be loaded",
            "correct the point it names; see [Write a part](../how-to/write-a-part.md#what-is-checked-before-it-runs)",
        ),
        ErrorKind(
            15,
            "bad-recipe",
            "a recipe file could not be read",
            "it is not there, is not TOML, or has tables",
            "write `key = value` lines",
        ),
        ErrorKind(
            16,
            "no-data",
            "there is no data to train on, or it does not fit the split or the model",
            "`--init` with weights of another model; the server takes part and has no data; data were objects of a "
            "program that is over",
            "as it says",
        ),
        ErrorKind(
            20,
            "folder-exists",
            "the run folder is already in use",
            "`--out` names a folder that is not empty, or another process works in it",
            "`shoal resume` it, or give another `--out`",
        ),
        ErrorKind(
            21,
            "no-run",
            "the folder holds no run",
            "a wrong path; `export` of a comparison, or of a run without a checkpoint",
            "give the folder of a run",
        ),
        ErrorKind(
            22,
            "damaged",
            "a file of a run or of a data set, or a message, is damaged",
            "cut short, or edited; `--init` with something that is not a safetensors file; a data file of another "
            "format",
            "restore it from a copy",
        ),
        ErrorKind(
            23,
            "other-recipe",
            "a checkpoint belongs to another recipe",
            "`recipe.toml` was edited; `shoal.resume` was given other data or another model",
            "put it back, give the same, or start anew elsewhere",
        ),
        ErrorKind(
            24,
            "disk",
            "a file could not be written or read",
            "the disk is full, the place is not writable, the file is not there, or the folder of a run was "
            "deleted or moved while it was going on",
            "make room or allow access, then resume",
        ),
        ErrorKind(
            30,
            "missing-extra",
            "an optional package is not installed",
            "`report` without matplotlib, `tune --sampler tpe` without Optuna, `to_pandas()` without pandas, "
            "`export` to .onnx without its packages",
            "the `pip install` line it prints",
        ),
        ErrorKind(
            31,
            "no-device",
            "the compute device asked for is not there",
            "`--compute cuda` on a machine without a GPU",
            "`--compute cpu`",
        ),
        ErrorKind(
            32,
            "unreachable",
            "a server, a device or a key of a federation is not there",
            "no key was made for a device, the port is taken, no device came",
            "`shoal keys`, another `--port`, `shoal join`",
        ),
        ErrorKind(
            40,
            "nothing-learnt",
            "every round was void: the run is complete, and the model is what it was before it",
            "a learning rate of 1e9; `--failures 1`; a deadline that nobody meets",
            "as it says; what was computed is printed and kept as always",
        ),
        ErrorKind(
            70,
            "bug",
            "something went wrong that is not the user's doing",
            "an error in shoal",
            "report it with the file it names; a run with `--out` can be resumed",
        ),
        ErrorKind(
            130,
            "interrupted",
            "stopped by the user; the run can be resumed",
            "Ctrl-C",
            "`shoal resume`",
        ),
        ErrorKind(
            143,
            "terminated",
            "stopped by SIGTERM, which schedulers send; the run can be resumed",
            "`scancel`, `docker stop`, `kill`, a machine that shuts down",
            "`shoal resume`",
        ),
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

    def _render_traceback_(self) -> list[str]:
        """What notebooks show: the line of the cell and the sentence, without the frames of this package."""
        inside = str(Path(__file__).parents[1])
        frames = [f for f in extract_tb(self.__traceback__) if not f.filename.startswith(inside)]
        own = [f for f in frames if f"{sep}IPython{sep}" not in f.filename][:1]
        return [*(f"line {f.lineno}: {f.line}\n" for f in own), f"ShoalError ({self.kind.name}): {self}"]

    def __reduce__(self):
        return ShoalError, (self.kind.name, self.problem, self.advice)


def describe_error(error: BaseException) -> str:
    """Type and message of any exception in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__


def unknown_name_error(what: str, name: str, known: Iterable[str]) -> ShoalError:
    """The error for a name that is not among those known, with the nearest one as advice."""
    names = sorted(known)
    typed = name.lower()
    begun = [other for other in names if len(typed) > 1 and other.startswith(typed)]
    part = [other for other in names if len(typed) > 2 and typed in other]
    near = get_close_matches(typed, names, n=1, cutoff=0.75) or begun or part
    near = near or get_close_matches(typed, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(names)}."
    return ShoalError("unknown-name", f"There is no {what} called {name[:80]!r}.", hint)
