"""Runs: start one, take one up again, stop it in time; what a kill leaves behind is always enough to go on."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from shoal.assemble import Assembly, assemble
from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.net import Net, deepcopy_of
from shoal.core.standing import Standing
from shoal.core.tree import Params
from shoal.history import History, plain, read_history
from shoal.recipe import Recipe
from shoal.store import Folder
from shoal.strangers import blamed

Watcher = Callable[[Recipe, Row, History], None]
BUDGETS = (
    "rounds",
    "target",
    "until_accuracy",
    "until_seconds",
    "until_bytes",
    "until_macs",
    "checkpoint_every",
    "memory_mb",
)


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave: its history, its model, and where it lies."""

    recipe: Recipe
    history: History
    net: Net
    params: Params

    @property
    def accuracy(self) -> float | None:
        return self.history.last("accuracy")

    def module(self) -> nn.Module:
        """The trained model as an ordinary module."""
        module = deepcopy_of(self.net)
        module.load_state_dict(self.params)
        return module.eval()


def run(recipe: Recipe, watch: Watcher | None = None) -> Result:
    """A new run, in memory or, where the recipe says `out`, in a folder."""
    if not recipe.out:
        assembly = assemble(recipe)
        return drive(assembly, None, None, History(), watch)
    assembly = assemble(recipe, Path(recipe.out) / "memory")
    with Folder.create(recipe) as folder:
        folder.note("split", assembly.split())
        return drive(assembly, folder, None, History(), watch)


def resume(path: Path, watch: Watcher | None = None, changes: Mapping[str, Any] | None = None) -> Result:
    """Go on with a run from its last checkpoint; how long it runs may be changed, nothing else."""
    with Folder.open(path) as folder:
        recipe = rebudgeted(folder.recipe(), changes or {})
        assembly = assemble(replace(recipe, out=str(path)), folder.memory_folder)
        found = folder.checkpoint(recipe, assembly.net, assembly.method.names)
        history = folder.tidy(found, assembly.memory)
        if changes:
            folder.revise(recipe)
        if found and found.standing.cuts:
            assembly.loop.settle(Standing(assembly.net, {}, {}), found.standing)
        return drive(assembly, folder, found.standing if found else None, history, watch)


def rebudgeted(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with other budgets."""
    fixed = sorted(changes.keys() - set(BUDGETS))
    if fixed:
        raise ShoalError("bad-value", f"{fixed[0]} of a run cannot be changed.", f"Only {', '.join(BUDGETS)} can.")
    return recipe.revised(**changes)


def opened(path: Path) -> Result:
    """A run as its last checkpoint left it; nothing is trained and nothing is changed."""
    folder = Folder.open(path, to_write=False)
    recipe = folder.recipe()
    assembly = assemble(recipe)
    found = folder.checkpoint(recipe, assembly.net, assembly.method.names)
    if found is None:
        raise ShoalError("no-run", f"{path} has no checkpoint yet.", f"Run `shoal resume {path}` first.")
    history = read_history(folder.history_file, found.rounds)
    return Result(recipe, history, found.standing.net, assembly.loop.final(found.standing, found.rounds))


def drive(
    assembly: Assembly, folder: Folder | None, standing: Standing | None, history: History, watch: Watcher | None
) -> Result:
    """Play rounds until the recipe says stop. Only whole rounds count."""
    recipe, memory = assembly.recipe, assembly.memory
    loop = replace(assembly.loop, evaluates=lambda row: due(recipe, history, row))
    saved = Saver(assembly, folder, len(history))
    try:
        standing = standing or loop.start(assembly.net)
        while not spent(recipe, history):
            number = len(history)
            after, row = loop.play(standing, number)
            with undisturbed():
                memory.commit(number, kept=not row.get("void"))
                loop.settle(standing, after)
                standing, row = after, plain(row)
                history.append(row)
                if folder:
                    folder.append(row)
                saved.perhaps(standing, len(history))
            if watch:
                watch(recipe, row, history)
        saved.now(standing, len(history))
        final = loop.final(standing, len(history))
        if folder and "devices" in recipe.metrics:
            folder.note("devices", {"accuracy": assembly.judge.per_device(standing.net, final)})
        return Result(recipe, history, standing.net, final)
    except KeyboardInterrupt:
        memory.discard()
        with undisturbed():
            if standing:
                saved.now(standing, len(history))
        where = f"`shoal resume {folder.path}` goes on from there." if folder else "Give `out` to be able to resume."
        raise ShoalError("interrupted", f"Stopped after {len(history)} rounds.", where) from None
    except ShoalError:
        raise
    except Exception as error:
        raise blamed(error, assembly.method) or error from error


def due(recipe: Recipe, history: History, row: Row) -> bool:
    """Whether a round is evaluated: at the interval, and when it is the last one by number or by budget."""
    rounds = row["round"] + 1
    return rounds % recipe.eval_every == 0 or spent(recipe, history, row)


class Saver:
    """Decides when to write a checkpoint: as told, or so often that it costs about 5 % of the time."""

    def __init__(self, assembly: Assembly, folder: Folder | None, rounds: int):
        self.assembly, self.folder = assembly, folder
        self.every = assembly.recipe.checkpoint_every
        self.rounds, self.cost, self.last = rounds, 0.0, perf_counter()

    def perhaps(self, standing: Standing, rounds: int) -> None:
        due = rounds % self.every == 0 if self.every else perf_counter() - self.last > 20 * self.cost
        if due:
            self.now(standing, rounds)

    def now(self, standing: Standing, rounds: int) -> None:
        if self.folder and rounds > self.rounds:
            began = perf_counter()
            self.folder.save(self.assembly.recipe, standing, rounds, self.assembly.memory)
            self.rounds, self.last = rounds, perf_counter()
            self.cost = self.last - began


def spent(recipe: Recipe, history: History, row: Row | None = None) -> bool:
    """Whether a run has reached its rounds or one of its budgets, with a row that is not in the history yet."""

    def total(*columns: str) -> float:
        return history.total(*columns) + sum(row[c] for c in columns if row)

    accuracy = history.rows[-1].get("accuracy") if history.rows else None
    return bool(
        len(history) + (1 if row else 0) >= recipe.rounds
        or (recipe.until_accuracy and accuracy is not None and accuracy >= recipe.until_accuracy)
        or (recipe.until_seconds and total("sim_seconds") >= recipe.until_seconds)
        or (recipe.until_bytes and total("bytes_down", "bytes_up") >= recipe.until_bytes)
        or (recipe.until_macs and total("macs_work") >= recipe.until_macs)
    )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep Ctrl-C waiting until what was begun is complete."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list = []
    before = signal.signal(signal.SIGINT, lambda *args: waiting.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        raise KeyboardInterrupt
