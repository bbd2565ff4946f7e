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
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.round import PendingRound
from shoal.core.server_state import ServerState
from shoal.core.types import Outcome
from shoal.engines.base import TrainingEngine
from shoal.engines.host import LocalDevices
from shoal.engines.part_faults import explain_fault
from shoal.runs.build import Assembly
from shoal.runs.engine_choice import EngineChoice, use_engine_settings
from shoal.runs.given_objects import describe_way_to_resume
from shoal.runs.history import History, clear_nonfinite_values
from shoal.runs.recipe import Recipe
from shoal.runs.store import RunFolder

Watcher = Callable[[Recipe, Row, History], None]


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave: its history, its model, and how it was trained."""

    recipe: Recipe
    history: History
    net: Net
    params: Params
    engine: EngineChoice | None = None

    @property
    def accuracy(self) -> float | None:
        return self.history.last("accuracy")

    def module(self) -> nn.Module:
        """The trained model as an ordinary module."""
        module = copy_module(self.net)
        module.load_state_dict(self.params)
        return module.eval()


class ActiveRun:
    """One run between two rounds. Only whole rounds count."""

    def __init__(
        self,
        assembly: Assembly,
        pick: EngineChoice,
        folder: RunFolder | None = None,
        standing: ServerState | None = None,
        history: History | None = None,
        watch: Watcher | None = None,
    ):
        self.assembly, self.pick, self.folder, self.watch = assembly, pick, folder, watch
        self.recipe, self.memory = assembly.recipe, assembly.memory
        self.history = rows = history or History()
        self.loop = replace(assembly.loop, evaluates=lambda row: is_evaluation_due(assembly.recipe, rows, row))
        self.standing = standing
        self.saver = CheckpointSaver(assembly, folder, len(self.history))

    @property
    def local_devices(self) -> LocalDevices:
        assert isinstance(self.loop.engine, LocalDevices)
        return self.loop.engine

    @property
    def is_over(self) -> bool:
        return is_run_over(self.recipe, self.history)

    def begin_round(self) -> PendingRound:
        """What devices are told in the next round."""
        with blame_user_parts(self.assembly):
            self.standing = self.standing or self.loop.start(self.assembly.net)
            return self.loop.open_round(self.standing, len(self.history))

    def finish_round(self, asked: PendingRound, outcomes: Sequence[Outcome], wall: float) -> None:
        """What came back; the round is over and kept."""
        with blame_user_parts(self.assembly):
            after, row = self.loop.close_round(asked, outcomes, wall)
        with delay_signals():
            self.saver.halfway = True
            self.memory.commit(len(self.history), kept=not row.get("void"))
            self.loop.follow_pruning(asked.server_state, after)
            self.standing, row = after, clear_nonfinite_values(row)
            self.history.append(row)
            self.saver.halfway = False
            if self.folder:
                self.folder.append_row(row)
            self.saver.save_if_due(after, len(self.history))
        if self.watch:
            self.watch(self.recipe, row, self.history)

    def finish(self) -> Result:
        """The run is over."""
        self.save_progress()
        with blame_user_parts(self.assembly):
            standing = self.standing or self.loop.start(self.assembly.net)
            final = self.loop.make_final_params(standing, len(self.history))
        if self.folder and "devices" in self.recipe.metrics:
            self.folder.write_note(
                "devices", {"accuracy": self.assembly.judge.evaluate_per_device(standing.net, final)}
            )
        return Result(self.recipe, self.history, standing.net, final, self.pick)

    def save_progress(self) -> None:
        """What a broken round left is dropped, what is whole is on disk."""
        self.memory.discard()
        with delay_signals():
            if self.standing:
                self.saver.save(self.standing, len(self.history))


def play_runs(rides: Sequence[ActiveRun], crew: TrainingEngine) -> list[Result]:
    """Play rounds until every recipe says stop; the devices of all runs go to one crew, round by round.

    They compute in the way of the first one's pick, so all must have been picked alike.
    """
    for ride in rides:
        ride.local_devices.training_engine = crew
    often = gc.get_threshold()
    gc.set_threshold(100_000, *often[1:])  # a round makes many small objects, and no cycles worth looking for
    try:
        with stop_on_sigterm(once=True), use_engine_settings(rides[0].pick):
            try:
                while going := [ride for ride in rides if not ride.is_over]:
                    play_round_of_each(going, crew)
                return [ride.finish() for ride in rides]
            except BaseException:
                save_all_progress(rides)
                raise
    except KeyboardInterrupt as error:
        folder = rides[0].folder
        where = (
            f"{describe_way_to_resume(folder.path)} goes on from there."
            if folder
            else "Give `out` to be able to resume."
        )
        rounds = " and ".join(sorted({str(len(ride.history)) for ride in rides}))
        raise stop_error(error, f"Stopped after {rounds} rounds.", where) from None
    finally:
        gc.set_threshold(*often)
        crew.close()
        for ride in rides:
            if ride.folder:
                ride.folder.close()


def save_all_progress(rides: Sequence[ActiveRun]) -> None:
    """Keep what every run has reached; one that cannot be written does not cost the others theirs."""
    failures = []
    with delay_signals():
        for ride in rides:
            try:
                ride.save_progress()
            except ShoalError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def play_round_of_each(rides: Sequence[ActiveRun], crew: TrainingEngine) -> None:
    """One round of each run."""
    asked = [ride.begin_round() for ride in rides]
    began = perf_counter()
    tasks = [ride.local_devices.make_tasks(own.jobs_to_train) for ride, own in zip(rides, asked)]
    with blame_user_parts(*(ride.assembly for ride in rides)):
        done = iter(crew.train([task for own in tasks for task in own]))
    outcomes = [ride.local_devices.store_results([next(done) for _ in own]) for ride, own in zip(rides, tasks)]
    wall, total = perf_counter() - began, max(1, sum(map(len, tasks)))
    for ride, own, made in zip(rides, asked, outcomes):
        ride.finish_round(own, made, wall * len(made) / total)


@contextmanager
def blame_user_parts(*assemblies: Assembly) -> Iterator[None]:
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


class CheckpointSaver:
    """Decides when to write a checkpoint: as told, or so often that it costs about 5 % of the time."""

    def __init__(self, assembly: Assembly, folder: RunFolder | None, rounds: int):
        self.assembly, self.folder = assembly, folder
        self.every = assembly.recipe.checkpoint_every
        self.rounds, self.cost, self.last = rounds, 0.0, perf_counter()
        self.halfway = False
        """Whether a round is in the memories of devices and not yet in the history: nothing is saved then."""

    def save_if_due(self, standing: ServerState, rounds: int) -> None:
        due = rounds % self.every == 0 if self.every else perf_counter() - self.last > 20 * self.cost
        if due:
            self.save(standing, rounds)

    def save(self, standing: ServerState, rounds: int) -> None:
        if self.folder and rounds > self.rounds and not self.halfway:
            began = perf_counter()
            self.folder.save_checkpoint(self.assembly.recipe, standing, rounds, self.assembly.memory)
            self.rounds, self.last = rounds, perf_counter()
            self.cost = self.last - began


def is_evaluation_due(recipe: Recipe, history: History, row: Row) -> bool:
    """Whether a round is evaluated: at the interval, and when it is the last one by number or by budget."""
    rounds = row["round"] + 1
    return rounds % recipe.eval_every == 0 or is_run_over(recipe, history, row)


def is_run_over(recipe: Recipe, history: History, row: Row | None = None) -> bool:
    """Whether a run has reached its rounds or one of its budgets, with a row that is not in the history yet."""

    def sum_columns(*columns: str) -> float:
        return history.total(*columns) + sum(row[c] for c in columns if row)

    accuracy = history.rows[-1].get("accuracy") if history.rows else None
    return bool(
        len(history) + (1 if row else 0) >= recipe.rounds
        or (recipe.until_accuracy and accuracy is not None and accuracy >= recipe.until_accuracy)
        or (recipe.until_seconds and sum_columns("sim_seconds") >= recipe.until_seconds)
        or (recipe.until_bytes and sum_columns("bytes_down", "bytes_up") >= recipe.until_bytes)
        or (recipe.until_macs and sum_columns("macs_work") >= recipe.until_macs)
    )
