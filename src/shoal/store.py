"""A run on disk: recipe, history, checkpoint, device memories. Killed at any moment, it can be taken up again."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.core import tree
from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.net import Net
from shoal.core.plan import Plan, Slicer
from shoal.core.standing import Standing
from shoal.core.tree import Tree
from shoal.files import damaged, disk_errors, read_tree, write_bytes, write_tree
from shoal.handover import way_to_resume
from shoal.history import History, line, read_history, rewrite
from shoal.memory import Memory, Version
from shoal.recipe import Recipe, from_file

try:
    import fcntl
except ImportError:  # Windows has no such lock; two processes in one folder are then the user's care
    fcntl = None

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Folder:
    """The folder of one run: `recipe.toml`, `history.jsonl`, `checkpoint.safetensors`, `memory/`."""

    path: Path
    lock: IO[bytes] | None

    @classmethod
    def create(cls, recipe: Recipe) -> "Folder":
        """A new folder, held by this process."""
        path = Path(recipe.out)
        refuse_taken(path)
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, claimed(path))
        try:
            write_bytes(folder.recipe_file, recipe.to_toml().encode())
        except ShoalError:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: Path, to_write: bool = True) -> "Folder":
        """The folder of a run, held by this process if it is to be written to."""
        if not (path / "recipe.toml").is_file():
            raise ShoalError(
                "no-run", f"{path} holds no run: there is no recipe.toml in it.", "Give the folder of a run."
            )
        return cls(path, claimed(path) if to_write else None)

    def close(self) -> None:
        """Let go of the folder."""
        if self.lock:
            self.lock.close()

    def __enter__(self) -> "Folder":
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

    def recipe(self) -> Recipe:
        return Recipe().revised(**from_file(self.recipe_file))

    def revise(self, recipe: Recipe) -> None:
        """The recipe with other budgets, for whoever resumes next."""
        write_bytes(self.recipe_file, recipe.to_toml().encode())

    def note(self, name: str, what: dict) -> None:
        """A small file of facts beside the history, for the report."""
        write_bytes(self.path / f"{name}.json", json.dumps(what).encode())

    def read_note(self, name: str) -> dict | None:
        """Such a file; None where there is none that can be read."""
        try:
            found = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def append(self, row: Row) -> None:
        with disk_errors(self.history_file), open(self.history_file, "ab") as file:
            file.write(line(row))

    def save(self, recipe: Recipe, standing: Standing, rounds: int, memory: Memory) -> None:
        """A checkpoint after so many rounds: memories first, then the checkpoint, then old memories go."""
        index = memory.flush()
        state = {
            "format": FORMAT,
            "recipe": recipe.fingerprint(),
            "rounds": rounds,
            "params": standing.params,
            "states": standing.states,
            "cards": standing.cards,
            "cuts": [{"kept": dict(cut.kept), "masks": dict(cut.masks)} for cut in standing.cuts],
            "memory": {"versions": [list(version) for version in index]},
        }
        write_tree(self.checkpoint_file, state)
        memory.forget_old()

    def checkpoint(self, recipe: Recipe, net: Net, parts: Iterable[str]) -> "Checkpoint | None":
        """The last checkpoint; None before the first one."""
        if not self.checkpoint_file.exists():
            return None
        state = read_tree(self.checkpoint_file)
        try:
            if state["format"] != FORMAT:
                raise ValueError(f"its format is {state['format']}, this version reads {FORMAT}")
            belongs = state["recipe"] == recipe.fingerprint()
            found = taken_up(state, net, set(parts)) if belongs else None
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise damaged(self.checkpoint_file, error) from error
        if found is None:
            raise ShoalError(
                "other-recipe",
                f"{self.checkpoint_file} was made by another recipe than {self.recipe_file}.",
                "Put the right recipe.toml back, or start anew in another folder.",
            )
        return found

    def tidy(self, found: "Checkpoint | None", memory: Memory) -> History:
        """Remove what came after the checkpoint; the history up to it."""
        history = read_history(self.history_file, found.rounds if found else 0)
        memory.restore(found.memory if found else [], found.cuts if found else [])
        rewrite(self.history_file, history)
        for litter in self.path.glob(".*.tmp"):
            litter.unlink(missing_ok=True)
        return history


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where a run stood after so many rounds."""

    rounds: int
    standing: Standing
    cuts: list[tuple[Slicer, Plan]]
    memory: list[Version]


def taken_up(state: Tree, net: Net, parts: set[str]) -> Checkpoint:
    """The standing that a checkpoint describes; the net is cut as it was then."""
    rounds, cards, versions = state["rounds"], state["cards"], [Version(*v) for v in state["memory"]["versions"]]
    if type(rounds) is not int or rounds < 0:
        raise ValueError("its number of rounds is no such number")
    if not isinstance(state["states"], dict) or set(state["states"]) != parts:
        raise ValueError("its states are not those of the method's parts")
    if not isinstance(cards, dict) or not all(type(d) is int and isinstance(c, dict) for d, c in cards.items()):
        raise ValueError("its cards are not those of devices")
    for version in versions:
        if any(type(n) is not int for n in version) or version.round >= rounds or version.cuts > len(state["cuts"]):
            raise ValueError("its index of memories does not fit")
    cuts, plans = [], []
    for cut in state["cuts"]:
        plan = Plan(cut["kept"], cut["masks"])
        cuts.append((net.slicer, plan))
        plans.append(plan)
        net = net.cut(plan)
    params, states = tree.map(lambda t: t.to(net.place), [state["params"], state["states"]])
    if {k: (v.shape, v.dtype) for k, v in params.items()} != {k: (v.shape, v.dtype) for k, v in net.initial.items()}:
        raise ValueError("its tensors are not those of the model")
    return Checkpoint(rounds, Standing(net, params, states, cards, tuple(plans)), cuts, versions)


def refuse_taken(path: Path) -> None:
    """A folder that holds anything is not written into; a lock and torn files are nothing."""
    if path.exists() and (not path.is_dir() or any(not p.name.startswith(".") for p in path.iterdir())):
        raise ShoalError(
            "folder-exists",
            f"{path} is already there and not empty.",
            f"Go on with it by {way_to_resume(path)}, or give another --out.",
        )


def claimed(path: Path) -> IO[bytes]:
    """Hold the folder for this process, so that no second one writes into it."""
    with disk_errors(path):
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
