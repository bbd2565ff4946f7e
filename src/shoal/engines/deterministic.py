"""Deterministic algorithms of torch: the same bits in every repetition.

On a GPU many operations give other bits each time, because threads add to one number in the order in which they come.
Torch has slower, deterministic forms of most of them, and raises for those that it has none for.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn
from torch.utils import deterministic as memory

from shoal.core.errors import ShoalError

WORKSPACE_VARIABLE, FIXED_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""The environment variable that sizes cuBLAS's workspaces, and the values with which its sums are deterministic."""
FILL_MEMORY_FLAG = "fill_uninitialized_memory"
"""A property of torch.utils.deterministic; type checkers do not know it, hence getattr and setattr."""


def fix_cublas_workspace() -> None:
    """Set the variable for cuBLAS. Torch reads it once, at the first product on a GPU, so it is never set back."""
    if os.environ.get(WORKSPACE_VARIABLE) not in FIXED_WORKSPACES:
        os.environ[WORKSPACE_VARIABLE] = FIXED_WORKSPACES[0]


def require_deterministic_algorithms() -> None:
    """Let this process use deterministic algorithms alone from now on."""
    fix_cublas_workspace()
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    setattr(memory, FILL_MEMORY_FLAG, False)  # to fill new tensors costs time, and nobody reads them before writing


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Where `wanted`, use deterministic algorithms alone inside, and restore all flags afterwards."""
    if not wanted:
        yield
        return
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn_flags, fills_memory = (cudnn.deterministic, cudnn.benchmark), getattr(memory, FILL_MEMORY_FLAG)
    require_deterministic_algorithms()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = cudnn_flags
        setattr(memory, FILL_MEMORY_FLAG, fills_memory)


def explain_nondeterminism(error: BaseException) -> ShoalError | None:
    """The error to show where torch has no deterministic form of an operation; None for any other exception."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if match := re.search(r"(\S+) does not have a deterministic implementation", text):
        problem = f"deterministic is true, and torch has no deterministic form of {match[1]}."
        return ShoalError("bad-value", problem, "Leave deterministic out, or use --compute cpu with one thread.")
    if WORKSPACE_VARIABLE in text:
        problem = "deterministic is true, and this process has multiplied on the GPU before in the other way."
        return ShoalError(
            "bad-value",
            problem,
            f"Start a new process, or set {WORKSPACE_VARIABLE}={FIXED_WORKSPACES[0]} before the first.",
        )
    return None
