"""Runs in progress, one or several at a time: one engine trains the devices of all, round by round."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from time import perf_counter

from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.interrupts import delay_signals, stop_error, stop_on_sigterm
from shoal.core.ledger import Row
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.server_state import ServerState
from shoal.core.session import Session, play_round_of_each
from shoal.core.task import Engine
from shoal.engines.part_faults import explain_fault
from shoal.runs.build import Assembly
from shoal.runs.engine_choice import EngineChoice, use_engine_settings
from shoal.runs.given_objects import describe_way_to_resume
from shoal.runs.history import History, clear_nonfinite_values
from shoal.runs.recipe import Recipe
from shoal.runs.store import RunFolder

log = logging.getLogger("shoal")
Watcher = Callable[[Recipe, Row, History], None]


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave: its history, its trained model, and the engine that trained it."""

    recipe: Recipe
    history: History
    net: Net
    params: Params
    engine: EngineChoice | None = None

    @property
    def accuracy(self) -> float | None:
        return self.history.last("accuracy")

    def module(self) -> nn.Module:
        """The trained model as an ordinary module, with frozen tensors of its own."""
        module = copy_module(self.net)
        module.load_state_dict(self.params, strict=False)
        return (deepcopy(module) if self.net.frozen else module).eval()


class ActiveRun(Session):
    """A session with a recipe, a history, and a folder if the run has one."""

    def __init__(
        self,
        assembly: Assembly,
        pick: EngineChoice,
        folder: RunFolder | None = None,
        server_state: ServerState | None = None,
        history: History | None = None,
        watch: Watcher | None = None,
    ):
        rows = history or History(metrics=assembly.metrics, headline=assembly.recipe.headline)
        loop = replace(assembly.loop, evaluates=lambda row: is_evaluation_due(assembly.recipe, rows, row))
        super().__init__(loop, assembly.net, server_state, len(rows))
        self.assembly, self.pick, self.folder, self.watch = assembly, pick, folder, watch
        self.recipe, self.history = assembly.recipe, rows
        self.saver = CheckpointSaver(assembly, folder, len(rows))

    @property
    def is_over(self) -> bool:
        return is_run_over(self.recipe, self.history)

    def commit_round(self, server_state: ServerState, row: Row) -> None:
        """Let a round count, and store its row and memories."""
        row = self.history.drop_repeated_words(clear_nonfinite_values(row))
        with delay_signals():
            self.saver.halfway = True
            super().commit_round(server_state, row)
            self.history.append(row)
            self.saver.halfway = False
            if self.folder:
                self.folder.append_row(row)
            self.saver.save_if_due(server_state, len(self.history))
        for part, text in row.get("log", ()):
            log.info("%s: %s", part, text)
        if self.watch:
            self.watch(self.recipe, row, self.history)

    def finish(self) -> Result:
        """Save the run at its end, and return its result."""
        self.save_progress()
        with blame_user_parts(self.assembly):
            server_state = self.server_state or self.loop.start(self.net)
            params = self.loop.make_final_params(server_state, len(self.history))
        if self.folder and "devices" in self.recipe.metrics:
            self.folder.write_note(
                "devices", {"accuracy": self.assembly.evaluator.evaluate_per_device(server_state.net, params)}
            )
        return Result(self.recipe, self.history, server_state.net, params, self.pick)

    def save_progress(self) -> None:
        """Discard what an incomplete round left, and write a checkpoint of the complete ones."""
        self.loop.host.discard_round()
        with delay_signals():
            if self.folder:
                self.folder.require_present()  # else the error would be about a file that went with the folder
            if self.server_state:
                self.saver.save(self.server_state, len(self.history))


def play_runs(runs: Sequence[ActiveRun], engine: Engine) -> list[Result]:
    """Play rounds until every run is over; in each round one engine trains the devices of all runs.

    Threads and determinism are those of the first run's engine choice, so all choices must agree in them.
    """
    for run in runs:
        run.loop.host.engine = engine
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])  # a round makes many small objects, and no cycles worth looking for
    try:
        with stop_on_sigterm(once=True), use_engine_settings(runs[0].pick):
            try:
                while unfinished := [run for run in runs if not run.is_over]:
                    with blame_user_parts(*(run.assembly for run in unfinished)):
                        play_round_of_each(unfinished, engine)
                return [run.finish() for run in runs]
            except BaseException:
                save_all_progress(runs)
                raise
    except KeyboardInterrupt as error:
        folder = runs[0].folder
        advice = (
            f"{describe_way_to_resume(folder.path)} goes on from there."
            if folder
            else "Give `out` to be able to resume."
        )
        rounds = " and ".join(sorted({str(len(run.history)) for run in runs}))
        raise stop_error(error, f"Stopped after {rounds} rounds.", advice) from None
    finally:
        gc.set_threshold(*thresholds)
        engine.close()
        for run in runs:
            if run.folder:
                run.folder.close()


def save_all_progress(runs: Sequence[ActiveRun]) -> None:
    """Save what every run has reached; the first error is raised after all have been tried."""
    failures = []
    with delay_signals():
        for run in runs:
            try:
                run.save_progress()
            except ShoalError as error:
                failures.append(error)
    if failures:
        raise failures[0]


@contextmanager
def blame_user_parts(*assemblies: Assembly) -> Iterator[None]:
    """Inside, what a part from outside the package raises is reported as an error of that part."""
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
    """Writes checkpoints every `checkpoint_every` rounds, or so often that they cost about 5 % of the time."""

    def __init__(self, assembly: Assembly, folder: RunFolder | None, rounds: int):
        self.assembly, self.folder = assembly, folder
        self.every = assembly.recipe.checkpoint_every
        self.rounds, self.cost, self.last = rounds, 0.0, perf_counter()
        self.halfway = False
        """Whether a round is in the device memories but not yet in the history; nothing is saved then."""

    def save_if_due(self, server_state: ServerState, rounds: int) -> None:
        due = rounds % self.every == 0 if self.every else perf_counter() - self.last > 20 * self.cost
        if due:
            self.save(server_state, rounds)

    def save(self, server_state: ServerState, rounds: int) -> None:
        if self.folder and rounds > self.rounds and not self.halfway:
            start = perf_counter()
            self.folder.save_checkpoint(self.assembly.recipe, server_state, rounds, self.assembly.memory)
            self.rounds, self.last = rounds, perf_counter()
            self.cost = self.last - start


def is_evaluation_due(recipe: Recipe, history: History, row: Row) -> bool:
    """Whether a round is evaluated: at the interval, and when it is the last one by number or by budget."""
    rounds = row["round"] + 1
    return rounds % recipe.eval_every == 0 or is_run_over(recipe, history, row)


def is_run_over(recipe: Recipe, history: History, row: Row | None = None) -> bool:
    """Whether a run has reached its rounds or a budget, counting a row that is not in the history yet."""

    def sum_columns(*columns: str) -> float:
        return history.total(*columns) + sum(row[c] for c in columns if row)

    return bool(
        len(history) + (1 if row else 0) >= recipe.rounds
        or (recipe.until_accuracy and history.is_reached(recipe.until_accuracy))
        or (recipe.until_seconds and sum_columns("sim_seconds") >= recipe.until_seconds)
        or (recipe.until_bytes and sum_columns("bytes_down", "bytes_up") >= recipe.until_bytes)
        or (recipe.until_macs and sum_columns("macs_work") >= recipe.until_macs)
    )
