"""`shoal server`: start Flower's processes, submit a run, follow its history, and restart what dies."""

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
from shoal.runs.engine_choice import parse_engine_choice
from shoal.runs.recipe import Recipe
from shoal.runs.start import CHANGEABLE_KEYS, refuse_fewer_rounds
from shoal.runs.store import RunFolder, lock_folder
from shoal.service.processes import FlowerServer, end_processes
from shoal.storage.durable import remove_strays

ENDING_FILE, LOOP_PID_FILE = "ending.json", "loop.pid"
"""Files in a run's folder: how the process that plays the run ended, and its process id."""
FLOWER_FOLDER = "flower"
"""The folder of Flower's state, inside that of the run."""
LOOK_SECONDS, STATUS_SECONDS = 0.5, 15.0
"""Seconds between two looks at the history, and between two requests for Flower's status of the run."""
MAX_TRIES = 5
"""How often, without a round in between, a run that ends without a result and a process that dies are restarted."""


@dataclass(frozen=True)
class DeviceTerms:
    """The limits that a server sets its devices."""

    reply_timeout: float
    """Seconds that a round waits for a reply."""
    max_norm: float
    """The largest norm of a tensor that a device may send."""
    enrol_timeout: float
    """Seconds that a new run waits for its devices to enrol."""
    max_samples: int = MAX_CLAIMED_SAMPLES
    """The most samples that a device counts for, however many it claims."""


