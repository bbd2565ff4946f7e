"""What parts tell in a round: numbers for its row (`tell`), on the server or on devices, and words to the user (`log`).

What devices tell travels as float32 numbers beside their replies, under the name `TOLD`.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.metric import Metric

if TYPE_CHECKING:
    from shoal.core.types import Reply

TOLD = ".told"
"""The name, beside a message, of the request for what parts tell on devices, and of that; the dot keeps it apart."""
REDUCTIONS = {"mean": fmean, "sum": sum, "max": max}
"""How the numbers of several devices become one, by `Metric.over`."""


class Telling:
    """Collects what parts tell in one pass of a round; a pass that is thrown away takes its own with it."""

    def __init__(self, metrics: Mapping[str, Metric] | None = None, silent: bool = False):
        self.metrics = metrics
        """What may be told, by column `part.name`; None: anything."""
        self.silent = silent
        """Whether nothing of it is kept."""
        self.numbers: dict[str, Any] = {}
        self.words: list[tuple[str, str]] = []

    def copy(self) -> "Telling":
        """The same so far, for a pass that may be thrown away."""
        copied = Telling(self.metrics, self.silent)
        copied.numbers, copied.words = dict(self.numbers), list(self.words)
        return copied

    def add_number(self, part: str, name: str, value: Any) -> None:
        """Keep a number of a part; the last one told under a name counts.

        Where a point is called by hand, and not by a method, `part` is "" and any name will do.
        """
        column = f"{part}.{name}"
        if part and self.metrics is not None and column not in self.metrics:
            problem = f"The part {part} tells {name!r}, which is not among its `metrics`."
            raise ShoalError("bad-part", problem, f"Add Metric({name!r}, ...) to them.")
        is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
        if isinstance(value, bool) or not is_number:
            problem = f"The part {part} tells {name!r} as {type(value).__name__}, which is no single number."
            raise ShoalError("bad-part", problem, "Tell one number, or a tensor with one element.")
        if not self.silent:
            self.numbers[column] = value.detach() if isinstance(value, Tensor) else value

    def add_words(self, part: str, text: str) -> None:
        """Keep a text for the user, once."""
        if not self.silent and (part, text) not in self.words:
            self.words.append((part, text))

    def make_row(self, replies: Sequence["Reply"]) -> dict[str, Any]:
        """The columns of all that was told, and of what parts declare and devices reported; None where not finite."""
        row = collect_reported_numbers(self.metrics or {}, replies) if not self.silent else {}
        for column, value in self.numbers.items():
            number = value.item() if hasattr(value, "item") else value
            row[column] = number if isfinite(number) else None
        return row | ({"log": [list(said) for said in self.words]} if self.words else {})


def collect_reported_numbers(metrics: Mapping[str, Metric], replies: Sequence["Reply"]) -> dict[str, Any]:
    """By column: single finite numbers that devices report under the name of a metric, reduced over devices."""
    row: dict[str, Any] = {}
    for column, metric in metrics.items():
        part, _, name = column.rpartition(".")
        source, key = (TOLD, make_told_key(part, name)) if metric.on_device else (part, name)
        reported = [reply.report.get(source, {}).get(key) for reply in replies if part and reply.device >= 0]
        numbers = [v.double().reshape(()) for v in reported if isinstance(v, Tensor) and v.numel() == 1]
        finite = [number for number in torch.stack(numbers).tolist() if isfinite(number)] if numbers else []
        if finite:
            row[column] = REDUCTIONS[metric.over](finite)
    return row


def make_told_key(part: str, name: str) -> str:
    """The name of a number on its way from a device; no tensor of a model has a space in its name."""
    return f"{part} {name}"


def make_told_extras(told: Mapping[str, Tensor], metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
    """What travels of the numbers that were told on a device: those that are finite, as float32."""
    extras = {}
    for key, value in told.items():
        part, _, name = key.partition(" ")
        metric = metrics.get(f"{part}.{name}")
        if metric is None or not metric.on_device:
            problem = f"The part {part} tells {name!r} on a device, and has no metric of that name that is `on_device`."
            raise ShoalError("bad-part", problem, f"Add Metric({name!r}, ..., on_device=True) to its `metrics`.")
        number = value.float()
        if number.numel() == 1 and bool(number.isfinite()):
            extras[key] = number.reshape(())
    return extras
