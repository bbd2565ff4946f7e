"""The laws catch what they are there for: each planted fault is found, also in the few runs that `make test` makes."""

import os
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from shoal.core import exchange, extras
from shoal.core import round as round_module
from shoal.core.errors import ShoalError
from shoal.core.extras import Extra
from shoal.core.metric import Metric
from shoal.core.part import Neutral, Part
from shoal.core.task import Task
from shoal.engines.batched import engine, step
from shoal.engines.batched.inputs import StepInputs
from shoal.engines.batched.slot import DeviceSlot
from shoal.engines.batched.stack import DeviceStack
from shoal.engines.batched.step_draws import StepDraws
from shoal.engines.workers import fork_worker
from shoal.parts import find_shipped_parts
from shoal.parts.lib.reply_means import compute_mean_delta
from shoal.testing.extra_laws import check_reads_are_declared, check_survives_wrong_cards, check_survives_wrong_extras
from shoal.testing.laws import check_engines_agree, check_part, check_resumes_exactly, check_tells_what_it_declares

each_form = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.whole)])


@dataclass(frozen=True)
class Forgets(Part):
    """Its string does not make it again."""

    size: float = 1.0

    def __str__(self) -> str:
        return "forgets(size=2.0)"


@dataclass(frozen=True)
class Mutates(Part):
    def serve(self, params, state, round):
        params["a.bias"].add_(1)
        return params, state


@dataclass(frozen=True)
class Branches(Part):
    def objective(self, inner, local):
        def score(params, batch):
            scored = inner(params, batch)
            return scored if scored.loss > 0 else scored._replace(loss=scored.loss * 2)

        return score


@dataclass(frozen=True)
class CountsPadding(Part):
    """Uses the plain mean over a batch, which padding changes."""

    replaces_loss: ClassVar = True

    def objective(self, inner, local):
        def score(params, batch):
            scored = inner(params, batch)
            return scored._replace(loss=scored.logits.square().mean())

        return score


@dataclass(frozen=True)
class LossyCodec(Part):
    """Rounds, and says that it does not."""

    stage: ClassVar = "quantise"

    def encode(self, message, memory, link):
        return message.with_values(**{k: e["value"].half() for k, e in message.body.items()}), memory

    def decode(self, message, link):
        return message.with_values(**{k: e["value"].double() for k, e in message.body.items()})


@dataclass(frozen=True)
class NotNeutral(Part):
    neutral: ClassVar = Neutral({})

    def step(self, update, state, scored, local):
        return {k: u * 1.001 for k, u in update.items()}, state


@dataclass(frozen=True)
class KeepsSecrets(Part):
    """Keeps something that no checkpoint sees."""

    seen: ClassVar[list] = []

    def serve(self, params, state, round):
        self.seen.append(round.number)
        return {k: v + len(self.seen) * 1e-3 for k, v in params.items()}, state


@dataclass(frozen=True)
class HidesBytes(Part):
    """Sends more than the message says."""

    def measure(self, params, state, device):
        return {"wide": torch.zeros(1).expand(7)}


@dataclass(frozen=True)
class Bends(Part):
    def step(self, update, state, scored, local):
        return {k: u.sum() for k, u in update.items()}, state


@dataclass(frozen=True)
class TellsUndeclared(Part):
    def serve(self, params, state, round):
        round.tell("size", 1.0)
        return params, state


@dataclass(frozen=True)
class DeclaresInSilence(Part):
    metrics: ClassVar = (Metric("size", "size"),)


@dataclass(frozen=True)
class ListensToItself(Part):
    """Steers by what is in the row."""

    metrics: ClassVar = (Metric("size", "size"),)

    def serve(self, params, state, round):
        round.tell("size", 1.0)
        factor = 1 + len(round.telling.numbers)
        return {k: v * factor for k, v in params.items()}, state


@dataclass(frozen=True)
class GrowsState(Part):
    def step(self, update, state, scored, local):
        return update, state | {"new": scored.loss}


@dataclass(frozen=True)
class ReadsInSecret(Part):
    """Looks at how many samples each device has, and does not say so."""

    def weigh(self, weights, state, round):
        return weights * torch.tensor([r.size for r in round.replies]), state


@dataclass(frozen=True)
class ReadsUpdatesByTheWay(Part):
    """Takes a mean that looks at updates, inside a function of the package."""

    def serve(self, params, state, round):
        return params, {"mean": compute_mean_delta(round)}


