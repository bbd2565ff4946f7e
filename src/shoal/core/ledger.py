"""The ledger: what a round cost, measured on what really travelled and ran."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, TypeAlias

from shoal.core.fleet_protocol import DeviceTimes, Fleet
from shoal.core.model.net import Net
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Job, Outcome
from shoal.core.wire import Message

Row: TypeAlias = dict[str, Any]
"""One line of the history."""


@dataclass(frozen=True)
class Deadlines:
    """What the server puts up with: devices that fail, and how long it waits for the others."""

    failures: float = 0.0
    """The chance that a device is sent its job and never answers."""
    deadline: float = 0.0
    """Simulated seconds after which a reply is late; 0 for none."""
    over_select: float = 0.0
    """The share of further devices that are asked; the round ends when as many as wanted have answered."""

    def count_devices_to_ask(self, wanted: int) -> int:
        return ceil(wanted * (1 + self.over_select))

    def device_fails(self, streams: RandomStreams, round: int, device: int) -> bool:
        return (
            self.failures > 0
            and device != SERVER
            and streams.make_numpy_generator("failures", round, device).random() < self.failures
        )

    def find_late_devices(self, times: dict[int, float], wanted: int, asked: int) -> tuple[set[int], float]:
        """The devices whose replies come too late, and when the round ends: with the last reply that is waited for."""
        ends = sorted(times.values())
        if self.over_select and len(ends) >= wanted:
            end = ends[wanted - 1]
        elif self.deadline and len(ends) < asked:
            end = self.deadline
        else:
            end = ends[-1] if ends else 0.0
        end = min(end, self.deadline) if self.deadline else end
        return {device for device, seconds in times.items() if seconds > end}, end


def simulate_device_times(jobs: Sequence[Job], outcomes: Sequence[Outcome], fleet: Fleet) -> dict[int, DeviceTimes]:
    """The simulated seconds of every device that answered; the server itself takes none."""
    return {
        job.device: fleet.get_profile(job.device, job.round).estimate_times(
            job.message.nbytes, outcome.macs_work, count_message_bytes(outcome.message)
        )
        for job, outcome in zip(jobs, outcomes)
        if job.device != SERVER and outcome.message is not None
    }


def compute_round_cost(
    jobs: Sequence[Job],
    outcomes: Sequence[Outcome],
    enrolment: int,
    number: int,
    fleet: Fleet,
    times: dict[int, DeviceTimes],
    end: float,
) -> Row:
    """What the round cost: the bytes of what was encoded, the computation done, the time until it ended, by cause."""
    down: dict[str, int] = {}
    up: dict[str, int] = {"enrol": enrolment} if enrolment else {}
    work = forward = 0
    loss = samples = joules = 0.0
    remote = [(j, o) for j, o in zip(jobs, outcomes) if j.device != SERVER]
    for job, outcome in remote:
        add_message_bytes(down, job.message)
        add_message_bytes(up, outcome.message)
        work, forward = work + outcome.macs_work, forward + outcome.macs_forward
        profile = fleet.get_profile(job.device, number)
        joules += profile.estimate_joules(job.message.nbytes, outcome.macs_work, count_message_bytes(outcome.message))
        if isfinite(outcome.loss):
            loss, samples = loss + outcome.loss * outcome.samples, samples + outcome.samples
    slowest = max(
        (t for t in times.values() if t.total <= end), key=lambda t: t.total, default=DeviceTimes(0.0, 0.0, 0.0)
    )
    trained = [o for _, o in remote if o.steps]
    return {
        "round": number,
        "devices": [j.device for j in jobs],
        "accuracy": None,
        "loss": None,
        "train_loss": loss / samples if samples else None,
        "bytes_down": sum(down.values()),
        "bytes_up": sum(up.values()),
        "macs_forward": round(forward / max(len(trained), 1)),
        "macs_work": work,
        "sim_seconds": end,
        "bytes_by": {"down": down, "up": up},
        "seconds_by": slowest._asdict(),
    } | ({"joules": joules} if joules else {})


def count_bytes_by_blocks(jobs: Sequence[Job], net: Net) -> int:
    """The bytes of the models that went down, if all blocks of a model were of one size, as some papers count."""
    total = 0.0
    for job in jobs:
        if job.device != SERVER:
            there = sum(any(name in job.message.body for name in block) for block in net.names_by_block)
            whole = sum(net.initial[name].nbytes for block in net.names_by_block for name in block)
            total += whole * there / len(net.names_by_block)
    return round(total)


def add_message_bytes(sums: dict[str, int], message: Message | None) -> None:
    """The bytes of a message to those of its causes."""
    for cause, own in message.bytes_by.items() if message is not None else ():
        sums[cause] = sums.get(cause, 0) + own


def count_message_bytes(message: Message | None) -> int:
    return message.nbytes if message is not None else 0
