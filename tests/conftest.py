"""One thread per test process, so that two of them share two cores without getting in each other's way.

Property tests have no deadline, since cores may be shared. On CI they draw the same examples every time, so that what
is submitted is not refused for a fault of long ago; elsewhere they look for new ones.

With `--portable` only those tests run that any system can run: see `portability.py`.
"""

import os
import signal
from pathlib import Path

import portability
import pytest
import torch
from hypothesis import settings

TESTS = Path(__file__).parent

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["SHOAL_PROGRAM_CACHE"] = "off"  # what is tested is what was traced now
torch.set_num_threads(1)
settings.register_profile("shoal", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("shoal")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--portable", action="store_true", help="hide fork, fcntl, Ray and Flower; leave out what needs them"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "posix: needs fork, signals, /proc, Ray or Flower (given by portability.py)")
    if config.getoption("--portable"):
        portability.hide_posix()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that need a POSIX system are not even imported with `--portable`."""
    path = collection_path.relative_to(TESTS).as_posix() if collection_path.is_relative_to(TESTS) else ""
    return True if config.getoption("--portable") and portability.is_posix_file(path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if portability.needs_posix(item, item.path.relative_to(TESTS).as_posix()):
            item.add_marker("posix")
    if config.getoption("--portable"):
        left_out = [item for item in items if item.get_closest_marker("posix")]
        items[:] = [item for item in items if not item.get_closest_marker("posix")]
        config.hook.pytest_deselected(items=left_out)
