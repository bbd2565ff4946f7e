"""What a round costs (bytes, multiply-accumulates, simulated seconds, joules), and which replies come too late.

Bytes are those of the tensors in encoded messages; what a network adds (headers, TLS, Flower) is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, TypeAlias

from shoal.core.fleet_protocol import DeviceTimes, Fleet
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Job, Outcome
from shoal.core.wire import Message

Row: TypeAlias = dict[str, Any]
"""One line of the history: the metrics of a round, by name."""


@dataclass(frozen=True)
class Deadlines:
    """Simulated failures of devices, and how long the server waits for replies."""

    failures: float = 0.0
    """The probability that a device is sent its job and never replies."""
    deadline: float = 0.0
    """Simulated seconds after which a reply is late; 0 for none."""
    over_select: float = 0.0
    """The share of devices selected on top of those wanted; the round ends when as many as wanted have replied."""

    def count_devices_to_ask(self, wanted: int) -> int:
        """How many devices to select when `wanted` replies are needed."""
        return ceil(wanted * (1 + self.over_select))

    def device_fails(self, streams: RandomStreams, round: int, device: int) -> bool:
        """Whether a device fails in a round; the server never does."""
        return (
            self.failures > 0
            and device != SERVER
            and streams.make_numpy_generator("failures", round, device).random() < self.failures
        )

    def find_late_devices(self, times: dict[int, float], wanted: int, asked: int) -> tuple[set[int], float]:
        """The devices whose replies come too late, and the seconds after which the round ends.

        `times` are the seconds of each device that replied, `asked` is how many were sent a job.
        """
        seconds_in_order = sorted(times.values())
        if self.over_select and len(seconds_in_order) >= wanted:
            end = seconds_in_order[wanted - 1]
        elif self.deadline and len(seconds_in_order) < asked:
            end = self.deadline
        else:
            end = seconds_in_order[-1] if seconds_in_order else 0.0
        end = min(end, self.deadline) if self.deadline else end
        return {device for device, seconds in times.items() if seconds > end}, end


def simulate_device_times(jobs: Sequence[Job], outcomes: Sequence[Outcome], fleet: Fleet) -> dict[int, DeviceTimes]:
    """The simulated seconds of every device that replied; the server takes none."""
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
    judged: Sequence[str] = ("accuracy", "loss"),
) -> Row:
    """The row of a round with its costs: bytes of encoded messages, multiply-accumulates, simulated seconds, joules.

    `enrolment` are the bytes of enrolment cards received in it, `end` the seconds after which it ended. `judged`
    are the columns that an evaluation fills.
    """
    down: dict[str, int] = {}
    up: dict[str, int] = {"enrol": enrolment} if enrolment else {}
    work = forward = 0
    loss = samples = joules = 0.0
    pairs = [(j, o) for j, o in zip(jobs, outcomes) if j.device != SERVER]
    for job, outcome in pairs:
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
    trained = [o for _, o in pairs if o.steps]
    return {
        "round": number,
        "devices": [j.device for j in jobs],
        **dict.fromkeys(judged),
        "train_loss": loss / samples if samples else None,
        "bytes_down": sum(down.values()),
        "bytes_up": sum(up.values()),
        "macs_forward": round(forward / max(len(trained), 1)),
        "macs_work": work,
        "sim_seconds": end,
        "bytes_by": {"down": down, "up": up},
        "seconds_by": slowest._asdict(),
    } | ({"joules": joules} if joules else {})


def add_evaluation(row: Row, evaluated: Row) -> Row:
    """The row of a round with what an evaluation found, and with the bytes that it moved, if any."""
    found = dict(evaluated)
    by_way = {way: dict(row["bytes_by"][way]) for way in ("down", "up")}
    for way, moved in found.pop("bytes_by", {}).items():
        by_way[way] |= moved
        row = row | {f"bytes_{way}": row[f"bytes_{way}"] + sum(moved.values())}
    return row | {"bytes_by": by_way} | found


def add_message_bytes(sums: dict[str, int], message: Message | None) -> None:
    """Add the bytes of a message to `sums`, by cause (the model, or a part)."""
    for cause, nbytes in message.bytes_by.items() if message is not None else ():
        sums[cause] = sums.get(cause, 0) + nbytes


def count_message_bytes(message: Message | None) -> int:
    return message.nbytes if message is not None else 0