class Supervisor:
    """The SuperLink and SuperExec of a server, running inside `with`; one that dies is started again."""

    def __init__(self, flower_server: FlowerServer, runs: Path, devices: int, terms: DeviceTerms):
        self.flower_server, self.devices = flower_server, devices
        self.settings = {
            "runs": str(runs.resolve()),
            "nodes": str((flower_server.folder / "nodes.json").resolve()) if flower_server.keys else "",
            "seconds": terms.reply_timeout,
            "bound": terms.max_norm,
            "wait": terms.enrol_timeout,
            "max_samples": terms.max_samples,
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Supervisor":
        try:
            self.restart_dead_processes()
            self.flower_server.wait_until_up(self.processes["link"])
            if self.flower_server.keys:
                self.flower_server.register_devices(self.devices)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        end_processes(list(self.processes.values())[::-1])

    def restart_dead_processes(self) -> int:
        """Start the processes that are not running; how many there were."""
        dead = 0
        for name, start in (
            ("link", self.flower_server.start_superlink),
            ("exec", lambda: self.flower_server.start_superexec(self.settings)),
        ):
            process = self.processes.get(name)
            if process is None or process.poll() is not None:
                dead += 1
                self.processes[name] = start()
                if name == "link":
                    self.flower_server.wait_until_up(self.processes[name])
        return dead

    def play_run(self, path: Path, on_row: Callable[[Row], None]) -> None:
        """Play a run to its end; where the process that plays it dies, it is started again from the checkpoint."""
        rows_seen, tries = len(read_played_rows(path)), 0
        while True:
            for name in (ENDING_FILE, LOOP_PID_FILE):
                (path / name).unlink(missing_ok=True)
            before, run_id = rows_seen, self.flower_server.submit_run(path.name)
            rows_seen = self.follow_run(path, run_id, rows_seen, on_row)
            ending = read_ending(path)
            if ending is not None:
                if ending["kind"]:
                    raise ShoalError(ending["kind"], ending["problem"], ending["advice"])
                return
            self.flower_server.stop_run(run_id)
            tries = 0 if rows_seen > before else tries + 1
            if tries == MAX_TRIES:
                problem = f"The run was started {MAX_TRIES} times and ended each time without a word."
                raise ShoalError(
                    "bug", problem, f"See {path / 'server.log'} and {self.flower_server.folder / 'superexec.log'}."
                )

    def follow_run(self, path: Path, run_id: str, rows_seen: int, on_row: Callable[[Row], None]) -> int:
        """Call `on_row` for each new round, until the run has ended or its process has died; the number of rounds."""
        status_time, deaths = time.monotonic(), 0
        while True:
            rows = read_played_rows(path)
            deaths = deaths if len(rows) <= rows_seen else 0
            for row in rows[rows_seen:]:
                on_row(row)
            rows_seen = max(rows_seen, len(rows))
            if read_ending(path) is not None or has_loop_died(path):
                return rows_seen
            deaths += self.restart_dead_processes()
            if deaths >= MAX_TRIES:
                problem = f"Flower's processes died {MAX_TRIES} times without a round in between."
                raise ShoalError("unreachable", problem, f"See {self.flower_server.folder / 'superexec.log'}.")
            if time.monotonic() - status_time > STATUS_SECONDS:
                if self.flower_server.get_run_status(run_id).startswith("finished"):
                    return rows_seen
                status_time = time.monotonic()
            time.sleep(LOOK_SECONDS)


def read_ending(path: Path) -> dict | None:
    """How the run ended, as its process wrote it; None where it has not ended."""
    try:
        return json.loads((path / ENDING_FILE).read_text())
    except (OSError, ValueError):
        return None


def has_loop_died(path: Path) -> bool:
    """Whether the process that plays the run has ended; a zombie, which nobody has waited for, counts too."""
    try:
        pid = int((path / LOOP_PID_FILE).read_text())
    except (OSError, ValueError):
        return False  # it has not started yet
    try:
        os.kill(pid, 0)
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except ProcessLookupError:
        return True
    except OSError:
        return False


def kill_leftover_loop(path: Path) -> None:
    """Kill the process that a killed server left behind, so that no second one plays the run beside the new one."""
    with suppress(OSError, ValueError):
        pid = int((path / LOOP_PID_FILE).read_text())
        if b"serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_SECONDS)


def read_played_rows(path: Path) -> list[Row]:
    """The rows of the history so far, up to a line that is incomplete or damaged by a power cut."""
    file, rows = path / "history.jsonl", []
    with suppress(ValueError):
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
            if line.endswith(b"\n"):
                rows.append(json.loads(line))
    return rows


def prepare_run_folder(recipe: Recipe) -> tuple[Path, IO[bytes]]:
    """The folder of a run that begins or goes on, and the lock that keeps other servers out of it."""
    path = Path(recipe.out)
    if not (path / "recipe.toml").exists():
        RunFolder.create(recipe).close()
    (path / FLOWER_FOLDER).mkdir(exist_ok=True)
    lock = lock_folder(path / FLOWER_FOLDER)
    try:
        remove_strays(path / FLOWER_FOLDER)
        kill_leftover_loop(path)
        with RunFolder.open(path) as folder:
            take_over_budgets(folder, recipe)
    except BaseException:
        lock.close()
        raise
    return path, lock


def take_over_budgets(folder: RunFolder, recipe: Recipe) -> None:
    """Store a recipe's budgets in the folder of its run; refuse the run of another recipe, and a simulated one."""
    stored, engine = folder.read_recipe(), parse_engine_choice(folder.read_note("engine"))
    if stored.fingerprint() != recipe.fingerprint():
        raise ShoalError("other-recipe", f"{folder.path} holds a run of another recipe.", "Give another --out.")
    if engine and engine.engine != "flower":
        problem = f"The run in {folder.path} was simulated, and real devices remember nothing of it."
        raise ShoalError("bad-value", problem, "Give another --out, or go on with it by `shoal resume`.")
    changes = {key: getattr(recipe, key) for key in CHANGEABLE_KEYS if getattr(recipe, key) != getattr(stored, key)}
    if changes:
        refuse_fewer_rounds(folder.path, stored, changes)
        folder.replace_recipe(stored.with_values(**changes))


def check_key_folder(keys: Path, devices: int) -> Path:
    """The folder of keys, if it has all keys of a server with so many devices; else an error."""
    names = [AUTHORITY, CERTIFICATE, SERVER_KEY]
    names += [str(Path(device_key_name(d)).with_suffix(".pub")) for d in range(devices)]
    missing = [name for name in names if not (keys / name).is_file()]
    if missing:
        problem = f"{keys} has no {missing[0]}."
        option = f" --devices {devices}" if devices else ""
        raise ShoalError("unreachable", problem, f"Make it: shoal keys {keys}{option}.")
    return keys.resolve()
