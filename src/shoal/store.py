"""A run on disk: recipe, history, checkpoint, device memories. Killed at any moment, it can be taken up again."""

from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.core import tree
from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.net import Net
from shoal.core.plan import Plan, Slicer
from shoal.core.round import Standing
from shoal.core.tree import Tree
from shoal.files import damaged, disk_errors, read_tree, write_bytes, write_tree
from shoal.history import History, line, read_history, rewrite
from shoal.memory import Memory
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
    lock: IO[bytes]

    @classmethod
    def create(cls, recipe: Recipe) -> "Folder":
        path = Path(recipe.out)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ShoalError(
                "folder-exists",
                f"{path} is already there and not empty.",
                f"Go on with it by `shoal resume {path}`, or give another --out.",
            )
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, claimed(path))
        write_bytes(folder.recipe_file, recipe.to_toml().encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> "Folder":
        if not (path / "recipe.toml").is_file():
            raise ShoalError(
                "no-run", f"{path} holds no run: there is no recipe.toml in it.", "Give the folder of a run."
            )
        return cls(path, claimed(path))

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
            "memory": index,
        }
        write_tree(self.checkpoint_file, state)
        memory.forget_old()

    def checkpoint(self, recipe: Recipe, net: Net) -> "Checkpoint | None":
        """The last checkpoint; None before the first one."""
        if not self.checkpoint_file.exists():
            return None
        state = read_tree(self.checkpoint_file)
        try:
            if state["format"] != FORMAT:
                raise ValueError(f"its format is {state['format']}, this version reads {FORMAT}")
            belongs = state["recipe"] == recipe.fingerprint()
            found = taken_up(state, net) if belongs else None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
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
        memory.restore(found.memory if found else {"versions": []}, found.cuts if found else [])
        rewrite(self.history_file, history)
        return history


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where a run stood after so many rounds."""

    rounds: int
    standing: Standing
    cuts: list[tuple[Slicer, Plan]]
    memory: Tree


def taken_up(state: Tree, net: Net) -> Checkpoint:
    """The standing that a checkpoint describes; the net is cut as it was then."""
    cuts, plans = [], []
    for cut in state["cuts"]:
        plan = Plan(cut["kept"], cut["masks"])
        cuts.append((net.slicer, plan))
        plans.append(plan)
        net = net.cut(plan)
    params, states = tree.map(lambda t: t.to(net.place), [state["params"], state["states"]])
    if {k: v.shape for k, v in params.items()} != {k: v.shape for k, v in net.initial.items()}:
        raise ValueError("its tensors are not those of the model")
    standing = Standing(net, params, states, state["cards"], tuple(plans))
    return Checkpoint(int(state["rounds"]), standing, cuts, state["memory"])


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
