"""Runs in progress, one or several side by side: their devices train together, everything else is each run's own."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.interrupts import delay_signals, stop_error, stop_on_sigterm
from shoal.core.ledger import Row
from shoal.core.model.net import Net, copy_module
from shoal.core.model.tree import Params
from shoal.core.round import PendingRound
from shoal.core.server_state import ServerState
from shoal.core.types import Outcome
from shoal.engines.base import TrainingEngine
from shoal.engines.host import LocalDevices
from shoal.engines.part_faults import explain_fault
from shoal.runs.build import Assembly
from shoal.runs.engine_choice import Pick, computing_as
from shoal.runs.given_objects import way_to_resume
from shoal.runs.history import History, plain
from shoal.runs.recipe import Recipe
from shoal.runs.store import Folder

Watcher = Callable[[Recipe, Row, History], None]


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave: its history, its model, and how it was trained."""

    recipe: Recipe
    history: History
    net: Net
    params: Params
    engine: Pick | None = None

    @property
    def accuracy(self) -> float | None:
        return self.history.last("accuracy")

    def module(self) -> nn.Module:
        """The trained model as an ordinary module."""
        module = copy_module(self.net)
        module.load_state_dict(self.params)
        return module.eval()


class Ride:
    """One run between two rounds. Only whole rounds count."""

    def __init__(
        self,
        assembly: Assembly,
        pick: Pick,
        folder: Folder | None = None,
        standing: ServerState | None = None,
        history: History | None = None,
        watch: Watcher | None = None,
    ):
        self.assembly, self.pick, self.folder, self.watch = assembly, pick, folder, watch
        self.recipe, self.memory = assembly.recipe, assembly.memory
        self.history = rows = history or History()
        self.loop = replace(assembly.loop, evaluates=lambda row: due(assembly.recipe, rows, row))
        self.standing = standing
        self.saver = Saver(assembly, folder, len(self.history))

    @property
    def machine(self) -> LocalDevices:
        assert isinstance(self.loop.engine, LocalDevices)
        return self.loop.engine

    @property
    def over(self) -> bool:
        return spent(self.recipe, self.history)

    def ask(self) -> PendingRound:
        """What devices are told in the next round."""
        with blaming(self.assembly):
            self.standing = self.standing or self.loop.start(self.assembly.net)
            return self.loop.open_round(self.standing, len(self.history))

    def take(self, asked: PendingRound, outcomes: Sequence[Outcome], wall: float) -> None:
        """What came back; the round is over and kept."""
        with blaming(self.assembly):
            after, row = self.loop.close_round(asked, outcomes, wall)
        with delay_signals():
            self.saver.halfway = True
            self.memory.commit(len(self.history), kept=not row.get("void"))
            self.loop.follow_pruning(asked.server_state, after)
            self.standing, row = after, plain(row)
            self.history.append(row)
            self.saver.halfway = False
            if self.folder:
                self.folder.append(row)
            self.saver.perhaps(after, len(self.history))
        if self.watch:
            self.watch(self.recipe, row, self.history)

    def end(self) -> Result:
        """The run is over."""
        self.keep()
        with blaming(self.assembly):
            standing = self.standing or self.loop.start(self.assembly.net)
            final = self.loop.make_final_params(standing, len(self.history))
        if self.folder and "devices" in self.recipe.metrics:
            self.folder.note("devices", {"accuracy": self.assembly.judge.evaluate_per_device(standing.net, final)})
        return Result(self.recipe, self.history, standing.net, final, self.pick)

    def keep(self) -> None:
        """What a broken round left is dropped, what is whole is on disk."""
        self.memory.discard()
        with delay_signals():
            if self.standing:
                self.saver.now(self.standing, len(self.history))


def drive(rides: Sequence[Ride], crew: TrainingEngine) -> list[Result]:
    """Play rounds until every recipe says stop; the devices of all runs go to one crew, round by round.

    They compute in the way of the first one's pick, so all must have been picked alike.
    """
    for ride in rides:
        ride.machine.crew = crew
    often = gc.get_threshold()
    gc.set_threshold(100_000, *often[1:])  # a round makes many small objects, and no cycles worth looking for
    try:
        with stop_on_sigterm(once=True), computing_as(rides[0].pick):
            try:
                while going := [ride for ride in rides if not ride.over]:
                    together(going, crew)
                return [ride.end() for ride in rides]
            except BaseException:
                keep_all(rides)
                raise
    except KeyboardInterrupt as error:
        folder = rides[0].folder
        where = f"{way_to_resume(folder.path)} goes on from there." if folder else "Give `out` to be able to resume."
        rounds = " and ".join(sorted({str(len(ride.history)) for ride in rides}))
        raise stop_error(error, f"Stopped after {rounds} rounds.", where) from None
    finally:
        gc.set_threshold(*often)
        crew.close()
        for ride in rides:
            if ride.folder:
                ride.folder.close()


def keep_all(rides: Sequence[Ride]) -> None:
    """Keep what every run has reached; one that cannot be written does not cost the others theirs."""
    failures = []
    with delay_signals():
        for ride in rides:
            try:
                ride.keep()
            except ShoalError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def together(rides: Sequence[Ride], crew: TrainingEngine) -> None:
    """One round of each run."""
    asked = [ride.ask() for ride in rides]
    began = perf_counter()
    tasks = [ride.machine.make_tasks(own.jobs_to_train) for ride, own in zip(rides, asked)]
    with blaming(*(ride.assembly for ride in rides)):
        done = iter(crew.train([task for own in tasks for task in own]))
    outcomes = [ride.machine.store_results([next(done) for _ in own]) for ride, own in zip(rides, tasks)]
    wall, total = perf_counter() - began, max(1, sum(map(len, tasks)))
    for ride, own, made in zip(rides, asked, outcomes):
        ride.take(own, made, wall * len(made) / total)


@contextmanager
def blaming(*assemblies: Assembly) -> Iterator[None]:
    """What a stranger's part raises is told as its fault."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        for assembly in assemblies:
            fault = explain_fault(error, assembly.method)
            if fault:
                raise fault from error
        raise


class Saver:
    """Decides when to write a checkpoint: as told, or so often that it costs about 5 % of the time."""

    def __init__(self, assembly: Assembly, folder: Folder | None, rounds: int):
        self.assembly, self.folder = assembly, folder
        self.every = assembly.recipe.checkpoint_every
        self.rounds, self.cost, self.last = rounds, 0.0, perf_counter()
        self.halfway = False
        """Whether a round is in the memories of devices and not yet in the history: nothing is saved then."""

    def perhaps(self, standing: ServerState, rounds: int) -> None:
        due = rounds % self.every == 0 if self.every else perf_counter() - self.last > 20 * self.cost
        if due:
            self.now(standing, rounds)

    def now(self, standing: ServerState, rounds: int) -> None:
        if self.folder and rounds > self.rounds and not self.halfway:
            began = perf_counter()
            self.folder.save(self.assembly.recipe, standing, rounds, self.assembly.memory)
            self.rounds, self.last = rounds, perf_counter()
            self.cost = self.last - began


def due(recipe: Recipe, history: History, row: Row) -> bool:
    """Whether a round is evaluated: at the interval, and when it is the last one by number or by budget."""
    rounds = row["round"] + 1
    return rounds % recipe.eval_every == 0 or spent(recipe, history, row)


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