@dataclass(frozen=True)
class AsksInSecret(Part):
    def select(self, devices, state, round):
        round.roster.fetch_cards(devices)
        return devices, state


@dataclass(frozen=True)
class ReadsNothing(Part):
    reads: ClassVar = frozenset({"outcomes"})


@dataclass(frozen=True)
class DeclaresWrong(Part):
    """Says that it sends a share, and sends a loss of any size."""

    def measure(self, params, state, device):
        return {"loss": torch.tensor(3.0)}

    def declare_extras(self, net, plan):
        return {"loss": Extra(low=0, high=1)}


@dataclass(frozen=True)
class AddsWrong(Part):
    """Adds more to the card than it says."""

    def enrol(self, card, samples, net):
        return card | {"first": samples.targets[samples.index[0]]}

    def declare_card(self, net):
        return {}

    def init_server(self, round):
        round.roster.fetch_cards([0])
        return {}


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (ReadsInSecret(), "reads sizes and does not declare"),
        (ReadsUpdatesByTheWay(), "reads updates and does not declare"),
        (AsksInSecret(), "reads cards and does not declare"),
        (DeclaresWrong(), "measure: it returns something else than `declare_extras` says: 'loss': it has numbers"),
        (AddsWrong(), "enrol: it adds something else than `declare_card` says: 'first' is none of its extras"),
        (Forgets(), "expression"),
        (Mutates(), "changes what it is given"),
        (Branches(), "branches"),
        (CountsPadding(), "padding"),
        (LossyCodec(), "further off"),
        (NotNeutral(), "not neutral"),
        (KeepsSecrets(), "on another engine"),
        (Bends(), "has shape"),
        (GrowsState(), "another form"),
        (TellsUndeclared(), "not among its `metrics`"),
        (DeclaresInSilence(), "declares declaresinsilence.size and does not tell it"),
        (ListensToItself(), "when nobody listens"),
    ],
    ids=lambda p: p.name() if isinstance(p, Part) else "",
)
@each_form
def test_a_planted_fault_is_found(part, found, whole):
    with pytest.raises((AssertionError, ShoalError), match=found):
        check_part(part, whole)


def test_a_read_that_never_happens_is_found():
    with pytest.raises(AssertionError, match="declares that it reads outcomes, and never does"):
        check_reads_are_declared(ReadsNothing(), ReadsNothing())


def let_any_extra_pass(patch):
    patch.setattr(exchange, "find_reply_fault", lambda *given: "")


