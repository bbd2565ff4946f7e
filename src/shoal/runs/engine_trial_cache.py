"""Results of engine trials in the user's cache folder; one holds for a week, while the machine is as busy as then."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from shoal.engines.threads import use_threads
from shoal.runs.engine_choice import EngineChoice, parse_engine_choice
from shoal.storage.cache_folder import find_cache_folder

if TYPE_CHECKING:
    from shoal.runs.build import Assembly

OLD = 7 * 24 * 3600.0
"""Seconds after which a trial is made again."""
CHANGED = 1.3
"""The ratio of two loads from which on the load counts as changed."""


class TrialCache:
    """A JSON file of trials, by a hash of all that they depend on."""

    def __init__(self, assembly: "Assembly", cores: int):
        recipe = assembly.recipe
        shape = assembly.net.input_shape
        settings = (recipe.method, recipe.model, recipe.batch, recipe.sample, recipe.precision, shape)
        machine = (cores, recipe.threads, torch.__version__, torch.backends.cpu.get_cpu_capability())
        self.key = blake2b(repr((settings, machine)).encode(), digest_size=12).hexdigest()
        self.file = find_cache_folder() / "engines.json"

    def read(self, load: float) -> EngineChoice | None:
        """The engine choice of a trial for this run, if it still holds at this load."""
        trial = self._read_recent().get(self.key)
        if not trial or not 1 / CHANGED < trial["load"] / load < CHANGED:
            return None
        return parse_engine_choice(trial["pick"])

    def write(self, pick: EngineChoice, load: float) -> None:
        """Store a trial and drop old ones; errors are ignored, since a missing cache only costs another trial."""
        trial = {"when": time.time(), "load": load, "pick": pick.to_dict()}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self._read_recent() | {self.key: trial}))
            temporary.replace(self.file)
        except OSError:
            pass

    def _read_recent(self) -> dict[str, dict[str, Any]]:
        """The valid trials that are not too old; none where the file cannot be read."""
        try:
            content = json.loads(self.file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        entries = content.items() if isinstance(content, dict) else ()
        return {
            key: entry for key, entry in entries if is_valid_trial(entry) and 0 <= time.time() - entry["when"] < OLD
        }


def is_valid_trial(entry: Any) -> bool:
    """Whether this is a trial with its time and its load; those of earlier versions had neither."""
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(key), float) for key in ("when", "load"))
        and isinstance(entry.get("pick"), dict)
    )


def measure_load(cores: int) -> float:
    """The seconds that all cores together take for a fixed piece of work; more where other programs run."""
    square, times = torch.ones(256, 256), []

    def multiply_matrices(_: int) -> None:
        for _ in range(20):
            torch.mm(square, square)

    with use_threads(1), ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(4):
            start = time.perf_counter()
            list(pool.map(multiply_matrices, range(cores)))
            times.append(time.perf_counter() - start)
    return min(times[1:])
