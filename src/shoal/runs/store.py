"""The folder of a run: recipe, history, checkpoint, device memories. A run that is killed can always be resumed.

After a power cut, too: what a checkpoint needs is synced to disk before it, and what only the checkpoint before needs
is removed after it.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.metric import METRICS, Metric, decode_metrics
from shoal.core.model.net import Net
from shoal.core.model.tree import Tree
from shoal.core.server_state import ServerState
from shoal.runs.checkpoint import Checkpoint, check_format, make_checkpoint_tree, restore_checkpoint
from shoal.runs.given_objects import describe_way_to_resume
from shoal.runs.history import History, encode_row, encode_rows, read_history
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import COMPARISON_FILE, TUNING_FILE, read_recipe_file
from shoal.storage.durable import append_to_file, disk, make_folders, remove_strays, replace_file, sync_paths
from shoal.storage.files import damaged_file_error, explain_disk_errors, read_tree, tree_as_bytes
from shoal.storage.memory import DeviceMemory
from shoal.storage.strict_json import parse_json

try:
    import fcntl
except ImportError:  # Windows has no such lock; two processes in one folder are then the user's care
    fcntl = None


@dataclass(frozen=True, eq=False)
class RunFolder:
    """The folder of one run: `recipe.toml`, `history.jsonl`, `checkpoint.safetensors`, `memory/`, and where the recipe
    says `keep_best`, `best-N.safetensors`."""

    path: Path
    lock: IO[bytes] | None
    lines: bytearray = field(default_factory=bytearray)
    """The rows of the history as bytes, which every checkpoint repeats."""

    @classmethod
    def create(cls, recipe: Recipe) -> "RunFolder":
        """A new folder, locked by this process."""
        path = Path(recipe.out)
        refuse_nonempty_folder(path)
        with explain_disk_errors(path):
            sync_paths(make_folders(path))
        folder = cls(path, lock_folder(path))
        try:
            with explain_disk_errors(path):
                remove_strays(path)
                replace_file(folder.recipe_file, recipe.to_toml().encode())
                replace_file(folder.history_file, b"")
        except ShoalError:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: Path, to_write: bool = True) -> "RunFolder":
        """The folder of a run that is there, locked by this process if it is to be written to."""
        if not (path / "recipe.toml").is_file():
            raise make_no_run_error(path)
        folder = cls(path, lock_folder(path) if to_write else None)
        if to_write:
            with explain_disk_errors(path):
                remove_strays(path)
        return folder

    def close(self) -> None:
        """Release the lock."""
        if self.lock:
            self.lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def history_file(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def checkpoint_file(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def memory_folder(self) -> Path:
        return self.path / "memory"

    def read_recipe(self) -> Recipe:
        return Recipe().with_values(**read_recipe_file(self.recipe_file))

    def replace_recipe(self, recipe: Recipe) -> None:
        """Store the recipe with other budgets, so that the next resume knows them."""
        with self.guard_writes():
            replace_file(self.recipe_file, recipe.to_toml().encode(), confirm=self.require_present)

    def write_note(self, name: str, note: dict) -> None:
        """Write NAME.json beside the history, such as `split` or `engine`."""
        with self.guard_writes():
            replace_file(self.path / f"{name}.json", json.dumps(note).encode(), confirm=self.require_present)

    def read_note(self, name: str) -> dict | None:
        """The contents of NAME.json; None where there is none that can be read."""
        try:
            note = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return note if isinstance(note, dict) else None

    def read_metrics(self) -> dict[str, Metric]:
        """What the columns of this run's history are, as noted when it began; the loop's own where nothing was."""
        file = self.path / "metrics.json"
        if not file.is_file():
            return METRICS
        try:
            with explain_disk_errors(file):
                return decode_metrics(parse_json(file.read_bytes()))
        except (ValueError, RecursionError) as error:
            raise damaged_file_error(file, error) from error

    def read_history(self, rounds: int | None = None, more_lines: bytes = b"") -> History:
        """The first `rounds` rows of the history, or all, with the metrics and the headline of this run."""
        headline = self.read_headline(self.read_recipe())
        return read_history(self.history_file, rounds, more_lines, self.read_metrics(), headline)

    def read_headline(self, recipe: Recipe) -> str:
        """The metric that this run is about: the recipe's, or that of its task as noted when it began."""
        noted = (self.read_note("task") or {}).get("headline")
        if recipe.headline or not isinstance(noted, str):
            return recipe.headline or "accuracy"
        if noted not in self.read_metrics():
            raise damaged_file_error(self.path / "task.json", "its headline is none of the run's metrics")
        return noted

    def append_row(self, row: Row) -> None:
        """Append a row to the history, unsynced: a power cut may lose it until the next checkpoint repeats it."""
        self.lines.extend(encode_row(row))
        with self.guard_writes():
            append_to_file(self.history_file, encode_row(row))

    def replace_history(self, history: History) -> None:
        """Write the whole history anew."""
        self.lines[:] = encode_rows(history.rows)
        with self.guard_writes():
            replace_file(self.history_file, bytes(self.lines), confirm=self.require_present)

    def get_best_file(self, rounds: int) -> Path:
        """The file of the best model, which is that after so many rounds."""
        return self.path / f"best-{rounds}.safetensors"

    def write_best_model(self, rounds: int, content: Tree) -> None:
        with self.guard_writes():
            replace_file(self.get_best_file(rounds), tree_as_bytes(content), confirm=self.require_present)

    def remove_best_models(self, but: int) -> None:
        """Remove the files of best models, except that after so many rounds."""
        with self.guard_writes():
            for file in self.path.glob("best-*.safetensors"):
                if file != self.get_best_file(but):
                    disk.remove(file)

    def save_checkpoint(self, recipe: Recipe, server_state: ServerState, rounds: int, memory: DeviceMemory) -> None:
        """Write a checkpoint after so many rounds: memories and history before it, old memories go after it."""
        with self.guard_writes():
            versions = memory.flush()
            sync_paths([self.history_file])
            content = make_checkpoint_tree(recipe.fingerprint(), rounds, server_state, versions, self.lines)
            replace_file(self.checkpoint_file, tree_as_bytes(content), confirm=self.require_present)
            memory.forget_old_versions()

    @contextmanager
    def guard_writes(self) -> Iterator[None]:
        """Inside, disk errors are explained; one because the folder was deleted meanwhile is reported as that."""
        self.require_present()
        try:
            with explain_disk_errors(self.path):
                yield
        except ShoalError:
            self.require_present()
            raise

    def require_present(self) -> None:
        """Refuse to go on when the folder was deleted or moved, or when another run was begun in its place."""
        try:
            lock = os.stat(self.path / ".lock")
            replaced = self.lock is not None and not os.path.samestat(lock, os.fstat(self.lock.fileno()))
        except OSError:
            replaced = False
        if replaced or not self.recipe_file.is_file():
            problem = f"{self.path} was deleted, moved or replaced while its run was going on, which therefore stopped."
            advice = "If it was moved, `shoal resume` goes on with it where it is now; else start the run again."
            raise ShoalError("disk", problem, advice)

    def read_checkpoint(self, recipe: Recipe, net: Net, parts: Iterable[str]) -> Checkpoint | None:
        """The last checkpoint; None before the first one."""
        if not self.checkpoint_file.exists():
            return None
        content = read_tree(self.checkpoint_file)
        try:
            check_format(content)
            belongs = content["recipe"] == recipe.fingerprint()
            same_frozen = content["format"] == 1 or content["model_digest"] == net.digest
            checkpoint = restore_checkpoint(content, net, set(parts)) if belongs and same_frozen else None
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise damaged_file_error(self.checkpoint_file, error) from error
        if belongs and not same_frozen:
            raise ShoalError(
                "other-recipe",
                f"{self.checkpoint_file} was trained on other frozen tensors than those of the model now.",
                "Give the model the same backbone as then, or start anew in another folder.",
            )
        if checkpoint is None:
            raise ShoalError(
                "other-recipe",
                f"{self.checkpoint_file} was made by another recipe than {self.recipe_file}.",
                "Put the right recipe.toml back, or start anew in another folder.",
            )
        return checkpoint

    def roll_back(self, checkpoint: Checkpoint | None, memory: DeviceMemory) -> History:
        """Remove what came after the checkpoint from history and memories, and return the history up to it."""
        history = self.read_history_until(checkpoint) if checkpoint else self.read_history(0)
        with explain_disk_errors(self.path):
            sync_paths([self.path])  # a kill may have come before: memories of an older checkpoint go only after it
        memory.restore(checkpoint.memory if checkpoint else [], checkpoint.cuts if checkpoint else [])
        self.replace_history(history)
        return history

    def read_history_until(self, checkpoint: Checkpoint) -> History:
        """The history up to a checkpoint, which keeps the rows that the file may lack."""
        return self.read_history(checkpoint.rounds, checkpoint.lines)


