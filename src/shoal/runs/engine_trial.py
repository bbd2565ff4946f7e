"""`auto` on a processor: what could be quicker than `serial` is tried, in turns, and taken if it clearly is."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

from shoal.core.model.net import Net
from shoal.core.types import Work
from shoal.engines.base import Task
from shoal.engines.host import LocalDevices
from shoal.engines.threads import use_threads
from shoal.runs.engine_choice import (
    EngineChoice,
    build_engine,
    estimate_local_steps,
    has_convolutions,
    use_engine_settings,
)
from shoal.runs.engine_trial_cache import TrialCache, measure_load

if TYPE_CHECKING:
    from shoal.runs.build import Assembly

log = logging.getLogger("shoal")
SHORT = 20.0
"""Seconds of work below which it is not worth looking for anything quicker than `serial`."""
TURN = 0.3
"""About how many seconds an engine trains when it is its turn."""
TURNS = 5
"""How often each of the finalists has a turn."""
FINALISTS = 2
"""How many engines are compared closely with `serial`: those that were quickest when each was tried once."""
WORTH, WORTH_THREADS = 1.1, 1.3
"""How many times as fast an engine must be; further threads slow everything down where a core is not theirs alone."""


@use_threads(1)
def find_quickest_engine(assembly: "Assembly", cores: int) -> EngineChoice:
    """By a trial, or by one of the past; a run so short that the trial would cost more than it saves is not tried."""
    recipe, usual = assembly.recipe, ceil(estimate_local_steps(assembly))
    plain = EngineChoice("serial", threads=recipe.threads or 1)
    try:
        alone = estimate_step_seconds(plain, assembly, usual)
    except Exception:  # whatever it is, the run itself will meet it and tell it better
        return plain
    total = alone * estimate_local_steps(assembly) * recipe.sample * recipe.rounds
    if total < SHORT:
        return replace(plain, why=f"about {max(1, round(total))} s of work")
    past, load = TrialCache(assembly, cores), measure_load(cores)
    if pick := past.read(load):
        return pick
    picks = [plain, *list_candidates(assembly.net, cores, recipe.sample, recipe.threads)]
    if not recipe.threads:
        for threads in sorted({min(4, cores), cores} - {1}):
            many = replace(plain, threads=threads)
            if estimate_step_seconds(many, assembly, usual) * WORTH_THREADS < alone:
                picks += [many, EngineChoice("batched", 1, threads=threads)]
    found = measure_contenders([Contender(pick, assembly, usual, alone) for pick in picks])
    if not found:
        return plain
    pick = pick_winner(found, len(picks))
    past.write(pick, load)
    return pick


def list_candidates(net: Net, cores: int, sample: int, threads: int = 0) -> list[EngineChoice]:
    """What to try on a processor, the plainest first: one device or several in a call, in one process or many."""
    widths = [1] if has_convolutions(net) else [1, 5, 10, 20]
    fitting = [w for w in widths if w == 1 or 2 * w * cores <= sample]
    found = [EngineChoice("batched", width, threads=threads or 1) for width in fitting]
    if cores > 1 and threads < 2 and hasattr(os, "fork"):
        found += [EngineChoice("pool", width, cores) for width in fitting]
    return found


class Contender:
    """An engine under trial, and the seconds that a step of one device took at each of its turns."""

    def __init__(self, pick: EngineChoice, assembly: "Assembly", usual: int, alone: float):
        count = min(assembly.recipe.sample, 4 * pick.workers * pick.width)
        steps = min(usual, max(4, round(TURN * pick.workers / (alone * count))))
        self.pick, self.crew = pick, build_engine(pick)
        self.tasks = make_short_tasks(assembly, count, steps)
        self.seconds: list[float] = []

    def take_turn(self) -> bool:
        """Whether it can train these devices at all."""
        began = perf_counter()
        try:
            with use_engine_settings(self.pick):
                self.crew.train(self.tasks)
        except Exception as error:
            log.debug("engine %s cannot be tried: %s", self.pick, error)
            return False
        self.seconds.append((perf_counter() - began) / sum(task.job.work.steps for task in self.tasks))
        return True

    def warm_up(self) -> bool:
        """A turn in which things are set up, and one that counts."""
        sound = self.take_turn()
        self.seconds.clear()
        return sound and self.take_turn()


def measure_contenders(contenders: Sequence[Contender]) -> dict[EngineChoice, list[float]]:
    """Seconds of the finalists, which took turns: whatever else the machine does meanwhile hits all of them."""
    plain, finalists = contenders[0], []
    try:
        for contender in contenders:
            finalists += [contender] if contender.warm_up() else []
            others = sorted((one for one in finalists if one is not plain), key=lambda one: one.seconds[0])
            for loser in others[FINALISTS:]:
                loser.crew.close()  # its processes would be in the way
                finalists.remove(loser)
        for _ in range(TURNS - 1):
            finalists = [one for one in finalists if one.take_turn()]
        return {one.pick: one.seconds for one in finalists}
    finally:
        for contender in contenders:
            contender.crew.close()


def pick_winner(found: Mapping[EngineChoice, Sequence[float]], tried: int) -> EngineChoice:
    """The quickest of what was measured, if it is so beyond doubt; else the plainest, which comes first.

    The slower quarter of what is quicker is set against the quicker quarter of what is slower, so that neither a single
    turn that something else got in the way of nor a lucky one decides anything or is told to anybody.
    """
    plain = best = next(iter(found))
    for pick, seconds in found.items():
        worth = WORTH_THREADS if pick.threads > best.threads else WORTH
        if compute_speedup(seconds, found[best]) > worth:
            best = pick
    if best == plain:
        return replace(plain, why=f"nothing was clearly faster in a trial of {tried}")
    speed = compute_speedup(found[best], found[plain])
    return replace(best, why=f"at least {speed:.2g} times as fast as serial in a trial of {tried}")


def compute_speedup(own: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast at least."""
    return sorted(other)[len(other) // 4] / sorted(own)[-1 - len(own) // 4]


def estimate_step_seconds(pick: EngineChoice, assembly: "Assembly", usual: int) -> float:
    """About how many seconds a step takes, from a few steps of one device."""
    crew, tasks, times = build_engine(pick), make_short_tasks(assembly, 1, min(4, usual)), []
    with use_engine_settings(pick):
        for _ in range(3):
            began = perf_counter()
            crew.train(tasks)
            times.append(perf_counter() - began)
    return min(times[1:]) / tasks[0].job.work.steps


def make_short_tasks(assembly: "Assembly", count: int, steps: int) -> list[Task]:
    """Tasks of the first round, cut down to a few steps; nothing of them is kept."""
    loop = assembly.loop
    assert isinstance(loop.engine, LocalDevices)
    jobs = loop.open_round(loop.start(assembly.net), 0).jobs
    short = [replace(j, work=Work(0.0, steps, j.work.batch, j.work.lr)) for j in jobs if j.device >= 0]
    return loop.engine.make_tasks([short[i % len(short)] for i in range(count)])
