"""Messages between the server and devices: packs and encodes jobs, decodes and checks replies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from shoal.core import wire
from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.extra_checks import find_reply_fault
from shoal.core.faulty_replies import explain_exclusion
from shoal.core.ledger import Row
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Params, Tree
from shoal.core.phases import in_phase
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Job, Outcome, Reply, Round, Work

MOST_PASSES = 1000
"""The most passes over each of its samples that an untrusted device may claim in a round; curvature takes about 150."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """Packs jobs and opens replies with the codecs of a method."""

    method: Method
    streams: RandomStreams
    sizes: np.ndarray
    work: Callable[[int, int], Work]
    """(round, device) -> how long it trains, with which batch size and learning rate."""
    server: Samples | None = None
    is_untrusted: bool = False
    """Whether devices run elsewhere, so that their replies may hold anything."""

    def pack_jobs(self, round: Round, beside: dict, states: dict[str, Tree]) -> tuple[list[Job], dict[str, Tree]]:
        """One job per device, with its slice of the model and what parts send beside it; and the new states."""
        net, codecs, jobs = round.net, self.method.codecs_for("down"), []
        names = net.names_with_role("shared", "server")
        whole_message = wire.pack_message(round.anchor, {}, WHOLE_MODEL, net.slicer, names)
        for device in round.devices:
            plan = round.plans[device]
            if plan is WHOLE_MODEL and not beside[device] and not codecs:
                jobs.append(Job(device, round.number, plan, whole_message, self.work(round.number, device)))
                continue
            sent_names = names if plan.sent is None else [k for k in names if k in plan.sent]
            plan_bits = {} if plan.known or not plan else {".plan": wire.encode_plan(plan, [*net.axes, *net.rows])}
            message = wire.pack_message(round.anchor, plan_bits | beside[device], plan, net.slicer, sent_names)
            if codecs:
                message, states = wire.encode_message(message, codecs, states, self.make_link(round, "down", device))
            jobs.append(Job(device, round.number, plan, message, self.work(round.number, device)))
        return jobs, states

    @in_phase("pack")
    def decode_replies(
        self, jobs: Sequence[Job], outcomes: Sequence[Outcome], round: Round, late_devices: set[int]
    ) -> tuple[list[Reply], list[Row]]:
        """The usable replies, decoded and at full shape; and, for each device without one, its number and the reason.

        Where devices are trusted and most replies cannot be opened, the codec is at fault, and its error is raised.
        """
        net, codecs = round.net, self.method.codecs_for("up")
        like = {k: round.anchor[k] for k in net.names_with_role("shared")}
        replies: dict[int, Reply] = {}
        problems: dict[int, str] = {}
        faults: list[Exception] = []
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.device in late_devices or outcome.message is None:
                continue
            try:
                replies[job.device] = self.decode_reply(job, outcome, outcome.message, like, round)
            except Exception as error:
                if isinstance(error, ShoalError) and error.kind.name == "damaged":
                    problems[job.device] = error.problem
                else:
                    problems[job.device] = explain_exclusion(error)
                    faults.append(error)
        if not self.is_untrusted and 2 * len(faults) > len(replies) + len(faults):
            raise faults[0]
        unknown = {device: reply for device, reply in replies.items() if codecs or not reply.outcome.finite}
        finite = tree.check_each_finite([[reply.delta, reply.report] for reply in unknown.values()])
        usable = replies.keys() - {device for device, is_finite in zip(unknown, finite) if not is_finite}
        reasons = {
            o.device: "it was late" if o.device in late_devices else problems.get(o.device, o.problem) for o in outcomes
        }
        dropped = [{"device": d, "why": w or "its update is not finite"} for d, w in reasons.items() if d not in usable]
        return [r for d, r in replies.items() if d in usable], dropped

    def decode_reply(self, job: Job, outcome: Outcome, message: wire.Message, like: Params, round: Round) -> Reply:
        """One reply, decoded and at full shape, as a delta to the anchor; refused where extras are not as declared."""
        net, codecs = round.net, self.method.codecs_for("up")
        fault = find_reply_fault(self.method, job, message, net)
        if fault:
            raise ShoalError("damaged", fault, "It was not used.")
        message = wire.decode_message(message, codecs, self.make_link(round, "up", job.device)) if codecs else message
        delta, covered, report = wire.unpack_message(message, like, job.plan, net.slicer)
        if self.is_untrusted and (misshapen := find_misshapen(delta, like)):
            problem = f"A message has values of another form for {misshapen}."
            raise ShoalError("damaged", problem, "It was not used.")
        if self.method.carries == "values":
            delta = tree.subtract_params(delta, round.anchor)
            delta |= {k: delta[k] * mask for k, mask in covered.items()}
        size = len(self.server or ()) if job.device == SERVER else int(self.sizes[job.device])
        return Reply(job.device, size, delta, covered, report, outcome, job.plan, round.anchor, job.round)

    def cap_claims(self, job: Job, outcome: Outcome, net: Net) -> Outcome:
        """The outcome with the claims of an untrusted device (samples, steps, multiply-accumulates) cut to what can be.

        The claims enter the run's budgets and simulated time.
        """
        if not self.is_untrusted or job.device == SERVER or outcome.message is None:
            return outcome
        work, size = job.work, int(self.sizes[job.device])
        most_samples = work.steps * work.batch or ceil(max(work.epochs, 1) * size)
        bounds = {
            "samples": most_samples,
            "steps": most_samples,
            "macs_forward": net.macs_forward,
            "macs_work": MOST_PASSES * net.macs_forward * max(most_samples, size),
        }
        return replace(outcome, **{name: min(getattr(outcome, name), bound) for name, bound in bounds.items()})

    def make_link(self, round: Round, direction: str, device: int) -> wire.CodecLink:
        """The server's end of the link to a device, for codecs of this direction ("up" or "down")."""
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


def find_misshapen(values: Params, like: Params) -> str:
    """The first tensor that has another shape or type than it should; "" where none has."""
    return next((k for k, v in values.items() if v.shape != like[k].shape or v.dtype != like[k].dtype), "")