def count_rows_on_disk(folder: Path) -> int:
    """The number of rows in a run's history file; a checkpoint may hold more."""
    file = RunFolder(folder, None).history_file
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def refuse_nonempty_folder(path: Path) -> None:
    """Refuse a folder that holds anything but hidden files, such as a lock and files torn by a kill."""
    if path.exists() and not path.is_dir():
        raise ShoalError("folder-exists", f"{path} is a file, and a run needs a folder.", "Give another --out.")
    if path.exists() and any(not p.name.startswith(".") for p in path.iterdir()):
        raise ShoalError(
            "folder-exists",
            f"{path} is already there and not empty.",
            f"Go on with it by {describe_way_to_resume(path)}, or give another --out.",
        )


def lock_folder(path: Path) -> IO[bytes]:
    """Lock the folder for this process, so that no second one writes into it."""
    with explain_disk_errors(path):
        lock = open(path / ".lock", "wb")
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ShoalError(
            "folder-exists", f"{path} is in use by another process.", "Wait for it, or give another --out."
        ) from None
    return lock


def make_no_run_error(path: Path) -> ShoalError:
    """The error for a folder that is not that of one run; of a comparison or a tuning it names one of the runs."""
    for file, what in ((COMPARISON_FILE, "a comparison"), (TUNING_FILE, "a tuning")):
        runs = sorted(found.parent for found in path.rglob("recipe.toml")) if (path / file).is_file() else []
        if runs:
            problem = f"{path} holds {what}, and one run is wanted here."
            return ShoalError("no-run", problem, f"Give the folder of one of its runs, such as {runs[0]}.")
    return ShoalError("no-run", f"{path} holds no run: there is no recipe.toml in it.", "Give the folder of a run.")
