"""The ledger: what a round cost, measured on what really travelled and ran."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, TypeAlias

from shoal.core.types import SERVER, Clock, Job, Outcome

Row: TypeAlias = dict[str, Any]
"""One line of the history."""


def cost(jobs: Sequence[Job], outcomes: Sequence[Outcome], enrolment: int, number: int, clock: Clock) -> Row:
    """What the round cost: the bytes of what was encoded, the computation done, the slowest device's time."""
    down = up = work = forward = 0
    slowest = loss = samples = 0.0
    remote = [(j, o) for j, o in zip(jobs, outcomes) if j.device != SERVER]
    for job, outcome in remote:
        sent, back = job.message.nbytes, outcome.message.nbytes if outcome.message else 0
        seconds = clock.seconds(job.device, number, sent, outcome.macs_work, back)
        down, up, work = down + sent, up + back, work + outcome.macs_work
        forward, slowest = forward + outcome.macs_forward, max(slowest, seconds)
        if isfinite(outcome.loss):
            loss, samples = loss + outcome.loss * outcome.samples, samples + outcome.samples
    return {
        "round": number,
        "devices": [j.device for j in jobs],
        "accuracy": None,
        "loss": None,
        "train_loss": loss / samples if samples else None,
        "bytes_down": down,
        "bytes_up": up + enrolment,
        "macs_forward": round(forward / max(len(remote), 1)),
        "macs_work": work,
        "sim_seconds": slowest,
    }
