"""The post: what each device is sent, and what the server reads of their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from shoal.core import wire
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.faulty_replies import explain_exclusion
from shoal.core.ledger import Row
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Params, Tree
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Job, Outcome, Reply, Round, Samples, Work

MOST_PASSES = 1000
"""Passes over each of its samples that a device may say it made in a round; curvature takes about 150."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """Packs jobs and opens replies, through the codecs of a method."""

    method: Method
    streams: RandomStreams
    sizes: np.ndarray
    work: Callable[[int, int], Work]
    """(round, device) -> how much it trains."""
    server: Samples | None = None
    is_untrusted: bool = False
    """Whether devices are elsewhere, so that what they say may be anything."""

    def pack_jobs(self, round: Round, beside: dict, states: dict[str, Tree]) -> tuple[list[Job], dict[str, Tree]]:
        """One job per device: its slice of the model and what lies beside, through the downlink's codecs."""
        net, codecs, jobs = round.net, self.method.codecs_for("down"), []
        names = net.names_with_role("shared", "server")
        everything = wire.pack_message(round.anchor, {}, WHOLE_MODEL, net.slicer, names)
        for device in round.devices:
            plan = round.plans[device]
            if plan is WHOLE_MODEL and not beside[device] and not codecs:
                jobs.append(Job(device, round.number, plan, everything, self.work(round.number, device)))
                continue
            sent = names if plan.sent is None else [k for k in names if k in plan.sent]
            told = {} if plan.known or not plan else {".plan": wire.encode_plan(plan, [*net.axes, *net.rows])}
            message = wire.pack_message(round.anchor, told | beside[device], plan, net.slicer, sent)
            if codecs:
                message, states = wire.encode_message(message, codecs, states, self.make_link(round, "down", device))
            jobs.append(Job(device, round.number, plan, message, self.work(round.number, device)))
        return jobs, states

    def open_replies(
        self, jobs: Sequence[Job], outcomes: Sequence[Outcome], round: Round, late: set[int]
    ) -> tuple[list[Reply], list[Row]]:
        """What came back, as full-size deltas with their coverage; what cannot be used is named, with the reason."""
        net, codecs = round.net, self.method.codecs_for("up")
        like = {k: round.anchor[k] for k in net.names_with_role("shared")}
        replies: dict[int, Reply] = {}
        unread: dict[int, str] = {}
        faults: list[Exception] = []
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.device in late or outcome.message is None:
                continue
            try:
                replies[job.device] = self.open_reply(job, outcome, outcome.message, like, round)
            except Exception as error:
                if isinstance(error, ShoalError) and error.kind.name == "damaged":
                    unread[job.device] = error.problem
                else:
                    unread[job.device] = explain_exclusion(error)
                    faults.append(error)
        if not self.is_untrusted and 2 * len(faults) > len(replies) + len(faults):
            raise faults[0]
        looked = [not codecs and r.outcome.finite for r in replies.values()]
        finite = tree.check_each_finite(
            [[] if known else [r.delta, r.report] for r, known in zip(replies.values(), looked)]
        )
        sound = {device for device, yes in zip(replies, finite) if yes}
        why = {o.device: "it was late" if o.device in late else unread.get(o.device, o.problem) for o in outcomes}
        gone = [{"device": d, "why": w or "its update is not finite"} for d, w in why.items() if d not in sound]
        return [r for d, r in replies.items() if d in sound], gone

    def open_reply(self, job: Job, outcome: Outcome, message: wire.Message, like: Params, round: Round) -> Reply:
        """One answer, decoded and at full shape."""
        net, codecs = round.net, self.method.codecs_for("up")
        message = wire.decode_message(message, codecs, self.make_link(round, "up", job.device)) if codecs else message
        delta, covered, report = wire.open_message(message, like, job.plan, net.slicer)
        strange = [k for k, v in delta.items() if v.shape != like[k].shape or v.dtype != like[k].dtype]
        if self.is_untrusted and strange:
            problem = f"A message has values of another form for {strange[0]}."
            raise ShoalError("damaged", problem, "It was not used.")
        if self.method.carries == "values":
            delta = tree.subtract_params(delta, round.anchor)
            delta |= {k: delta[k] * mask for k, mask in covered.items()}
        size = len(self.server or ()) if job.device == SERVER else int(self.sizes[job.device])
        return Reply(job.device, size, delta, covered, report, outcome)

    def cap_claims(self, job: Job, outcome: Outcome, net: Net) -> Outcome:
        """A device that is elsewhere cannot have gone through more samples than it holds, as often as it was told.

        Nor can it have computed more than so many passes over each: its count is in the run's budgets and its clock.
        """
        if not self.is_untrusted or job.device == SERVER or outcome.message is None:
            return outcome
        work, size = job.work, int(self.sizes[job.device])
        most = work.steps * work.batch or ceil(max(work.epochs, 1) * size)
        bounds = {
            "samples": most,
            "steps": most,
            "macs_forward": net.macs_forward,
            "macs_work": MOST_PASSES * net.macs_forward * max(most, size),
        }
        return replace(outcome, **{name: min(getattr(outcome, name), bound) for name, bound in bounds.items()})

    def make_link(self, round: Round, direction: str, device: int) -> wire.CodecLink:
        net, plan = round.net, round.plans[device]
        return wire.CodecLink(
            direction,
            device,
            round.number,
            plan,
            net.slicer,
            self.streams,
            net.initial,
            frozenset(net.trainable),
            blocks=net.names_by_block,
        )
