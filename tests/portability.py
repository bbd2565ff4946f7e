"""What of the tests needs a POSIX system, and `--portable`, which runs the others as a bare system would.

With `--portable` there is no `os.fork`, no `fcntl`, no `resource`, no Ray and no Flower, whatever the system has, so
that Linux shows what macOS and Windows would. Tests with the mark `posix` are left out then, and files that cannot be
imported without those modules are not opened.
"""

import os
import sys

import pytest

HIDDEN_MODULES = ("fcntl", "resource", "ray", "flwr")

POSIX_FILES = {
    "distributed": "Ray clusters and Flower's programs",
    "engines/test_fork_workers.py": "worker processes are forks, their files are looked up in /proc",
    "engines/test_threads.py": "counts the threads of worker processes",
    "runs/test_kill.py": "kills forks of a fork server, sends signals",
    "runs/test_store.py": "fills disks by `resource` and `mount`",
    "runs/test_golden.py": "compares bits with those that another processor computed",
    "service": "programs of Flower under a supervisor that sends signals",
    "storage/test_power_cut.py": "replays what a POSIX file system may lose",
    "docs": "runs the shell blocks of the pages",
    "reproduce": "runs for minutes what the other folders have tried",
    "testing": "runs for minutes what the other folders have tried; the law of engines forks",
}
"""Files and folders of `tests/` that are left out, and why."""
POSIX_TESTS = {
    "compare/test_parallel.py::test_a_process_that_dies_does_not_take_the_others_work_with_it": "kills a process",
    "compare/test_parallel.py::test_processes_that_nobody_listens_to_any_more_end_by_themselves": "reads exit signals",
    "compare/test_parallel.py::test_processes_that_have_not_begun_end_at_once_and_in_silence": "reads exit signals",
    "engines/test_engines.py::test_resume_is_bit_for_bit_on_every_engine": "runs on the engine `pool`",
    "parts/test_curvature.py::test_processes_measure_models_with_attention": "runs on the engine `pool`",
    "runs/test_profile.py::test_a_trace_ends_where_worker_processes_begin": "runs on the engine `pool`",
    "runs/test_engine_trial.py::test_threads_that_were_asked_for_are_in_every_trial": "looks for the engine `pool`",
}
"""Single tests that are left out, and why."""
FORKING_ENGINES = ("pool", "ray")
"""A test with one of these among its parameters needs a system that forks."""


def hide_posix() -> None:
    """Take from this process what macOS or Windows may lack."""
    if hasattr(os, "fork"):
        del os.fork
    for name in HIDDEN_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]


def is_posix_file(path: str) -> bool:
    """Whether a path below `tests/`, written with slashes, is one of the files and folders above."""
    return any(path == entry or path.startswith(f"{entry}/") for entry in POSIX_FILES)


def needs_posix(item: pytest.Item, path: str) -> bool:
    """Whether a test, in a file below `tests/`, needs a POSIX system."""
    name = getattr(item, "originalname", item.name)
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    return (
        is_posix_file(path)
        or f"{path}::{name}" in POSIX_TESTS
        or any(isinstance(value, str) and value in FORKING_ENGINES for value in values)
    )