def let_any_number_pass(patch):
    patch.setattr(extras, "is_within", lambda *given: True)


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (let_any_extra_pass, "scaffold"),
        (let_any_extra_pass, "fednova"),
        (let_any_number_pass, "scaffold"),
        (let_any_number_pass, "fedmp"),
    ],
)
def test_wrong_extras_that_pass_are_found(plant, name, monkeypatch):
    """They leave a trace, or they break the part where it uses them."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError, RuntimeError, TypeError)):
        check_survives_wrong_extras(find_shipped_parts()[name]())


def test_wrong_cards_that_pass_are_found(monkeypatch):
    monkeypatch.setattr(round_module, "find_card_fault", lambda *given: "")
    with pytest.raises((AssertionError, LookupError)):
        check_survives_wrong_cards(find_shipped_parts()["feddh"]())


def test_a_secret_is_also_missed_after_a_resume():
    with pytest.raises(AssertionError, match="after a resume"):
        check_resumes_exactly(KeepsSecrets())


@each_form
def test_expanded_tensors_count_as_what_would_travel(whole):
    check_part(HidesBytes(), whole)


def test_a_column_that_nobody_knows_is_found(monkeypatch):
    from shoal.core import round

    honest = round.compute_round_cost
    monkeypatch.setattr(round, "compute_round_cost", lambda *a: honest(*a) | {"elephants": 3})
    with pytest.raises(AssertionError, match="elephants is no metric that is known"):
        check_tells_what_it_declares(replace(NotNeutral()))


def test_a_wrong_ledger_is_found(monkeypatch):
    from shoal.core import round
    from shoal.testing.laws import check_bytes_are_what_travels

    honest = round.compute_round_cost
    boast = {"bytes_down": 1}
    monkeypatch.setattr(
        round, "compute_round_cost", lambda *a: (row := honest(*a)) | {k: row[k] + v for k, v in boast.items()}
    )
    with pytest.raises(AssertionError, match="ledger"):
        check_bytes_are_what_travels(replace(NotNeutral()))


# engines --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Busy(Part):
    """Draws in every step, keeps a state in the local run and a memory on the device, and trains with all of them."""

    def init_device(self, params):
        return {"last": {k: torch.zeros_like(p) for k, p in params.items()}}

    def begin(self, params, memory, device):
        return params, {"mean": {k: memory["last"][k] for k in device.net.trainable}}

    def draw(self, generator, device, step):
        return {"noise": torch.rand((), generator=generator, dtype=device.net.dtype)}

    def step(self, update, state, scored, local):
        mean = {k: 0.5 * state["mean"][k] + u * local.draws["noise"] for k, u in update.items()}
        return mean, {"mean": mean}

    def end(self, params, state, memory, device):
        return params, {"last": memory["last"] | state["mean"]}


def count_padding(patch):
    honest = StepInputs.build_table

    def table(self, first, last, even):
        rows, *rest = honest(self, first, last, even)
        return [rows, *rest] if even else [rows, torch.ones_like(rest[0]), *rest[1:]]

    patch.setattr(StepInputs, "build_table", table)


def move_idle_lanes(patch):
    patch.setattr(step, "gate_padded_step", lambda live, new, old: new)


def gate_parameters_alone(patch):
    honest = step.gate_padded_step
    patch.setattr(step, "gate_padded_step", lambda live, new, old: honest(live, new, old)._replace(states=new.states))


def swap_draws(patch):
    honest = StepDraws.stack_for_parts

    def swap(self, first, last):
        return [own.flip(1) for own in honest(self, first, last)]

    patch.setattr(StepDraws, "stack_for_parts", swap)


def swap_memories(patch):
    def swap(done):
        return [one._replace(memory=other.memory) for one, other in zip(done, done[::-1])]

    honest = engine.BatchedEngine.train
    patch.setattr(engine.BatchedEngine, "train", lambda self, tasks: swap(honest(self, tasks)))


def lose_last_chunk(patch):
    def lose(done):
        return done if len(done) > 1 else [one._replace(memory={}) for one in done]

    honest = engine.BatchedEngine.train_stack
    patch.setattr(engine.BatchedEngine, "train_stack", lambda self, *given: lose(honest(self, *given)))


def spoil_programs_of_one(patch):
    honest = DeviceStack.apply_memory_format
    patch.setattr(
        DeviceStack,
        "apply_memory_format",
        lambda self, tensor: honest(self, tensor) * (1 if tensor.dim() < 2 else 1.001),
    )


def count_too_much(patch):
    honest = vars(DeviceSlot)["macs"]
    patch.setattr(DeviceSlot, "macs", property(lambda self: honest.fget(self) + 1))


def forget_in_workers(patch):
    patch.setattr(fork_worker, "Task", lambda site, job, memory: Task(site, job, {}))


FAULTS = [
    count_padding,
    move_idle_lanes,
    gate_parameters_alone,
    swap_draws,
    swap_memories,
    lose_last_chunk,
    spoil_programs_of_one,
    count_too_much,
    forget_in_workers,
]


@each_form
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_an_engine_is_found(plant, whole, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="on another"):
        check_engines_agree(Busy(), whole)


@each_form
def test_without_a_fault_none_is_found(whole):
    check_engines_agree(Busy(), whole)


def test_the_few_runs_meet_padding_idle_lanes_chunks_and_workers_at_once(monkeypatch):
    seen, started = [], []

    class Watched(DeviceStack):
        def __init__(self, *given):
            super().__init__(*given)
            seen.append(self)

    fork = os.fork
    monkeypatch.setattr(engine, "DeviceStack", Watched)
    monkeypatch.setattr(os, "fork", lambda: started.append(fork()) or started[-1])
    check_engines_agree(Busy(), whole=False)
    wide = [stack for stack in seen if stack.width > 1]
    assert any(min(slot.batch_sizes) < stack.batch for stack in wide for slot in stack.slots)
    assert any(len({slot.steps for slot in stack.slots}) > 1 for stack in wide)
    assert len({stack.width for stack in seen}) > 1
    assert len(started) == 2
