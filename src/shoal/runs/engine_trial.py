"""The engine `auto` on a CPU: engines are timed against `serial` in turns, and one that is clearly faster is chosen."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

from shoal.core.model.net import Net
from shoal.core.task import Task
from shoal.core.types import Work
from shoal.engines.threads import use_threads
from shoal.runs.engine_choice import (
    EngineChoice,
    build_engine,
    estimate_local_steps,
    has_convolutions,
    use_engine_settings,
    wants_native_kernels,
)
from shoal.runs.engine_trial_cache import TrialCache, measure_load

if TYPE_CHECKING:
    from shoal.runs.build import Assembly

log = logging.getLogger("shoal")
SHORT = 20.0
"""Seconds of work below which no trial is made and `serial` is chosen."""
TURN = 0.3
"""About how many seconds an engine trains in one turn."""
TURNS = 5
"""Turns of each finalist."""
FINALISTS = 2
"""Engines that are compared with `serial` over all turns: the quickest ones of the first turn."""
WORTH, WORTH_THREADS = 1.1, 1.3
"""How many times as fast an engine must be; more for further threads, which lose most on a machine that is shared."""
WORTH_AT_BEST = 1.5
"""How many times as fast by the best turn of each is enough, too: other work on the machine delays that one least."""


@use_threads(1)
def find_quickest_engine(assembly: "Assembly", cores: int) -> EngineChoice:
    """The quickest engine, by a trial or a cached one; a run shorter than SHORT gets `serial` without a trial."""
    recipe, local_steps = assembly.recipe, ceil(estimate_local_steps(assembly))
    serial = EngineChoice("serial", threads=recipe.threads or 1)
    try:
        serial_seconds = estimate_step_seconds(serial, assembly, local_steps)
    except Exception:  # the run itself will meet the same error and explain it better
        return serial
    total = serial_seconds * estimate_local_steps(assembly) * recipe.sample * recipe.rounds
    if total < SHORT:
        return replace(serial, why=f"about {max(1, round(total))} s of work")
    cache, load = TrialCache(assembly, cores), measure_load(cores)
    if pick := cache.read(load):
        return pick
    candidates = list_candidates(assembly.net, cores, recipe.sample, recipe.threads)
    picks = [serial, *(replace(pick, native=wants_native_kernels(assembly, pick)) for pick in candidates)]
    if not recipe.threads:
        for threads in sorted({min(4, cores), cores} - {1}):
            threaded = replace(serial, threads=threads)
            if estimate_step_seconds(threaded, assembly, local_steps) * WORTH_THREADS < serial_seconds:
                picks += [threaded, EngineChoice("batched", 1, threads=threads)]
    seconds = measure_contenders([Contender(pick, assembly, local_steps, serial_seconds) for pick in picks])
    if not seconds:
        return serial
    pick = pick_winner(seconds, len(picks))
    cache.write(pick, load)
    return pick


def list_candidates(net: Net, cores: int, sample: int, threads: int = 0) -> list[EngineChoice]:
    """Engines to try on a CPU, the plainest first: one or several devices in a call, in one process or many."""
    widths = [1] if has_convolutions(net) else [1, 5, 10, 20]
    fitting = [w for w in widths if w == 1 or 2 * w * cores <= sample]
    candidates = [EngineChoice("batched", width, threads=threads or 1) for width in fitting]
    if cores > 1 and threads < 2 and hasattr(os, "fork"):
        candidates += [EngineChoice("pool", width, cores) for width in fitting]
    return candidates


class Contender:
    """An engine under trial, and the seconds per local step of one device in each of its turns."""

    def __init__(self, pick: EngineChoice, assembly: "Assembly", local_steps: int, serial_seconds: float):
        count = min(assembly.recipe.sample, 4 * pick.workers * pick.width)
        steps = min(local_steps, max(4, round(TURN * pick.workers / (serial_seconds * count))))
        self.pick, self.engine = pick, build_engine(pick)
        self.tasks = make_short_tasks(assembly, count, steps)
        self.seconds: list[float] = []

    def take_turn(self) -> bool:
        """Train for one turn and note its seconds; False where the engine cannot train these devices."""
        start = perf_counter()
        try:
            with use_engine_settings(self.pick):
                self.engine.train(self.tasks)
        except Exception as error:
            log.debug("engine %s cannot be tried: %s", self.pick, error)
            return False
        self.seconds.append((perf_counter() - start) / sum(task.job.work.steps for task in self.tasks))
        return True

    def warm_up(self) -> bool:
        """Take a turn for setting up, which is not noted, and one that is; False where the engine cannot train."""
        can_train = self.take_turn()
        self.seconds.clear()
        return can_train and self.take_turn()


def measure_contenders(contenders: Sequence[Contender]) -> dict[EngineChoice, list[float]]:
    """Seconds per step of each finalist; they take turns, so that other load on the machine hits all of them."""
    serial, finalists = contenders[0], []
    try:
        for contender in contenders:
            finalists += [contender] if contender.warm_up() else []
            others = sorted((one for one in finalists if one is not serial), key=lambda one: one.seconds[0])
            for loser in others[FINALISTS:]:
                loser.engine.close()  # its processes would be in the way
                finalists.remove(loser)
        for _ in range(TURNS - 1):
            finalists = [one for one in finalists if one.take_turn()]
        return {one.pick: one.seconds for one in finalists}
    finally:
        for contender in contenders:
            contender.engine.close()


def pick_winner(measured: Mapping[EngineChoice, Sequence[float]], tried: int) -> EngineChoice:
    """The quickest engine, if it is beyond doubt by `is_clearly_faster`; else the plainest, which comes first."""
    serial = best = next(iter(measured))
    for pick, seconds in measured.items():
        worth = WORTH_THREADS if pick.threads > best.threads else WORTH
        if is_clearly_faster(seconds, measured[best], worth):
            best = pick
    if best == serial:
        return replace(serial, why=f"nothing was clearly faster in a trial of {tried}")
    speed = compute_speedup(measured[best], measured[serial])
    if speed > WORTH:
        return replace(best, why=f"at least {speed:.2g} times as fast as serial in a trial of {tried}")
    speed = min(measured[serial]) / min(measured[best])
    return replace(best, why=f"{speed:.2g} times as fast as serial in the best turns of a trial of {tried}")


def is_clearly_faster(seconds: Sequence[float], other_seconds: Sequence[float], worth: float) -> bool:
    """Whether the quartiles of the turns say so or, where a busy machine spreads them, the best turn of each."""
    by_best_turn = min(other_seconds) / min(seconds)
    return compute_speedup(seconds, other_seconds) > worth or by_best_turn > max(worth, WORTH_AT_BEST)


def compute_speedup(seconds: Sequence[float], other_seconds: Sequence[float]) -> float:
    """How many times as fast: the upper quartile of its seconds against the lower of the other's.

    Quartiles keep a single disturbed or lucky turn from deciding.
    """
    return sorted(other_seconds)[len(other_seconds) // 4] / sorted(seconds)[-1 - len(seconds) // 4]


def estimate_step_seconds(pick: EngineChoice, assembly: "Assembly", local_steps: int) -> float:
    """About how many seconds a local step takes, from a few steps of one device."""
    engine, tasks, times = build_engine(pick), make_short_tasks(assembly, 1, min(4, local_steps)), []
    with use_engine_settings(pick):
        for _ in range(3):
            start = perf_counter()
            engine.train(tasks)
            times.append(perf_counter() - start)
    return min(times[1:]) / tasks[0].job.work.steps


def make_short_tasks(assembly: "Assembly", count: int, steps: int) -> list[Task]:
    """Training tasks of the first round with few steps; their results are thrown away."""
    loop = assembly.loop
    jobs = loop.open_round(loop.start(assembly.net), 0).jobs
    short = [replace(j, work=Work(0.0, steps, j.work.batch, j.work.lr)) for j in jobs if j.device >= 0]
    return loop.host.make_tasks([short[i % len(short)] for i in range(count)])
