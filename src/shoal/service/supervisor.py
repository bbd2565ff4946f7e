"""The server's side of a federation: its processes, the run they play, and what happens when one of them dies."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.remote.engine import MAX_CLAIMED_SAMPLES
from shoal.remote.keys import AUTHORITY, CERTIFICATE, SERVER_KEY, device_key_name
from shoal.runs.recipe import Recipe
from shoal.runs.store import RunFolder, lock_folder
from shoal.service.processes import FlowerServer, end_processes
from shoal.storage.durable import remove_strays

ENDING_FILE, LOOP_PID_FILE = "ending.json", "loop.pid"
"""Files in a run's folder: what the loop said at its end, and the process that plays it."""
FLOWER_FOLDER = "flower"
"""Where Flower keeps its state, in the folder of a run."""
LOOK_SECONDS, STATUS_SECONDS = 0.5, 15.0
"""Seconds between two looks at the history, and between two questions to Flower."""
MAX_TRIES = 5
"""How often, without a round in between, a run that ends without a word is started again, and a process that dies."""


@dataclass(frozen=True)
class DeviceTerms:
    """On what terms devices are heard."""

    seconds: float
    """How long a round waits for an answer."""
    bound: float
    """The largest norm of a tensor that a device may send."""
    wait: float
    """How long a new run waits for devices to come."""
    max_samples: int = MAX_CLAIMED_SAMPLES
    """For how many samples a device counts at most, however many it says it has."""


class Supervisor:
    """The two processes that must live while runs are played; one that dies is started again."""

    def __init__(self, link: FlowerServer, runs: Path, devices: int, terms: DeviceTerms):
        self.link, self.devices = link, devices
        self.desk = {
            "runs": str(runs.resolve()),
            "nodes": str((link.folder / "nodes.json").resolve()) if link.keys else "",
            "seconds": terms.seconds,
            "bound": terms.bound,
            "wait": terms.wait,
            "max_samples": terms.max_samples,
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Supervisor":
        try:
            self.restart_dead_processes()
            self.link.wait_until_up(self.processes["link"])
            if self.link.keys:
                self.link.register_devices(self.devices)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        end_processes(list(self.processes.values())[::-1])

    def restart_dead_processes(self) -> int:
        """Start what is not running; how many those were."""
        dead = 0
        for name, make in (("link", self.link.start_superlink), ("exec", lambda: self.link.start_superexec(self.desk))):
            process = self.processes.get(name)
            if process is None or process.poll() is not None:
                dead += 1
                self.processes[name] = make()
                if name == "link":
                    self.link.wait_until_up(self.processes[name])
        return dead

    def play_run(self, path: Path, watch: Callable[[Row], None]) -> None:
        """A run from where it stands to its end, through the deaths of whoever plays it."""
        told, tries = len(read_played_rows(path)), 0
        while True:
            for name in (ENDING_FILE, LOOP_PID_FILE):
                (path / name).unlink(missing_ok=True)
            before, number = told, self.link.submit_run(path.name)
            told = self.follow_run(path, number, told, watch)
            ending = read_ending(path)
            if ending is not None:
                if ending["kind"]:
                    raise ShoalError(ending["kind"], ending["problem"], ending["advice"])
                return
            self.link.stop_run(number)
            tries = 0 if told > before else tries + 1
            if tries == MAX_TRIES:
                problem = f"The run was started {MAX_TRIES} times and ended each time without a word."
                raise ShoalError("bug", problem, f"See {path / 'server.log'} and {self.link.folder / 'superexec.log'}.")

    def follow_run(self, path: Path, number: str, told: int, watch: Callable[[Row], None]) -> int:
        """Tell of rounds as they are played, until the run has ended or Flower has lost it; how many were told."""
        asked, deaths = time.monotonic(), 0
        while True:
            rows = read_played_rows(path)
            deaths = deaths if len(rows) <= told else 0
            for row in rows[told:]:
                watch(row)
            told = max(told, len(rows))
            if read_ending(path) is not None or has_loop_died(path):
                return told
            deaths += self.restart_dead_processes()
            if deaths >= MAX_TRIES:
                problem = f"Flower's processes died {MAX_TRIES} times without a round in between."
                raise ShoalError("unreachable", problem, f"See {self.link.folder / 'superexec.log'}.")
            if time.monotonic() - asked > STATUS_SECONDS:
                if self.link.get_run_status(number).startswith("finished"):
                    return told
                asked = time.monotonic()
            time.sleep(LOOK_SECONDS)


def read_ending(path: Path) -> dict | None:
    """What the loop left behind at its end."""
    try:
        return json.loads((path / ENDING_FILE).read_text())
    except (OSError, ValueError):
        return None


def has_loop_died(path: Path) -> bool:
    """Whether the process that played the run is gone, or dead and not buried by the one that started it."""
    try:
        number = int((path / LOOP_PID_FILE).read_text())
    except (OSError, ValueError):
        return False  # it has not begun
    try:
        os.kill(number, 0)
        return not Path(f"/proc/{number}/cmdline").read_bytes()
    except ProcessLookupError:
        return True
    except OSError:
        return False


def kill_leftover_loop(path: Path) -> None:
    """A loop that was left over by a server that was killed must not go on beside a new one."""
    with suppress(OSError, ValueError):
        left = int((path / LOOP_PID_FILE).read_text())
        if b"serverapp" in Path(f"/proc/{left}/cmdline").read_bytes():
            os.kill(left, signal.SIGKILL)
            time.sleep(LOOK_SECONDS)


def read_played_rows(path: Path) -> list[Row]:
    """The rounds that were played; a line that is just being written, or that a power cut tore, is left for later."""
    file, rows = path / "history.jsonl", []
    with suppress(ValueError):
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
            if line.endswith(b"\n"):
                rows.append(json.loads(line))
    return rows


def prepare_run_folder(recipe: Recipe) -> tuple[Path, IO[bytes]]:
    """The folder of a run that is about to begin or to go on, and the lock that keeps other servers out of it."""
    path = Path(recipe.out)
    if not (path / "recipe.toml").exists():
        RunFolder.create(recipe).close()
    (path / FLOWER_FOLDER).mkdir(exist_ok=True)
    lock = lock_folder(path / FLOWER_FOLDER)
    remove_strays(path / FLOWER_FOLDER)
    kill_leftover_loop(path)
    with RunFolder.open(path) as folder:
        if folder.read_recipe().fingerprint() != recipe.fingerprint():
            lock.close()
            raise ShoalError("other-recipe", f"{path} holds a run of another recipe.", "Give another --out.")
    return path, lock


def check_key_folder(keys: Path, devices: int) -> Path:
    """The folder of keys, if everything is in it."""
    wanted = [AUTHORITY, CERTIFICATE, SERVER_KEY]
    wanted += [str(Path(device_key_name(d)).with_suffix(".pub")) for d in range(devices)]
    missing = [name for name in wanted if not (keys / name).is_file()]
    if missing:
        problem = f"{keys} has no {missing[0]}."
        many = f" --devices {devices}" if devices else ""
        raise ShoalError("unreachable", problem, f"Make it: shoal keys {keys}{many}.")
    return keys.resolve()
