"""Many devices in one call: their steps are vectorised over devices, traced once, and run as a flat program."""

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.jit._fuser import optimized_execution

from shoal.core.errors import ShoalError, describe_error
from shoal.core.local.result import encode_result
from shoal.core.model import tree
from shoal.engines.base import Task, TaskResult
from shoal.engines.batched.cuda_graph import GraphReplay, is_out_of_memory, pick_graph_steps, record_graph
from shoal.engines.batched.graph import StepProgram, trace_step
from shoal.engines.batched.hyperparams import (
    Hyperparam,
    build_program_key,
    find_hyperparam_field,
    find_varying_hyperparams,
)
from shoal.engines.batched.slot import DeviceSlot
from shoal.engines.batched.stack import DeviceStack
from shoal.engines.batched.step import build_step
from shoal.engines.deterministic import explain_nondeterminism
from shoal.engines.serial import train_device

log = logging.getLogger("shoal")
StepsResult = tuple[list[Tensor], Tensor]
"""Where all lanes ended, and the sum of each one's losses."""


class BatchedEngine:
    """Sorts tasks into cohorts of at most `width` devices that fit into `budget` bytes, and trains each as one."""

    def __init__(self, width: int, budget: int = 0, compiled: bool = False):
        self.width, self.budget, self.compiled = width, budget, compiled
        self.programs: dict[tuple, StepProgram] = {}
        self.replays: dict[tuple, GraphReplay] = {}
        self.kinds: dict[tuple, int] = {}
        """Numbers for what sites have in common."""
        self.lanes: dict[tuple, int] = {}
        """The most devices of a form that fit side by side."""
        self.plain: set[tuple] = set()
        """Forms whose model does not take images with their channels last."""
        self.refused: set[tuple] = set()
        """Forms whose step cannot be vectorised at all."""
        self.conditions: set[tuple[type, str]] = set()
        """Fields of parts on which a step decides in Python (`if self.mu > 0`), so that they cannot be tensors."""
        self.pool = None

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        sites = {id(t.site): t.site for t in tasks}.values()
        knobs = [
            k
            for k in find_varying_hyperparams(sites)
            if not any(find_hyperparam_field(site, k) in self.conditions for site in sites)
        ]
        left = sorted(range(len(tasks)), key=lambda i: -estimate_steps(tasks[i]))
        done: dict[int, TaskResult] = {}
        while left:
            some = left[: self.width]
            try:
                done |= self.train_group({i: tasks[i] for i in some}, knobs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            else:
                left = left[self.width :]
                continue
            self.halve_width(len(some))
        return [done[i] for i in range(len(tasks))]

    def train_group(self, tasks: dict[int, Task], knobs: Sequence[Hyperparam]) -> dict[int, TaskResult]:
        """Those that can stand side by side do; where the step cannot be vectorised, one after the other."""
        members = {i: DeviceSlot(task) for i, task in tasks.items()}
        sites = {id(m.site): m.site for m in members.values()}
        kinds = {
            at: self.kinds.setdefault(build_program_key(site, knobs), len(self.kinds)) for at, site in sites.items()
        }
        forms: dict[tuple, list[int]] = {}
        for i, member in members.items():
            forms.setdefault(member.build_sharing_key(kinds[id(member.site)]), []).append(i)
        done: dict[int, TaskResult] = {}
        for form, own in forms.items():
            try:
                alone_anyway = form in self.refused or len(own) == 1
                limit = 1 if alone_anyway else self.compute_stack_limit(form, members[own[0]], knobs)
                for first in range(0, len(own), limit):
                    group = own[first : first + limit]
                    done |= zip(group, self.train_stack(form, [members[i] for i in group], knobs))
            except NotVectorisable as error:
                again = {i: tasks[i] for i in own}
                fixed = self.find_branching_hyperparams(form, members[own[0]], knobs)
                if fixed:
                    done |= self.train_group(again, [knob for knob in knobs if knob not in fixed])
                    continue
                if form not in self.plain:
                    self.plain.add(form)
                    done |= self.train_group(again, knobs)
                    continue
                log.warning("%s; those devices are trained one after the other.", error)
                self.refused.add(form)
                done |= {i: train_device(task) for i, task in again.items()}
        return done

    def train_stack(self, form: tuple, members: list[DeviceSlot], knobs: Sequence[Hyperparam]) -> list[TaskResult]:
        """One cohort from start to end."""
        if form in self.refused:
            return [train_device(m.task) for m in members]
        batch = max(max(m.batch_sizes) for m in members)
        on_gpu = members[0].site.net.place.type == "cuda"
        width = round_up_width(len(members), self.width) if on_gpu else len(members)
        cohort = DeviceStack(members, knobs, width, batch, form not in self.plain)
        with torch.no_grad(), optimized_execution(False):
            carried, losses = self.replay_graphs(form, cohort) if on_gpu else self.run_steps(form, cohort)
        endings, finite = cohort.collect_results(carried)
        ends = zip(members, endings, finite, losses.tolist() if losses.dim() else [float(losses)])
        return [
            TaskResult(*encode_result(m.site, m.visit, e, sound, loss / m.steps, m.macs)) for m, e, sound, loss in ends
        ]

    def run_steps(self, form: tuple, cohort: DeviceStack) -> StepsResult:
        """Step by step."""
        carried, fixed, total = cohort.stack_initial_states(), {}, None
        programs: dict[bool, StepProgram] = {}
        for padded, own in cohort.frames.iterate_steps():
            frame = [*cohort.data, *own]
            if padded not in programs:
                program = self.get_program(form, cohort, padded, lambda: (carried, cohort.stack_constants(), frame))
                programs[padded], fixed[padded] = program, cohort.stack_constants(program.reads)
            carried, loss = programs[padded](*carried, *fixed[padded], *frame)
            total = loss if total is None else total + loss
        assert total is not None
        return carried, total

    def replay_graphs(self, form: tuple, cohort: DeviceStack) -> StepsResult:
        """By recorded graphs, as many steps at a time as a graph has."""
        carried, frames, replay = cohort.stack_initial_states(), cohort.frames, None
        steps = pick_graph_steps(frames.steps, bool(frames.full.all()))
        for segment in frames.iterate_segments(steps):
            if replay is None:
                key = (form, cohort.width, cohort.batch, segment.padded, steps)
                frame = [*cohort.data, *segment.get_step(0)]
                program = self.get_program(
                    form, cohort, segment.padded, lambda: (carried, cohort.stack_constants(), frame)
                )
                fixed = cohort.stack_constants(program.reads)
                if key not in self.replays:
                    self.pool = self.pool or torch.cuda.graph_pool_handle()
                    given = (carried, fixed, cohort.data, segment.tensors, self.pool)
                    self.replays[key] = record_graph(program, *given)
                replay = self.replays[key]
                replay.load_stack(carried, fixed)
            replay.replay_steps(segment.tensors)
        assert replay is not None
        return [t.clone() for t in replay.carried], replay.losses.clone()

    def get_program(self, form: tuple, cohort: DeviceStack, padded: bool, example: Callable[[], tuple]) -> StepProgram:
        """The program for cohorts like this one, traced when first asked for; on a GPU compiled as well."""
        key = (form, cohort.width, cohort.batch, padded)
        if key not in self.programs:
            on_gpu = cohort.place.type == "cuda"
            with raise_not_vectorisable(cohort):
                found = trace_step(build_step(cohort, padded), *example(), in_place=not on_gpu)
            if on_gpu and self.compiled:
                found = replace(found, call=torch.compile(found.module, dynamic=False))
            self.programs[key] = found
        return self.programs[key]

    def compute_stack_limit(self, form: tuple, member: DeviceSlot, knobs: Sequence[Hyperparam]) -> int:
        """How many devices of a form fit side by side, judged by what a step of one of them holds at its peak."""
        if form not in self.lanes:
            held = self.estimate_device_bytes(form, member, knobs)
            self.lanes[form] = max(1, (self.budget or get_memory_budget(member.site.net.place)) // held)
        return self.lanes[form]

    def estimate_device_bytes(self, form: tuple, member: DeviceSlot, knobs: Sequence[Hyperparam]) -> int:
        """Bytes that a device alone holds at the peak of a step; nothing is computed for it."""
        cohort = DeviceStack([DeviceSlot(member.task)], knobs, 1, max(member.batch_sizes), form not in self.plain)
        carried, fixed, (padded, own) = (
            cohort.stack_initial_states(),
            cohort.stack_constants(),
            next(cohort.frames.iterate_steps()),
        )
        frame = [*cohort.data, *own]
        with raise_not_vectorisable(cohort):
            step = trace_step(build_step(cohort, padded), carried, fixed, frame, in_place=False, fake=True)
        return step.peak + 3 * tree.count_tree_bytes([carried, fixed])

    def find_branching_hyperparams(
        self, form: tuple, member: DeviceSlot, knobs: Sequence[Hyperparam]
    ) -> list[Hyperparam]:
        """The numbers that keep a step from being vectorised, because it needs one value of them at a time."""

        def is_vectorisable(some: Sequence[Hyperparam]) -> bool:
            try:
                return self.estimate_device_bytes(form, member, some) > 0
            except NotVectorisable:
                return False

        if not knobs or not is_vectorisable([]):
            return []
        found = [knob for knob in knobs if not is_vectorisable([knob])] or list(knobs)
        for kind, name in (find_hyperparam_field(member.site, knob) for knob in found):
            self.conditions.add((kind, name))
            log.warning(
                "%s decides on the value of %s (as in `if self.%s > 0`), so runs with different values of it train in "
                "calls of their own; with torch.where they could share one.",
                kind.__name__.lower(),
                name,
                name,
            )
        return found

    def halve_width(self, width: int) -> None:
        """What was tried did not fit."""
        self.close()
        gc.collect()
        torch.cuda.empty_cache()
        if width == 1:
            problem = "One device alone does not fit into the memory of the compute device."
            raise ShoalError("no-device", problem, "Use a smaller model or batch, or --compute cpu.")
        self.width = width // 2
        log.warning("%d devices at once do not fit into memory; from now on %d.", width, self.width)

    def close(self) -> None:
        self.programs.clear()
        self.replays.clear()
        self.pool = None


class NotVectorisable(Exception):
    """A step that cannot be vectorised."""


@contextmanager
def raise_not_vectorisable(cohort: DeviceStack) -> Iterator[None]:
    """Whatever goes wrong inside means that the step of this cohort cannot be vectorised."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ShoalError) or is_out_of_memory(error) or explain_nondeterminism(error):
            raise
        name = cohort.site.kind.partition(" ")[0] or "this model"
        raise NotVectorisable(f"A step of {name} cannot be vectorised ({describe_error(error)})") from error


def estimate_steps(task: Task) -> float:
    """About how many steps a task will take, before it is looked at closely."""
    work = task.job.work
    return work.steps or work.epochs * len(task.site.samples(task.job.device)) / work.batch


def round_up_width(count: int, width: int) -> int:
    """A width for so many devices: the full one, or a quarter, half or three quarters of it, so that few are met."""
    quarters = [-(-width * n // 4) for n in (1, 2, 3, 4)]
    return next((n for n in quarters if n >= count), count)


def get_memory_budget(place: torch.device) -> int:
    """Bytes that cohorts may take."""
    if place.type == "cuda":
        return int(0.7 * torch.cuda.mem_get_info(place)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
