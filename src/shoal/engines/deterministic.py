"""Operations that give the same bits every time. On a GPU many do not: threads add to one number in the order in which
they happen to come. Torch has slower forms of most of them, and refuses those that it has none for.
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
"""The variable from which cuBLAS takes its working memory, and the values with which its sums are always the same."""
FILL_MEMORY_FLAG = "fill_uninitialized_memory"
"""A property of torch's module, which type checkers do not know."""


def fix_cublas_workspace() -> None:
    """Before the first product on a GPU, since torch looks at the variable once; it harms nobody, and stays."""
    if os.environ.get(WORKSPACE_VARIABLE) not in FIXED_WORKSPACES:
        os.environ[WORKSPACE_VARIABLE] = FIXED_WORKSPACES[0]


def require_deterministic_algorithms() -> None:
    """From now on this process computes with such operations alone."""
    fix_cublas_workspace()
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    setattr(memory, FILL_MEMORY_FLAG, False)  # to fill new tensors costs time, and nobody reads them before writing


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Where it is wanted, compute with such operations alone in here, and as before afterwards."""
    if not wanted:
        yield
        return
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    convolving, filled = (cudnn.deterministic, cudnn.benchmark), getattr(memory, FILL_MEMORY_FLAG)
    require_deterministic_algorithms()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = convolving
        setattr(memory, FILL_MEMORY_FLAG, filled)


def explain_nondeterminism(error: BaseException) -> ShoalError | None:
    """What torch refuses because it has no such form of it, in a sentence; None for any other error."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if found := re.search(r"(\S+) does not have a deterministic implementation", text):
        problem = f"deterministic is true, and torch has no deterministic form of {found[1]}."
        return ShoalError("bad-value", problem, "Leave deterministic out, or use --compute cpu with one thread.")
    if WORKSPACE_VARIABLE in text:
        problem = "deterministic is true, and this process has multiplied on the GPU before in the other way."
        return ShoalError(
            "bad-value",
            problem,
            f"Start a new process, or set {WORKSPACE_VARIABLE}={FIXED_WORKSPACES[0]} before the first.",
        )
    return None
