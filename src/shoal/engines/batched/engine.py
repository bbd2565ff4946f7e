"""The engine `batched`: many devices in one call.

A local step is vectorised over devices (`torch.vmap`), traced once (`make_fx`), and run as a flat program; on a GPU
several steps are replayed as one CUDA graph.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.local.result import encode_result
from shoal.core.model import tree
from shoal.core.task import Task, TaskResult, estimate_steps
from shoal.engines.batched.compile_cache import keep_compiled_code
from shoal.engines.batched.cuda_graph import GraphReplay, is_out_of_memory, pick_graph_steps, record_graph
from shoal.engines.batched.fx_trace import trace_function
from shoal.engines.batched.graph import StepProgram, trace_step
from shoal.engines.batched.hyperparams import (
    Hyperparam,
    build_program_key,
    find_hyperparam_field,
    find_varying_hyperparams,
)
from shoal.engines.batched.inputs import InputSegment
from shoal.engines.batched.memory import (
    NotVectorisable,
    estimate_device_bytes,
    get_memory_budget,
    raise_not_vectorisable,
)
from shoal.engines.batched.padding_check import LeavesPaddingTrace, refuse_padding_trace
from shoal.engines.batched.slot import DeviceSlot
from shoal.engines.batched.stack import DeviceStack
from shoal.engines.batched.stages import WORTHWHILE_MACS, Stage, plan_stages
from shoal.engines.batched.step import build_step
from shoal.engines.batched.torchscript import optimized_execution
from shoal.engines.batched.trace_cache import make_cached_trace
from shoal.engines.serial import train_device

log = logging.getLogger("shoal")
PATCH_FACTOR = 10
"""How many times what a step makes it may make where convolutions are products, of filters with 3 x 3 taps."""
StepsResult = tuple[list[Tensor], Tensor]
"""The stacked tensors of all devices after their last step, and the sum of each device's losses."""


