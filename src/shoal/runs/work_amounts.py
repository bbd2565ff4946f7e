"""How much a device trains in a round: the values of `epochs` and `steps`, from text to a number for each device."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.fleet_protocol import Fleet
from shoal.core.streams import RandomStreams
from shoal.runs.recipe_values import bad_value_error

NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
PROPORTIONAL = ("size", "speed")
"""What amounts can be in proportion to: a device's samples, or its speed in the fleet."""
SPEEDS = 1000
"""Devices whose speeds the mean speed of a fleet is taken over."""

DrawAmount = Callable[[int, int], float]
"""(round, device) -> epochs or steps."""


@dataclass(frozen=True)
class WorkAmount:
    """Epochs or steps: a number, a range to draw from, one of a list for each device, or a mean that is shared out."""

    values: tuple[float, ...]
    kind: str = "range"
    """`range` (lowest and highest), `list`, or one of PROPORTIONAL with the mean as value."""


def parse_amount(name: str, text: str) -> WorkAmount | None:
    """`3`, `1-5`, `1,2,5`, `size:10` or `speed:10` as an amount of the key `name`; None for an empty text."""
    if not text:
        return None
    kind, _, number = text.replace(" ", "").rpartition(":")
    parts = number.split(",")
    if kind in PROPORTIONAL and re.fullmatch(NUMBER, number):
        amount = WorkAmount((float(number),), kind)
    elif not kind and len(parts) > 1 and all(re.fullmatch(NUMBER, part) for part in parts):
        amount = WorkAmount(tuple(map(float, parts)), "list")
    else:
        match = re.fullmatch(rf"({NUMBER})(?:-({NUMBER}))?", number) if not kind else None
        amount = WorkAmount((float(match[1]), float(match[2] or match[1])) if match else (0.0, 0.0))
    if name == "steps" and kind not in PROPORTIONAL and any(value != int(value) for value in amount.values):
        raise bad_value_error(name, text, "a whole number of steps")
    is_range = amount.kind == "range"
    if not all(0 < value < 1e6 for value in amount.values) or is_range and amount.values[0] > amount.values[1]:
        wanted = "a number above 0, two with a dash between, like 1-5, one for each device, like 1,2,5, "
        raise bad_value_error(name, text, f"{wanted}or a mean that is shared out: size:10, speed:10")
    return amount


def make_amount_rule(
    name: str, amount: WorkAmount, streams: RandomStreams, fleet: Fleet, sizes: np.ndarray
) -> DrawAmount:
    """(round, device) -> the amount; ranges are drawn from the stream `work`, the server gets the mean."""
    if amount.kind == "list":
        return make_list_rule(name, amount.values, len(sizes))
    if amount.kind in PROPORTIONAL:
        return make_proportional_rule(name, amount, fleet, sizes)
    low, high = amount.values

    def draw_from_range(round: int, device: int) -> float:
        if low == high:
            return low
        generator = streams.make_numpy_generator("work", round, device)
        whole = low == int(low) and high == int(high)
        return float(generator.integers(int(low), int(high) + 1) if whole else generator.uniform(low, high))

    return draw_from_range


def make_list_rule(name: str, values: tuple[float, ...], devices: int) -> DrawAmount:
    """Each device its own value; a list that is shorter than the devices are many begins anew."""
    if len(values) > devices:
        problem = f"{name} has {len(values)} values, and there are {devices} devices."
        raise ShoalError("bad-value", problem, "Give at most one value for each device.")
    mean = float(np.mean(values))
    return lambda round, device: values[device % len(values)] if device >= 0 else mean


def make_proportional_rule(name: str, amount: WorkAmount, fleet: Fleet, sizes: np.ndarray) -> DrawAmount:
    """Amounts in proportion to the samples of a device, or to its speed; their mean over devices is as given."""
    (mean,) = amount.values

    def read_speed(round: int, device: int) -> float:
        return 1 / max(fleet.get_profile(device, round).estimate_times(0, 10**9, 0).compute, 1e-12)

    if amount.kind == "speed":
        typical = float(np.mean([read_speed(0, device) for device in range(min(len(sizes), SPEEDS))]))
        return lambda round, device: mean * read_speed(round, device) / typical if device >= 0 else mean
    holders = sizes[sizes > 0]
    if not len(holders):
        problem = f"{name} goes by size, and how many samples real devices have is not known beforehand."
        raise ShoalError("bad-value", problem, "Give a number, or a list with one for each device.")
    usual = float(holders.mean())
    return lambda round, device: mean * float(sizes[device]) / usual if device >= 0 else mean
