"""Runs in progress, one or several at a time: one engine trains the devices of all, round by round."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.interrupts import delay_signals, stop_error, stop_on_sigterm
from shoal.core.ledger import Row
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.server_state import ServerState
from shoal.core.session import Session, play_round_of_each
from shoal.core.task import Engine
from shoal.display.curve_style import make_axes
from shoal.engines.part_faults import explain_fault
from shoal.engines.workers.malloc import FreedMemory
from shoal.runs.best_model import BestModel, BestModelKeeper
from shoal.runs.build import Assembly
from shoal.runs.curves import draw_histories
from shoal.runs.engine_choice import EngineChoice, use_engine_settings
from shoal.runs.given_objects import describe_way_to_resume
from shoal.runs.history import History, clear_nonfinite_values
from shoal.runs.patience import describe_end_of_patience
from shoal.runs.profile import RunProfile
from shoal.runs.recipe import Recipe
from shoal.runs.run_summary import describe_result, render_result
from shoal.runs.store import RunFolder
from shoal.runs.watching import Stop, Watcher, make_trained_module, offer_model

log = logging.getLogger("shoal")


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave: its history, its trained model, and the engine that trained it."""

    recipe: Recipe
    history: History
    net: Net
    params: Params
    engine: EngineChoice | None = None
    profile: RunProfile | None = None
    """Where its time went, if that was asked for."""
    best: BestModel | None = None
    """The model of the best validation metric, where the recipe says `keep_best`."""

    @property
    def accuracy(self) -> float | None:
        return self.history.last("accuracy")

    @property
    def headline(self) -> float | None:
        """What the run is judged by at its last evaluation: the accuracy, or the metric of its task or recipe."""
        return self.history.last(self.history.headline)

    def plot(self, column: str = "", x: str = "rounds", ax: Any = None) -> Any:
        """Draw a column (the headline unless one is named) over rounds, seconds, bytes or macs; matplotlib's axes."""
        return draw_histories(ax or make_axes(), {self.recipe.method: [self.history]}, x, column, self.recipe.target)

    def __repr__(self) -> str:
        return f"Result({describe_result(self)})"

    def _repr_html_(self) -> str:
        return render_result(self)

    def module(self) -> nn.Module:
        """The trained model as an ordinary module, with frozen tensors of its own."""
        return make_trained_module(self.net, self.params)


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
        rows = history or History(metrics=assembly.metrics, headline=assembly.headline)
        loop = replace(assembly.loop, evaluates=lambda row: is_evaluation_due(assembly.recipe, rows, row))
        super().__init__(loop, assembly.net, server_state, len(rows))
        self.assembly, self.pick, self.folder, self.watch = assembly, pick, folder, watch
        self.recipe, self.history = assembly.recipe, rows
        self.best = BestModelKeeper(assembly, rows, folder)
        self.saver = CheckpointSaver(assembly, folder, len(rows), self.best)

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
            self.best.consider(server_state, row)
            if out_of_patience := describe_end_of_patience(self.recipe, self.history):
                row["stopped"] = out_of_patience
            self.saver.halfway = False
            if self.folder:
                self.folder.append_row(row)
            self.saver.save_if_due(server_state, len(self.history))
        for part, text in row.get("log", ()):
            log.info("%s: %s", part, text)
        if self.watch:
            with offer_model(self.make_judged_model):
                stop = self.watch(self.recipe, row, self.history)
            if isinstance(stop, Stop) and not out_of_patience:
                self.stop(stop.why)
        if "stopped" in row:
            log.info("%s, seed %d: stopped after round %d: %s", self.recipe.method, self.recipe.seed, self.number,
                     row["stopped"])  # fmt: skip

    def stop(self, why: str) -> None:
        """Let the run end with the round that was committed last; its row says why."""
        with delay_signals():
            self.history.rows[-1]["stopped"] = why
            if self.folder:
                self.folder.replace_history(self.history)

    def make_judged_model(self) -> tuple[Net, Params]:
        """The net and the tensors that are judged after the round that was committed last."""
        with blame_user_parts(self.assembly):
            server_state = self.server_state or self.loop.start(self.net)
            return server_state.net, self.loop.make_final_params(server_state, len(self.history))

    def finish(self) -> Result:
        """Save the run at its end, and return its result."""
        self.save_progress()
        net, params = self.make_judged_model()
        if self.folder and (note := self.describe_devices(net, params)):
            self.folder.write_note("devices", note)
        return Result(self.recipe, self.history, net, params, self.pick, best=self.best.get_model())

    def describe_devices(self, net: Net, params: Params) -> dict[str, list]:
        """What the final model gives on every device: on its labels, and on its own test samples."""
        note: dict[str, list] = {}
        if "devices" in self.recipe.metrics:
            note["accuracy"] = self.assembly.evaluator.evaluate_per_device(net, params)
        if tester := self.assembly.device_tester:
            server_state = self.server_state or self.loop.start(self.net)
            scores = tester.score_devices(server_state, params, max(len(self.history) - 1, 0))
            if scores.devices:
                note |= {"tested": list(scores.devices), "own_tests": scores.values.tolist()}
                note["own_test_samples"] = scores.samples.tolist()
        return note

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
                freed_memory = FreedMemory()
                while unfinished := [run for run in runs if not run.is_over]:
                    with blame_user_parts(*(run.assembly for run in unfinished)):
                        play_round_of_each(unfinished, engine)
                    freed_memory.trim_if_due()
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

    def __init__(self, assembly: Assembly, folder: RunFolder | None, rounds: int, best: BestModelKeeper):
        self.assembly, self.folder, self.best = assembly, folder, best
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
            self.best.save()  # before the checkpoint that needs it
            self.folder.save_checkpoint(self.assembly.recipe, server_state, rounds, self.assembly.memory)
            self.best.remove_former()
            self.rounds, self.last = rounds, perf_counter()
            self.cost = self.last - start


def is_evaluation_due(recipe: Recipe, history: History, row: Row) -> bool:
    """Whether a round is evaluated: at the interval, and when it is the last one by number or by budget."""
    rounds = row["round"] + 1
    return rounds % recipe.eval_every == 0 or is_run_over(recipe, history, row)


def is_run_over(recipe: Recipe, history: History, row: Row | None = None) -> bool:
    """Whether a run was stopped, or has reached its rounds or a budget, counting a row not in the history yet."""

    def sum_columns(*columns: str) -> float:
        return history.total(*columns) + sum(row[c] for c in columns if row)

    return bool(
        history.stop_reason
        or len(history) + (1 if row else 0) >= recipe.rounds
        or (recipe.until_accuracy and history.is_reached(recipe.until_accuracy))
        or (recipe.until_seconds and sum_columns("sim_seconds") >= recipe.until_seconds)
        or (recipe.until_bytes and sum_columns("bytes_down", "bytes_up") >= recipe.until_bytes)
        or (recipe.until_macs and sum_columns("macs_work") >= recipe.until_macs)
    )
