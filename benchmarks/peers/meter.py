"""Which processes belong to a contestant, how much memory they hold, and their end."""

import os
import signal
import threading
import time
from pathlib import Path

MARK = "SHOAL_SPEED_CONTESTANT"
"""A variable that all processes of a contestant inherit, by which they are found again."""


class Meter(threading.Thread):
    """Watches the memory of all processes with a mark.

    To share out pages takes the kernel 0.1 s for a gigabyte, so that is asked only when the plain sizes reach a new
    height; in rounds that are timed they hardly ever do.
    """

    def __init__(self, mark: str):
        super().__init__(daemon=True)
        self.mark, self.peak, self.over = mark, 0.0, threading.Event()

    def run(self) -> None:
        height = 0
        while not self.over.wait(0.1):
            found = marked(self.mark)
            pages = sum(map(resident_pages, found))
            if pages > 1.01 * height:
                height = pages
                self.peak = max(self.peak, sum(map(shared_memory, found)))

    def __enter__(self) -> "Meter":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join()


def marked(mark: str) -> list[int]:
    """The processes that carry a mark, whoever their parents are by now."""
    sought = f"{MARK}={mark}".encode()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if sought in read(pid, "environ")]


def resident_pages(pid: int) -> int:
    fields = read(pid, "statm").split()
    return int(fields[1]) if fields else 0


def shared_memory(pid: int) -> float:
    """MiB of a process; what it shares with others counts in parts."""
    for line in read(pid, "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or belongs to someone else
        return b""


def stop(mark: str) -> None:
    """End what a contestant left running."""
    for signum, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        for pid in marked(mark):
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                pass
        until = time.monotonic() + patience
        while marked(mark) and time.monotonic() < until:
            time.sleep(0.05)
