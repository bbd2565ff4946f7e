"""After the last local step on a device: end -> measure -> encode, which gives the outcome that is sent back."""

from dataclasses import dataclass

from shoal.core import wire
from shoal.core.local.device import (
    PERSONAL_KEY,
    SLOTS_KEY,
    LocalTraining,
    TrainingSetup,
    drop_requests,
    make_device_link,
)
from shoal.core.local.step import LocalState
from shoal.core.metric import list_part_metrics
from shoal.core.model import tree
from shoal.core.model.flops import count_macs, make_mask_key
from shoal.core.model.tree import Params, Tree
from shoal.core.phases import in_phase
from shoal.core.telling import TOLD, make_told_extras
from shoal.core.types import Outcome


@dataclass(frozen=True, eq=False)
class LocalResult:
    """What a device has after its last local step, before codecs: tensors to send, extras by part, new memory."""

    body: Params
    beside: dict[str, dict]
    memory: dict[str, Tree]
    macs: int
    """Multiply-accumulates of what ran before and after training."""


def finish_training(
    setup: TrainingSetup, training: LocalTraining, local_state: LocalState, loss: float, macs_train: int
) -> tuple[Outcome, dict[str, Tree]]:
    """end -> measure -> encode: the outcome and the device's new memory (the old one if the update is not finite)."""
    result = end_training(setup, training, local_state)
    return encode_result(setup, training, result, tree.is_tree_finite([result.body, result.beside]), loss, macs_train)


def end_training(setup: TrainingSetup, training: LocalTraining, local_state: LocalState) -> LocalResult:
    """end -> measure: the update (or the values) to send, what parts measured, and their memory."""
    net, method, job = setup.net, setup.method, training.job
    tensors = local_state.params | local_state.buffers
    params, memory, macs = {k: tensors[k] for k in training.context.anchor}, dict(training.memory), training.macs
    beside: dict[str, dict] = {}
    for part in method.parts:
        name, view = part.name(), training.device_for_part(part.name())
        state, results = local_state.states.get(name, {}), []
        key = (name, "end", len(view.samples), len(training.rows), make_mask_key(job.plan), frozenset(view.got))
        if part.acts_at("end"):
            macs += setup.tally.run_and_count(key, lambda: results.append(part.end(params, state, memory[name], view)))
            params, memory[name] = results[-1]
        if part.acts_at("measure"):
            measure = lambda: results.append(part.measure(params, state, view))  # noqa: E731
            # what is asked for now and then may take as long as the data make it: it is counted each time
            has_requests = len(drop_requests(view.got)) < len(view.got)
            macs += count_macs(measure) if has_requests else setup.tally.run_and_count((*key, "measure"), measure)
            if results[-1]:
                beside[name] = results[-1]
    if training.device.told:
        beside[TOLD] = make_told_extras(training.device.told, list_part_metrics(method))
    personal = net.names_with_role("personal")
    if personal:
        memory[PERSONAL_KEY] = {k: params[k] for k in personal}
    if method.keeps_slots:
        memory[SLOTS_KEY] = local_state.slots

    shared = net.names_with_role("shared")
    body = (
        params
        if method.carries == "values"
        else tree.subtract_params({k: params[k] for k in shared}, training.context.anchor)
    )
    return LocalResult(body, beside, memory, macs)


@in_phase("pack")
def encode_result(
    setup: TrainingSetup, training: LocalTraining, result: LocalResult, finite: bool, loss: float, macs_train: int
) -> tuple[Outcome, dict[str, Tree]]:
    """encode: the outcome with its message; without one, and with the old memory, where the update is not finite."""
    net, method, job = setup.net, setup.method, training.job
    forward = setup.tally.count_forward(net, job.plan)
    message, problem, memory = None, "its update is not finite", training.memory
    if finite:
        message, problem = (
            wire.pack_message(result.body, result.beside, job.plan, net.slicer, net.names_with_role("shared")),
            "",
        )
        codecs, memory = method.codecs_for("up"), result.memory
        if codecs:
            message, memory = wire.encode_message(message, codecs, memory, make_device_link(setup, job, "up"))
    outcome = Outcome(
        job.device,
        message,
        problem,
        steps=len(training.rows),
        samples=sum(training.rows.sizes),
        loss=loss,
        macs_forward=forward,
        macs_work=round((result.macs + macs_train) * forward / max(net.macs_forward, 1)),
        finite=finite,
    )
    return outcome, memory
