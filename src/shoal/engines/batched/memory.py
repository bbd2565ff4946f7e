"""How much memory a device needs in a stack, and whether its step can be vectorised at all: by tracing one step."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx

from shoal.core.errors import ShoalError, describe_error
from shoal.core.model import tree
from shoal.engines.batched.cuda_graph import is_out_of_memory
from shoal.engines.batched.gpu_conv import count_patch_bytes
from shoal.engines.batched.graph import trace_step
from shoal.engines.batched.hyperparams import Hyperparam
from shoal.engines.batched.slot import DeviceSlot
from shoal.engines.batched.stack import DeviceStack
from shoal.engines.batched.step import build_step
from shoal.engines.deterministic import explain_nondeterminism


def estimate_device_bytes(slot: DeviceSlot, hyperparams: Sequence[Hyperparam], channels_last: bool) -> int:
    """Bytes that one device holds at the peak of a step, from a trace with fake tensors; on a GPU with all patches."""
    stack = DeviceStack([DeviceSlot(slot.task, slot.pads_extras)], hyperparams, 1, max(slot.batch_sizes), channels_last)
    padded, step_tensors = next(stack.step_inputs.iterate_steps())
    state, constants, inputs = stack.stack_initial_states(), stack.stack_constants(), [*stack.data, *step_tensors]
    with raise_not_vectorisable(stack):
        step = trace_step(build_step(stack, padded), state, constants, inputs, in_place=False, fake=True)
    patches = (
        count_patch_bytes(step.module.graph)
        if stack.place.type == "cuda" and isinstance(step.module, fx.GraphModule)
        else 0
    )
    return step.peak + patches + 3 * tree.count_tree_bytes([state, constants])


def get_memory_budget(device: torch.device) -> int:
    """Bytes that the devices of one stack may take: 70 % of a GPU's free memory, or half of the free RAM."""
    if device.type == "cuda":
        return int(0.7 * torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class NotVectorisable(Exception):
    """A step that cannot be vectorised."""


@contextmanager
def raise_not_vectorisable(stack: DeviceStack) -> Iterator[None]:
    """Turn an exception inside into NotVectorisable, unless it is about memory or deterministic algorithms."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ShoalError) or is_out_of_memory(error) or explain_nondeterminism(error):
            raise
        name = stack.setup.kind.partition(" ")[0] or "this model"
        raise NotVectorisable(f"A step of {name} cannot be vectorised ({describe_error(error)})") from error
