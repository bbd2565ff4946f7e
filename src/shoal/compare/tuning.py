"""Tuning: every method is tried with equally many settings, judged on validation data, and the best of each is kept."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from shoal.compare.comparison import Comparison, play_all_runs
from shoal.compare.comparison_summary import describe_tuning, format_text_table, list_tries
from shoal.compare.optuna_samplers import OPTUNA_SAMPLERS, make_optuna_proposer
from shoal.compare.propose import JudgedTry, Proposer, propose_grid, propose_grid_or_draws
from shoal.compare.pruning import PRUNERS, list_rungs
from shoal.compare.search_space import Settings, ValueList, apply_settings, read_settings
from shoal.compare.tuning_spec import ON_TEST_HALF, TuningSpec, read_tuning_file, write_tuning_file
from shoal.core.errors import ShoalError
from shoal.display.data_frame import make_data_frame
from shoal.display.html import render_html_table
from shoal.runs.failed_runs import explain_failure
from shoal.runs.given_objects import list_handed_over_keys, refuse_missing_objects
from shoal.runs.headline import pick_best
from shoal.runs.history import History
from shoal.runs.recipe import DEFAULTS, Recipe
from shoal.runs.recipe_command import format_recipe_flags
from shoal.runs.recipe_files import TUNING_FILE
from shoal.runs.session import Watcher, is_run_over
from shoal.runs.start import BUDGET_KEYS, change_budgets, refuse_fewer_rounds
from shoal.runs.store import refuse_nonempty_folder
from shoal.storage.durable import remove_strays
from shoal.storage.files import write_bytes

LAST_EVALUATIONS = 5
"""A run is judged by the mean of so many evaluations at its end, since single ones jump."""
TUNING_RESULT = "tune.json"
"""The file in a tuning's folder with all tries and the best of each method."""


@dataclass(frozen=True, eq=False)
class TuningTry:
    """One method with one setting of its values, and the judgement of each seed; None for a run that diverged."""

    settings: Settings
    recipes: Sequence[Recipe]
    scores: Sequence[float | None]
    rung_scores: Mapping[int, float | None] = field(default_factory=dict)
    """Its score after so many rounds, where tries were compared then."""
    is_stopped: bool = False
    """Whether it was given up before its last round; it cannot win then."""

    @property
    def told_settings(self) -> Settings:
        """Its values as its runs had them, whole numbers among them."""
        return read_settings(self.recipes[0], self.settings)

    @property
    def rounds(self) -> int:
        """How many rounds each of its runs was played."""
        return max(self.rung_scores, default=self.recipes[0].rounds)

    @property
    def score(self) -> float | None:
        """The mean over seeds; None where a seed diverged."""
        values = [score for score in self.scores if score is not None]
        return mean(values) if values and len(values) == len(self.scores) else None

    @property
    def spread(self) -> float | None:
        """The deviation over seeds."""
        values = [score for score in self.scores if score is not None]
        return stdev(values) if len(values) > 1 and self.score is not None else None


