"""Traced steps in the user's cache folder, found again by the next process that would trace the same.

A trace is found by a hash of all that it depends on: the sources of shoal, the versions of torch and Python, the
machine, the model, the parts and the optimiser with their code and settings, and the shapes of all tensors. Where
something cannot be told for certain, the step is traced. `SHOAL_PROGRAM_CACHE=off` turns all of this off.
"""

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from shoal.core.model import tree
from shoal.engines.batched.code_description import Indescribable, describe_values
from shoal.engines.batched.fx_trace import Trace, trace_function
from shoal.engines.batched.graph_json import decode_graph, encode_graph
from shoal.engines.batched.stack import DeviceStack
from shoal.engines.batched.trace_checks import refuse_other_numbers, refuse_unrepeatable_operations
from shoal.storage.cache_folder import find_cache_folder

log = logging.getLogger("shoal")
FORMAT = 1
"""Counted up when traces are written in another form."""
MOST_FILES = 400
"""Traces that are kept; those that were used longest ago are removed first."""


def read_process_start() -> float | None:
    """When this process began, in seconds since 1970; None where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


PROCESS_START = read_process_start()
"""Read when this is imported, so that forks have what their parent has: it is the parent's code that they run."""


def make_cached_trace(stack: DeviceStack, padded: bool) -> Trace:
    """`trace_function` for the step of a stack, which looks for the trace on disk first and leaves it there.

    A new trace on a processor is tried before it is used.
    """

    def find_or_trace(function: Callable[..., Any], example: Sequence[Tensor], fake: bool) -> fx.GraphModule | None:
        file = None if fake else find_trace_file(stack, padded, example)
        module = read_trace(file) if file else None
        if module is None:
            module = trace_function(function, example, fake)
            if module is not None and not fake and stack.place.type == "cpu":
                refuse_unrepeatable_operations(module.graph)
                refuse_other_numbers(module, function, example, stack)
            if file and module is not None:
                write_trace(file, module.graph)
        return module

    return find_or_trace


def find_trace_file(stack: DeviceStack, padded: bool, example: Sequence[Tensor]) -> Path | None:
    """Where the trace of this step is, or would be; None where it is not to be kept."""
    if os.environ.get("SHOAL_PROGRAM_CACHE") == "off" or not (sources := digest_shoal_sources()):
        return None
    try:
        text = describe_step(stack, padded, example)
    except Indescribable as reason:
        log.debug("a step is not kept: it depends on %s", reason)
        return None
    key = blake2b(
        "\n".join((sources, describe_torch_and_machine(stack.place), text)).encode(), digest_size=20
    ).hexdigest()
    return find_cache_folder() / "programs" / f"{key}.json"


def describe_step(stack: DeviceStack, padded: bool, example: Sequence[Tensor]) -> str:
    """All that the trace of a step depends on beside versions and machine."""
    setup, first = stack.setup, stack.slots[0]
    net = setup.net
    of_net = {f.name: getattr(net, f.name) for f in fields(net) if f.name not in ("example", "task")}
    of_task = (net.task.loss, net.task.mixes_batch, net.task.skips_padding, net.task.has_class_logits)
    more = (
        net.constants_digest,
        net.ties,
        net.trainable,
        net.head_name,
        tree.outline_tree(dict(net.frozen)),
        tree.outline_tree(net.example),
    )
    training = first.training
    structure = tree.outline_tree([training.state, first.fixed, first.first_draws])
    samples = tree.outline_tree(training.device.samples.inputs)
    tensors = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in example]
    form = (stack.width, stack.batch, padded, stack.channels_last, stack.hyperparams)
    rule = (setup.method.parts, setup.optimiser, setup.augment)
    return describe_values(rule, of_net, of_task, more, structure, samples, tensors, form)


def describe_torch_and_machine(place: torch.device) -> str:
    """Versions, hardware, and the settings of torch by which it chooses operations."""
    gpu = (torch.cuda.get_device_name(place), torch.cuda.get_device_capability(place)) if place.type == "cuda" else ()
    backends = torch.backends
    settings = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        backends.mkldnn.is_available() and backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
    )
    versions = (FORMAT, sys.version, torch.__version__, torch.version.git_version, torch.version.cuda)
    return repr((versions, platform.machine(), backends.cpu.get_cpu_capability(), gpu, settings))


@cache
def digest_shoal_sources() -> str:
    """A hash of shoal's own files; "" where this process may have loaded them as they were before a change."""
    return digest_sources(Path(__file__).parents[2], PROCESS_START) if PROCESS_START else ""


def digest_sources(root: Path, process_start: float) -> str:
    """A hash of all Python files in a folder; "" where one was changed after a process had begun."""
    digest = blake2b(digest_size=20)
    try:
        for file in sorted(root.rglob("*.py")):
            status = file.stat()
            if max(status.st_mtime, status.st_ctime) > process_start:
                return ""
            content = file.read_bytes()
            digest.update(f"{file.relative_to(root)} {len(content)}\n".encode() + content)
    except OSError:
        return ""
    return digest.hexdigest()


def read_trace(file: Path) -> fx.GraphModule | None:
    """The trace in a file; None where there is none, or none that is whole."""
    try:
        checksum, _, text = file.read_text(encoding="utf-8").partition("\n")
        if checksum != compute_checksum(file, text):
            return None
        module = decode_graph(text)
        os.utime(file)
        return module
    except (OSError, ValueError):
        return None


def write_trace(file: Path, graph: fx.Graph) -> None:
    """Keep a trace, as a whole or not at all; one that cannot be written, or not so, only costs another trace."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        text = encode_graph(graph)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_text(f"{compute_checksum(file, text)}\n{text}", encoding="utf-8")
        temporary.replace(file)
        remove_oldest_traces(file.parent)
    except ValueError as reason:
        log.debug("a step is not kept: %s", reason)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def compute_checksum(file: Path, text: str) -> str:
    """A hash of the text and of what it is kept under, so that neither can be that of another trace."""
    return blake2b(f"{file.name}\n{text}".encode(), digest_size=20).hexdigest()


def remove_oldest_traces(folder: Path) -> None:
    """Where there are too many traces, remove a quarter of them, those that were used longest ago."""
    files = list(folder.glob("*.json"))
    if len(files) > MOST_FILES:
        for file in sorted(files, key=lambda file: file.stat().st_mtime)[: len(files) // 4]:
            file.unlink(missing_ok=True)
