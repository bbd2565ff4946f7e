"""Samplers of Optuna as proposers: each batch of tries is proposed by what all tries before it came to.

A study is built anew from the judged tries for every batch, with a seed that depends on how many there are, so that a
tuning which was stopped proposes the same as one that never was.
"""

import logging
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from shoal.compare.propose import JudgedTry, Proposer
from shoal.compare.search_space import SearchSpace, Settings, ValueList, ValueRange
from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams

OPTUNA_SAMPLERS = ("tpe", "gp")
"""Tree-structured Parzen estimators, and Gaussian processes."""
STARTUP = 4
"""Tries that are drawn at random before a sampler goes by results."""


def make_optuna_proposer(name: str, side_by_side: int, better: str) -> Proposer:
    """A proposer of `side_by_side` tries at a time, by one of OPTUNA_SAMPLERS; a score is better "up" or "down"."""
    optuna: Any = import_optuna()

    def propose(space: SearchSpace, tries: int, seed: int, judged: Sequence[JudgedTry] = ()) -> list[Settings]:
        count = min(side_by_side, tries - len(judged))
        if count <= 0:
            return []
        sampler_seed = RandomStreams(seed).derive_seed(f"tune {name} {len(judged)}") % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = build_sampler(optuna, name, sampler_seed)
            study = optuna.create_study(direction="minimize" if better == "down" else "maximize", sampler=sampler)
            distributions = {key: make_distribution(optuna, dimension) for key, dimension in space.items()}
            for tried in judged:
                study.add_trial(make_trial(optuna, tried, space, distributions, better))
            return [pick_settings(study.ask(distributions).params, space) for _ in range(count)]

    return propose


def import_optuna() -> Any:
    try:
        optuna = import_module("optuna")
    except ImportError:
        problem = "optuna is not installed, which the samplers tpe and gp come from."
        raise ShoalError("missing-extra", problem, "Run: pip install 'shoal[tune]'.") from None
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


def build_sampler(optuna: Any, name: str, seed: int) -> Any:
    """The sampler of one batch."""
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=STARTUP)
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP)


def make_distribution(optuna: Any, dimension: ValueList | ValueRange) -> Any:
    """A range as it is; of a list the places of its values, in their order where they are numbers."""
    if isinstance(dimension, ValueRange):
        return optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    last, are_numbers = len(dimension.values) - 1, all(type(v) in (int, float) for v in dimension.values)
    if are_numbers:
        return optuna.distributions.IntDistribution(0, last)
    return optuna.distributions.CategoricalDistribution(tuple(range(last + 1)))


def pick_settings(params: dict[str, Any], space: SearchSpace) -> Settings:
    """The settings that a sampler's values stand for; drawn numbers have few digits."""
    return {key: d.values[params[key]] if isinstance(d, ValueList) else d.fit(params[key]) for key, d in space.items()}


def make_trial(optuna: Any, tried: JudgedTry, space: SearchSpace, distributions: dict[str, Any], better: str) -> Any:
    """A judged try as Optuna knows it; one that was given up is `pruned`, one that diverged has failed."""
    params = {
        key: d.values.index(tried.settings[key]) if isinstance(d, ValueList) else tried.settings[key]
        for key, d in space.items()
    }
    states, common = optuna.trial.TrialState, {"params": params, "distributions": distributions}
    if tried.score is None:
        worst = float("inf") if better == "down" else float("-inf")
        return optuna.trial.create_trial(state=states.PRUNED, intermediate_values={1: worst}, **common)
    if tried.is_stopped:
        return optuna.trial.create_trial(state=states.PRUNED, intermediate_values={tried.rounds: tried.score}, **common)
    return optuna.trial.create_trial(state=states.COMPLETE, value=tried.score, **common)