@dataclass(frozen=True, eq=False)
class Tuning:
    """All tries of every method, in the order in which they were proposed."""

    spec: TuningSpec
    tries: Mapping[str, Sequence[TuningTry]]
    headline: str = "accuracy"
    better: str = "up"
    final: Comparison | None = None
    """The winners on the test half with fresh seeds, where the spec asks for it."""

    def find_best(self, method: str) -> TuningTry | None:
        """The try with the best mean of those played to the end, the first of equals; None where all diverged."""
        played = [t for t in self.tries[method] if t.score is not None and not t.is_stopped]
        best = pick_best((t.score for t in played), self.better)
        return next((t for t in played if t.score == best), None)

    def count_rounds(self, method: str) -> int:
        """The rounds that were played for a method in all, over tries and seeds."""
        return sum(t.rounds * len(t.recipes) for t in self.tries[method])

    def make_recipe(self, method: str) -> Recipe:
        """The recipe that runs the winner, on all training samples and judged on the test half."""
        best = self.find_best(method)
        if best is None:
            raise ShoalError("nothing-learnt", f"Every try of {method} diverged.", "Tune over smaller values of lr.")
        recipe = replace(self.spec.recipe, method=method, out="", **ON_TEST_HALF)
        return apply_settings(recipe, best.settings)

    def format_command(self, method: str) -> str:
        """The command that runs the winner, or the call where data or model are objects of a program.

        The test half is looked at there for the first time.
        """
        recipe = self.make_recipe(method)
        objects = list_handed_over_keys(recipe)
        if objects:
            changed = {f.name: getattr(recipe, f.name) for f in fields(Recipe) if f.name not in ("method", *objects)}
            values = [f"{key}={value!r}" for key, value in changed.items() if value != DEFAULTS[key]]
            return f"shoal.run({', '.join([repr(recipe.method), *(f'{key}={key}' for key in objects), *values])})"
        return " ".join(["shoal run", *format_recipe_flags(recipe, always=("method",), never=("out",))])

    def list_edges(self, method: str) -> list[str]:
        """Keys whose best value is the smallest or largest of those listed, so that a better one may lie beyond."""
        best, edges = self.find_best(method), []
        for key, dimension in self.spec.spaces[method].items() if best else ():
            values = dimension.values if isinstance(dimension, ValueList) else ()
            if len(values) > 2 and all(type(v) in (int, float) for v in values):
                edges += [key] if best and best.settings[key] in (min(values), max(values)) else []
        return edges

    def table(self) -> list[dict[str, Any]]:
        """One row per try: method, settings, mean and spread over seeds, the score of each seed, whether it is best."""
        return [
            {
                "method": method,
                "expression": t.recipes[0].method,
                "settings": t.told_settings,
                self.headline: t.score,
                "spread": t.spread,
                "seeds": list(t.scores),
                "rounds": t.rounds,
                "stopped": t.is_stopped,
                "best": t is self.find_best(method),
            }
            for method, tries in self.tries.items()
            for t in tries
        ]

    def to_pandas(self) -> Any:
        """The table as a DataFrame, with a column for each key that was tried."""
        rows = [row | row["settings"] for row in self.table()]
        return make_data_frame([{k: v for k, v in row.items() if k not in ("settings", "seeds")} for row in rows])

    def __repr__(self) -> str:
        return format_text_table(describe_tuning(self), *list_tries(self))

    def _repr_html_(self) -> str:
        head, rows = list_tries(self)
        return render_html_table(head, rows, describe_tuning(self))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        winners = {}
        for method in self.tries:
            best = self.find_best(method)
            if best:
                winners[method] = {
                    "expression": self.make_recipe(method).method,
                    "settings": best.told_settings,
                    self.headline: best.score,
                    "spread": best.spread,
                    "command": self.format_command(method),
                }
        return {
            "metric": self.headline,
            "validation": self.spec.recipe.validation,
            "last_evaluations": LAST_EVALUATIONS,
            "tries": self.spec.tries,
            "seeds": self.spec.seeds,
            "over": list(self.spec.over),
            "sampler": self.spec.sampler,
            "pruner": self.spec.pruner,
            "rounds_played": {method: self.count_rounds(method) for method in self.tries},
            "winners": winners,
            "tried": self.table(),
        } | ({"final": self.final.table()} if self.final else {})


def run_tuning(
    spec: TuningSpec, watch: Watcher | None = None, workers: int = 1, propose: Proposer | None = None
) -> Tuning:
    """Try every method; tries that differ only in numbers train side by side. With `out` it can be stopped and resumed.

    In a folder that holds the same tuning it goes on: runs that are complete are only read. `propose` takes the place
    of the sampler that the spec names.
    """
    if spec.pruner != "none" and not spec.recipe.out:  # runs are stopped and gone on with, which needs their folders
        with TemporaryDirectory(prefix="shoal-tune-") as place:
            with_folder = replace(spec, recipe=replace(spec.recipe, out=f"{place}/t"))
            return replace(run_tuning(with_folder, watch, workers, propose), spec=spec)
    tuning = Tuning(spec, {method: [] for method in spec.methods})
    proposed = propose_next_tries(tuning, propose)
    make_try_recipes(tuning, proposed)  # what is wrong with a value is told before there is a folder
    if spec.recipe.out:
        folder = Path(spec.recipe.out)
        if (folder / TUNING_FILE).is_file():
            refuse_other_tuning(spec, read_tuning_file(folder))
        else:
            refuse_nonempty_folder(folder)
        remove_strays(folder)
        write_tuning_file(folder, spec)
    while any(proposed.values()):
        tuning = judge_tries(tuning, proposed, watch, workers)
        proposed = propose_next_tries(tuning, propose)
    if spec.final_seeds:
        tuning = replace(tuning, final=run_winners(tuning, watch, workers))
    if spec.recipe.out:
        write_bytes(Path(spec.recipe.out) / TUNING_RESULT, json.dumps(tuning.to_dict(), indent=1).encode())
    return tuning


def run_winners(tuning: Tuning, watch: Watcher | None, workers: int) -> Comparison | None:
    """The winners on the test half, with seeds that no try had; None where every try of every method diverged."""
    best = {method: tuning.find_best(method) for method in tuning.tries}
    recipes = {m: tuning.spec.make_final_recipes(m, won.settings) for m, won in best.items() if won}
    return play_all_runs(recipes, tuning.spec.recipe.target, watch, workers) if recipes else None


def make_proposer(spec: TuningSpec, better: str) -> Proposer:
    """Who proposes tries, by the spec's sampler; scores are better "up" or "down"."""
    if spec.sampler in OPTUNA_SAMPLERS:
        return make_optuna_proposer(spec.sampler, spec.side_by_side, better)
    return propose_grid if spec.sampler == "grid" else propose_grid_or_draws


def propose_next_tries(tuning: Tuning, propose: Proposer | None) -> dict[str, list[Settings]]:
    """What is to be tried next of each method, given what has been judged."""
    spec = tuning.spec
    propose = propose or make_proposer(spec, tuning.better)
    judged = {
        method: [JudgedTry(t.settings, t.score, t.rounds, t.is_stopped) for t in tries]
        for method, tries in tuning.tries.items()
    }
    return {m: propose(spec.spaces[m], spec.tries, spec.recipe.seed, judged[m]) for m in spec.methods}