class BatchedEngine:
    """Trains stacks of at most `width` devices that fit into `budget` bytes of memory (0: as much as is free).

    On a GPU programs may be `compiled`; on a processor some operations may be computed by `native` kernels. Stacks
    whose forward pass takes `narrowing_macs` multiply-accumulates become narrower when half of their devices are done.
    """

    def __init__(
        self,
        width: int,
        budget: int = 0,
        compiled: bool = False,
        native: bool = False,
        narrowing_macs: float = WORTHWHILE_MACS,
    ):
        self.width, self.budget, self.compiled, self.native = width, budget, compiled, native
        self.narrowing_macs = narrowing_macs
        self.programs: dict[tuple, StepProgram] = {}
        self.replays: dict[tuple, GraphReplay] = {}
        self.program_numbers: dict[tuple, int] = {}
        """By what training setups must have in common to share programs, a short number for it."""
        self.stack_limits: dict[tuple, int] = {}
        """By sharing key, how many devices fit into memory at once."""
        self.channels_first: set[tuple] = set()
        """Sharing keys of models whose step cannot be traced with images in the channels-last format."""
        self.unvectorisable: set[tuple] = set()
        """Sharing keys whose step cannot be vectorised at all: such devices are trained one after the other."""
        self.branching_fields: set[tuple[type, str]] = set()
        """Fields of parts on which a step branches in Python (`if self.mu > 0`), so that they cannot be tensors."""
        self.graph_pool = None

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        setups = {id(t.setup): t.setup for t in tasks}.values()
        hyperparams = [
            hyperparam
            for hyperparam in find_varying_hyperparams(setups)
            if not any(find_hyperparam_field(setup, hyperparam) in self.branching_fields for setup in setups)
        ]
        remaining = sorted(range(len(tasks)), key=lambda i: -estimate_steps(tasks[i]))
        results: dict[int, TaskResult] = {}
        while remaining:
            indices = remaining[: self.width]
            try:
                results |= self.train_group({i: tasks[i] for i in indices}, hyperparams)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            else:
                remaining = remaining[self.width :]
                continue
            self.halve_width(len(indices))
        return [results[i] for i in range(len(tasks))]

    def train_group(self, tasks: dict[int, Task], hyperparams: Sequence[Hyperparam]) -> dict[int, TaskResult]:
        """The results by task number; devices with one sharing key are stacked where their step can be vectorised.

        Where it cannot, it is tried again with the hyperparameters on which it branches as plain numbers, then with
        images in the ordinary memory format, and at last one device after the other.
        """
        slots = {i: DeviceSlot(task, pads_extras=len(tasks) > 1) for i, task in tasks.items()}
        setups = {id(slot.setup): slot.setup for slot in slots.values()}
        numbers = {
            setup_id: self.program_numbers.setdefault(build_program_key(setup, hyperparams), len(self.program_numbers))
            for setup_id, setup in setups.items()
        }
        groups: dict[tuple, list[int]] = {}
        known_keys: dict[tuple, tuple] = {}
        for i, slot in slots.items():
            origin = slot.identify_origin()
            if origin not in known_keys:
                known_keys[origin] = slot.build_sharing_key(numbers[id(slot.setup)])
            groups.setdefault(known_keys[origin], []).append(i)
        results: dict[int, TaskResult] = {}
        for sharing_key, indices in groups.items():
            indices.sort(key=lambda i: -slots[i].steps)
            try:
                trains_alone = sharing_key in self.unvectorisable or len(indices) == 1
                limit = 1 if trains_alone else self.compute_stack_limit(sharing_key, slots[indices[0]], hyperparams)
                for first in range(0, len(indices), limit):
                    group = indices[first : first + limit]
                    results |= zip(group, self.train_stack(sharing_key, [slots[i] for i in group], hyperparams))
            except NotVectorisable as error:
                same_tasks = {i: tasks[i] for i in indices}
                is_final = isinstance(error.__cause__, LeavesPaddingTrace)  # which no other trace would help
                branching = (
                    [] if is_final else self.find_branching_hyperparams(sharing_key, slots[indices[0]], hyperparams)
                )
                if branching:
                    results |= self.train_group(
                        same_tasks, [hyperparam for hyperparam in hyperparams if hyperparam not in branching]
                    )
                    continue
                if sharing_key not in self.channels_first and not is_final:
                    self.channels_first.add(sharing_key)
                    results |= self.train_group(same_tasks, hyperparams)
                    continue
                log.warning("%s; those devices are trained one after the other.", error)
                self.unvectorisable.add(sharing_key)
                results |= {i: train_device(task) for i, task in same_tasks.items()}
        return results

    def train_stack(
        self, sharing_key: tuple, slots: list[DeviceSlot], hyperparams: Sequence[Hyperparam]
    ) -> list[TaskResult]:
        """The results of one stack of devices."""
        if sharing_key in self.unvectorisable:
            return [train_device(slot.task) for slot in slots]
        batch = max(max(slot.batch_sizes) for slot in slots)
        on_gpu = slots[0].setup.net.place.type == "cuda"
        width = round_up_width(len(slots), self.width) if on_gpu else len(slots)
        stack = DeviceStack(slots, hyperparams, width, batch, sharing_key not in self.channels_first)
        with torch.set_grad_enabled(stack.uses_autograd), optimized_execution(False):
            state, losses = self.run_stages(sharing_key, stack)
        local_results, finite = stack.collect_results(state)
        rows = zip(slots, local_results, finite, losses.tolist())
        return [
            TaskResult(*encode_result(slot.setup, slot.training, local_result, is_finite, loss / slot.steps, slot.macs))
            for slot, local_result, is_finite, loss in rows
        ]

    def run_stages(self, sharing_key: tuple, stack: DeviceStack) -> StepsResult:
        """Run all local steps of a stack, the first of them at its full width; devices that are done make room."""
        inputs, on_gpu = stack.step_inputs, stack.place.type == "cuda"
        steps = pick_graph_steps(inputs.steps, inputs.is_even) if on_gpu else 1
        is_padded = not inputs.is_even or inputs.steps % steps > 0

        def run_stage(stage: Stage, own: DeviceStack, begun: list[Tensor]) -> StepsResult:
            if not on_gpu:
                return self.run_steps(sharing_key, own, stage, begun)
            segments = own.step_inputs.iterate_segments(steps, stage.first, stage.last, is_padded)
            return self.replay_graphs(sharing_key, own, segments, begun)

        whole, *narrower = plan_stages(stack, self.width, steps, self.narrowing_macs)
        state, losses = run_stage(whole, stack, stack.stack_initial_states())
        losses = losses.reshape(-1)
        for stage in narrower:
            own, count = stack.take_first(stage.count, stage.width), stage.count
            ended, loss_sum = run_stage(stage, own, [t[: stage.width] for t in state])
            state = [replace_first_rows(t, new[:count]) for t, new in zip(state, ended, strict=True)]
            losses = replace_first_rows(losses, losses[:count] + loss_sum[:count])
        return state, losses

    def run_steps(self, sharing_key: tuple, stack: DeviceStack, stage: Stage, state: list[Tensor]) -> StepsResult:
        """Run a stage step by step; full and padded steps have a program each."""
        constants, loss_sum = {}, None
        programs: dict[bool, StepProgram] = {}
        for padded, step_tensors in stack.step_inputs.iterate_steps(stage.first, stage.last):
            inputs = [*stack.data, *step_tensors]
            if padded not in programs:
                program = self.get_program(sharing_key, stack, padded, lambda: (state, stack.stack_constants(), inputs))
                programs[padded], constants[padded] = program, stack.stack_constants(program.reads)
            state, loss = programs[padded](*state, *constants[padded], *inputs)
            loss_sum = loss if loss_sum is None else loss_sum + loss
        assert loss_sum is not None
        return state, loss_sum

    def replay_graphs(
        self, sharing_key: tuple, stack: DeviceStack, segments: Iterable[InputSegment], state: list[Tensor]
    ) -> StepsResult:
        """Run segments of steps by a CUDA graph that replays one of them, recorded at the first call."""
        replay = None
        for segment in segments:
            if replay is None:
                key = (sharing_key, stack.width, stack.batch, segment.padded, len(segment.tensors[0]))
                inputs = [*stack.data, *segment.get_step(0)]
                program = self.get_program(
                    sharing_key, stack, segment.padded, lambda: (state, stack.stack_constants(), inputs)
                )
                constants = stack.stack_constants(program.reads)
                if key not in self.replays:
                    self.graph_pool = self.graph_pool or torch.cuda.graph_pool_handle()
                    buffers = (state, constants, stack.data, segment.tensors, self.graph_pool)
                    self.replays[key] = record_graph(program, *buffers)
                replay = self.replays[key]
                replay.load_stack(state, constants)
            replay.replay_steps(segment.tensors)
        assert replay is not None
        return [t.clone() for t in replay.carried], replay.losses.clone()

    def get_program(
        self, sharing_key: tuple, stack: DeviceStack, padded: bool, example: Callable[[], tuple]
    ) -> StepProgram:
        """The program for stacks like this one, traced from an example at the first call; on a GPU compiled as well."""
        key = (sharing_key, stack.width, stack.batch, padded)
        if key not in self.programs:
            on_gpu = stack.place.type == "cuda"
            if self.compiled:
                keep_compiled_code()
            with raise_not_vectorisable(stack):
                if padded:
                    refuse_padding_trace(stack)
                trace = trace_function if self.compiled else make_cached_trace(stack, padded)
                program = trace_step(
                    build_step(stack, padded),
                    *example(),
                    in_place=not on_gpu,
                    native=self.native,
                    trace=trace,
                    width=stack.width,
                )
            if on_gpu and self.compiled:
                program = replace(program, call=torch.compile(program.module, dynamic=False))
            self.programs[key] = program
        return self.programs[key]

    def compute_stack_limit(self, sharing_key: tuple, slot: DeviceSlot, hyperparams: Sequence[Hyperparam]) -> int:
        """How many devices with this sharing key fit into memory, judged by the peak memory of one device's step.

        Where the widest stack would fit even if nothing that a step makes were freed, no step is traced to see it.
        """
        if sharing_key not in self.stack_limits:
            net, bound = slot.setup.net, slot.bound_peak_bytes()
            shared = tree.count_tree_bytes(net.frozen)  # one copy for all devices; free memory is without it already
            budget = max(1, self.budget - shared) if self.budget else get_memory_budget(net.place)
            most = bound * self.width * (PATCH_FACTOR if net.place.type == "cuda" else 1)
            fits = 0 < most <= budget
            self.stack_limits[sharing_key] = (
                self.width if fits else max(1, budget // self.estimate_bytes(sharing_key, slot, hyperparams))
            )
        return self.stack_limits[sharing_key]

    def estimate_bytes(self, sharing_key: tuple, slot: DeviceSlot, hyperparams: Sequence[Hyperparam]) -> int:
        return estimate_device_bytes(slot, hyperparams, channels_last=sharing_key not in self.channels_first)

    def find_branching_hyperparams(
        self, sharing_key: tuple, slot: DeviceSlot, hyperparams: Sequence[Hyperparam]
    ) -> list[Hyperparam]:
        """The hyperparameters that keep a step from being vectorised, because it branches on their values."""

        def is_vectorisable(subset: Sequence[Hyperparam]) -> bool:
            try:
                return self.estimate_bytes(sharing_key, slot, subset) > 0
            except NotVectorisable:
                return False

        if not hyperparams or not is_vectorisable([]):
            return []
        branching = [hyperparam for hyperparam in hyperparams if not is_vectorisable([hyperparam])] or list(hyperparams)
        for kind, name in (find_hyperparam_field(slot.setup, hyperparam) for hyperparam in branching):
            self.branching_fields.add((kind, name))
            log.warning(
                "%s decides on the value of %s (as in `if self.%s > 0`), so runs with different values of it train in "
                "calls of their own; with torch.where they could share one.",
                kind.__name__.lower(),
                name,
                name,
            )
        return branching

    def halve_width(self, width: int) -> None:
        """Free all memory and train half as many devices at once from now on; raise where one alone did not fit."""
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
        self.graph_pool = None


def replace_first_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """The tensor with other first rows, as a new one: what a program carries on may be views of one tensor."""
    return torch.cat((rows, tensor[len(rows) :]))


def round_up_width(count: int, width: int) -> int:
    """The smallest quarter of `width` that holds so many devices: few different widths mean few programs to trace."""
    quarters = [-(-width * n // 4) for n in (1, 2, 3, 4)]
    return next((n for n in quarters if n >= count), count)
