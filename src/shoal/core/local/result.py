"""After the last local step on a device: end -> measure -> encode, which gives the outcome that is sent back."""

from dataclasses import dataclass

from shoal.core import wire
from shoal.core.local.device import PERSONAL_KEY, LocalTraining, TrainingSetup, drop_requests, make_device_link
from shoal.core.local.step import LocalState
from shoal.core.model import tree
from shoal.core.model.flops import count_macs, make_mask_key
from shoal.core.model.tree import Params, Tree
from shoal.core.types import Outcome


@dataclass(frozen=True, eq=False)
class LocalResult:
    """A device after its last step, before anything is encoded."""

    body: Params
    beside: dict[str, dict]
    memory: dict[str, Tree]
    macs: int
    """Multiply-accumulates of what ran before and after training."""


def finish_training(
    site: TrainingSetup, visit: LocalTraining, course: LocalState, loss: float, macs_train: int
) -> tuple[Outcome, dict[str, Tree]]:
    """end -> measure -> encode; the outcome, and the device's memory after it (the old one if all was in vain)."""
    ending = end_training(site, visit, course)
    return encode_result(site, visit, ending, tree.is_tree_finite([ending.body, ending.beside]), loss, macs_train)


def end_training(site: TrainingSetup, visit: LocalTraining, course: LocalState) -> LocalResult:
    """end -> measure."""
    net, method, job = site.net, site.method, visit.job
    trained = course.params | course.buffers
    params, memory, macs = {k: trained[k] for k in visit.context.anchor}, dict(visit.memory), visit.macs
    beside: dict[str, dict] = {}
    for part in method.parts:
        name, own = part.name(), visit.device_for_part(part.name())
        state, made = course.states.get(name, {}), []
        key = (name, "end", len(own.samples), len(visit.rows), make_mask_key(job.plan), frozenset(own.got))
        if part.acts_at("end"):
            macs += site.tally.run_and_count(key, lambda: made.append(part.end(params, state, memory[name], own)))
            params, memory[name] = made[-1]
        if part.acts_at("measure"):
            measure = lambda: made.append(part.measure(params, state, own))  # noqa: E731
            # how long it takes to find what is asked for now and then may depend on the data: it is counted each time
            asked = len(drop_requests(own.got)) < len(own.got)
            macs += count_macs(measure) if asked else site.tally.run_and_count((*key, "measure"), measure)
            if made[-1]:
                beside[name] = made[-1]
    personal = net.names_with_role("personal")
    if personal:
        memory[PERSONAL_KEY] = {k: params[k] for k in personal}

    shared = net.names_with_role("shared")
    body = (
        params
        if method.carries == "values"
        else tree.subtract_params({k: params[k] for k in shared}, visit.context.anchor)
    )
    return LocalResult(body, beside, memory, macs)


def encode_result(
    site: TrainingSetup, visit: LocalTraining, ending: LocalResult, finite: bool, loss: float, macs_train: int
) -> tuple[Outcome, dict[str, Tree]]:
    """encode, where there is anything worth sending."""
    net, method, job = site.net, site.method, visit.job
    forward = site.tally.count_forward(net, job.plan)
    message, problem, memory = None, "its update is not finite", visit.memory
    if finite:
        message, problem = (
            wire.pack_message(ending.body, ending.beside, job.plan, net.slicer, net.names_with_role("shared")),
            "",
        )
        codecs, memory = method.codecs_for("up"), ending.memory
        if codecs:
            message, memory = wire.encode_message(message, codecs, memory, make_device_link(site, job, "up"))
    outcome = Outcome(
        job.device,
        message,
        problem,
        steps=len(visit.rows),
        samples=sum(visit.rows.sizes),
        loss=loss,
        macs_forward=forward,
        macs_work=round((ending.macs + macs_train) * forward / max(net.macs_forward, 1)),
        finite=finite,
    )
    return outcome, memory