def make_try_recipes(tuning: Tuning, proposed: Mapping[str, Sequence[Settings]]) -> dict[tuple[str, int], list[Recipe]]:
    """The recipes of the proposed tries, by method and number of the try."""
    return {
        (method, number): tuning.spec.make_recipes(method, number, settings)
        for method, settings_to_try in proposed.items()
        for number, settings in enumerate(settings_to_try, len(tuning.tries[method]))
    }


def judge_tries(
    tuning: Tuning, proposed: Mapping[str, Sequence[Settings]], watch: Watcher | None, workers: int
) -> Tuning:
    """The tuning with the proposed tries of all methods played and judged; hopeless ones are given up on the way."""
    spec, recipes = tuning.spec, make_try_recipes(tuning, proposed)
    new = {
        (method, number): TuningTry(proposed[method][number - len(tuning.tries[method])], own, ())
        for (method, number), own in recipes.items()
    }
    rungs = list_rungs(spec.pruner, spec.recipe.rounds)
    for rung in rungs:
        going = {key: own for key, own in recipes.items() if not new[key].is_stopped}
        labels = {key: f"{key[0]}, try {key[1]}" for key in going}
        to_play = {labels[key]: [replace(r, rounds=rung) for r in own] for key, own in going.items()}
        played = play_all_runs(to_play, 0.0, watch, workers)
        metric = played.metrics.get(played.headline)
        tuning = replace(tuning, headline=played.headline, better=metric.better if metric else "up")
        for key in going:
            cut = [(replace(r.recipe, rounds=rung), r.history.cut(rung)) for r in played.results[labels[key]]]
            tried = replace(new[key], scores=[score_run(*run) for run in cut])
            new[key] = replace(tried, rung_scores={**tried.rung_scores, rung: tried.score})
        if rung < rungs[-1]:
            give_up_hopeless_tries(tuning, new, rung)
    tries = {method: list(known) for method, known in tuning.tries.items()}
    for (method, _), tried in new.items():
        tries[method].append(tried)
    return replace(tuning, tries=tries)


def give_up_hopeless_tries(tuning: Tuning, new: dict[tuple[str, int], TuningTry], rung: int) -> None:
    """Mark those tries of a batch as stopped that the pruner gives up after this round, method by method."""
    for method, known in tuning.tries.items():
        going = [key for key in new if key[0] == method and not new[key].is_stopped]
        earlier = [tried.rung_scores[rung] for tried in known if rung in tried.rung_scores]
        kept = PRUNERS[tuning.spec.pruner]([new[key].score for key in going], earlier, tuning.better)
        for key, goes_on in zip(going, kept):
            new[key] = replace(new[key], is_stopped=not goes_on)


def score_run(recipe: Recipe, history: History) -> float | None:
    """The mean headline of the last evaluations; None where one of them is not finite, or the run failed to learn."""
    last = len(history) if is_run_over(recipe, history) else 0
    evaluated = [row for row in history.rows if (row["round"] + 1) % recipe.eval_every == 0 or row["round"] + 1 == last]
    values: list[Any] = [row.get(history.headline) for row in evaluated[-LAST_EVALUATIONS:]]
    return None if not values or None in values or explain_failure(history) else float(mean(values))


def resume_tuning(
    path: Path, watch: Watcher | None = None, changes: Mapping[str, Any] | None = None, workers: int = 1
) -> Tuning:
    """Finish a tuning that was stopped, or let its runs go on for longer."""
    spec = read_tuning_file(path)
    refuse_missing_objects(spec.recipe, path)
    if changes:
        refuse_fewer_rounds(path, spec.recipe, changes)
        spec = replace(spec, recipe=change_budgets(spec.recipe, changes))
        write_tuning_file(path, spec)
    return run_tuning(spec, watch, workers)


def refuse_other_tuning(spec: TuningSpec, recorded: TuningSpec) -> None:
    """A folder that holds another tuning is not gone on with; budgets may differ."""
    for what in ("methods", "over", "tries", "seeds", "sampler", "pruner", "side_by_side"):
        if getattr(spec, what) != getattr(recorded, what):
            raise other_tuning_error(spec, what, getattr(recorded, what))
    for f in fields(Recipe):
        if f.name not in (*BUDGET_KEYS, "out", "data_dir", "address"):
            if getattr(spec.recipe, f.name) != getattr(recorded.recipe, f.name):
                raise other_tuning_error(spec, f.name, getattr(recorded.recipe, f.name))


def other_tuning_error(spec: TuningSpec, what: str, recorded: Any) -> ShoalError:
    problem = f"{spec.recipe.out} holds a tuning with {what} = {recorded!r}, and not the one that was asked for."
    advice = f"`shoal resume {spec.recipe.out}` goes on with that one; or give another --out."
    return ShoalError("other-recipe", problem, advice)
