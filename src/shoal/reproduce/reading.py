"""Readings: how a protocol reads accuracy, the round of a target, and seconds off a history."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from shoal.core.errors import ShoalError
from shoal.runs.history import History

MIB = 2**20
CLOCK_WORDS = "Seconds are the authors' constants: so many per round, less where less is trained and sent."


@dataclass(frozen=True)
class Clock:
    """Seconds that authors computed instead of measuring: a constant per round, less where less is trained and sent.

    `training` are the seconds that devices compute in a round with the whole model, `up` and `down` MiB a second for
    `devices` times the `params` parameters of 4 bytes each way. A round in which devices train fewer operations than
    `macs`, or send fewer bytes, counts in proportion.
    """

    training: float
    params: int
    macs: int
    devices: int
    up: float
    down: float
    training_factor: float = 1.0
    """How many times as long a method trains, for one that gives devices more samples."""
    transfer_factor: float = 1.0
    """How many times as much a method sends, for one that sends more than the model."""
    fixed: bool = True
    """Whether every round of the method costs the same, so that published seconds are a number of rounds."""

    @property
    def transfer(self) -> float:
        return 4 * self.devices * self.params / MIB * (1 / self.up + 1 / self.down) * self.transfer_factor

    @property
    def seconds_per_round(self) -> float:
        return self.training * self.training_factor + self.transfer

    def count_seconds(self, history: History) -> float:
        """Of all rounds of a history."""
        if self.fixed:
            return len(history) * self.seconds_per_round
        whole, seconds = 4 * self.devices * self.params, 0.0
        for row in history.rows:
            trained = min(1.0, (row.get("macs_forward") or self.macs) / self.macs)
            sent = min(1.0, (row.get("bytes_up") or whole) / whole)
            seconds += self.training * self.training_factor * trained + self.transfer * sent
        return seconds

    def count_rounds(self, seconds: float) -> float | None:
        """The rounds that published seconds are, which are given to the second; None where they are no whole number."""
        rounds = round(seconds / self.seconds_per_round)
        return float(rounds) if self.fixed and abs(rounds * self.seconds_per_round - seconds) <= 1 else None


@dataclass(frozen=True)
class Reading:
    """How figures are read off a history; as it stands, from the last evaluation and from simulated seconds.

    A value is the mean of the `last` evaluations. With `maximum` it is the largest of the curve instead, which picks a
    round by test data. `smooth` are window and degree of a Savitzky-Golay filter on the curve of a maximum, and of a
    target that is to be reached. `clock` counts seconds in place of the simulated ones.
    """

    last: int = 1
    maximum: bool = False
    smooth: tuple[int, int] | None = None
    clock: Clock | None = None
    best_round: bool = False
    """Whether the best round, which is picked by test data as well, is read where it was published."""
    asked: int = 0
    """Devices that a round asks, for histories of a ledger, which do not list those that took part; 0: not known."""

    def read_value(self, history: History, column: str) -> float | None:
        values = [row[column] for row in history.rows if row.get(column) is not None]
        if not values:
            return None
        return float(max(self.smooth_curve(values)) if self.maximum else mean(values[-self.last :]))

    def cut_at_target(self, history: History, column: str, target: float) -> History | None:
        """The rounds until the curve of a column first reached a target; None if it never did."""
        places = [at for at, row in enumerate(history.rows) if row.get(column) is not None]
        curve = self.smooth_curve([history.rows[at][column] for at in places])
        return next((history.cut(at + 1) for at, value in zip(places, curve) if value >= target), None)

    def count_seconds(self, history: History) -> float:
        return self.clock.count_seconds(history) if self.clock else float(history.total("sim_seconds"))

    def smooth_curve(self, values: Sequence[float]) -> Sequence[float]:
        """The curve after the filter; as it is where it has fewer points than the window."""
        if self.smooth is None or len(values) < self.smooth[0]:
            return values
        try:
            from scipy.signal import savgol_filter
        except ImportError:
            problem = "scipy is not installed, and the protocol of the authors smooths its curves with it."
            raise ShoalError("missing-extra", problem, "Run: pip install 'shoal[results]'.") from None
        return [float(value) for value in np.asarray(savgol_filter(values, *self.smooth))]

    @property
    def words(self) -> list[str]:
        """What stands beside the figures, in sentences."""
        curve = f" of the curve after a Savitzky-Golay filter {self.smooth}" if self.smooth else ""
        if self.maximum:
            value = f"Accuracy is the maximum over all rounds{curve}: a round is picked by test data."
        elif self.last > 1:
            value = f"Accuracy is the mean of the last {self.last} evaluations."
        else:
            value = "Accuracy is that of the last evaluation."
        target = [f"A target is reached in the first round{curve} that has it."] if self.smooth else []
        clock = [CLOCK_WORDS] if self.clock else []
        best = ["The best round is picked by test data."] if self.best_round else []
        return [value, *best, *target, *clock]


PLAIN = Reading()
"""The last evaluation, the first one that has a target, simulated seconds."""
