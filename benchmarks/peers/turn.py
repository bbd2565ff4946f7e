"""Processes that prepare side by side and are timed one at a time: each waits here until it is its turn."""

import os
from pathlib import Path
from time import sleep

TURN = "SHOAL_BENCHMARK_TURN"
"""The variable that says by which files a process tells that it is ready and is told to go on."""


def wait_for_turn() -> None:
    """Tell that everything is prepared, and wait until nobody else is timed; at once where nobody takes turns."""
    turn = os.environ.get(TURN)
    if turn and not Path(f"{turn}.go").exists():
        Path(f"{turn}.ready").touch()
        while not Path(f"{turn}.go").exists():
            sleep(0.02)
