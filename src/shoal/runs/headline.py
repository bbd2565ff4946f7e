"""The headline of a run: the metric that its target, `until_accuracy` and comparisons at equal cost are about."""

from collections.abc import Iterable, Mapping

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.metric import Metric
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_values import bad_value_error


def check_headline(recipe: Recipe, metrics: Mapping[str, Metric], own: str = "accuracy") -> None:
    """Refuse a headline that the rows of this run do not have, that has no direction, or cannot reach its target.

    `own` is the headline of the task, which counts where the recipe names none.
    """
    headline = recipe.headline or own
    metric = metrics.get(headline)
    if metric is None:
        raise unknown_name_error("headline", headline, [m.name for m in metrics.values() if m.better])
    if not metric.better:
        problem = f"headline is {metric.name}, and neither more nor less of it is better, so that it has no target."
        raise ShoalError("bad-value", problem, f"Give one such as {own} or loss.")
    if metric.asked and metric.asked not in recipe.metrics:
        problem = f"headline is {metric.name}, which is measured only where it is asked for."
        raise ShoalError("bad-value", problem, f"Add --metrics {metric.asked}.")
    for key in ("target", "until_accuracy"):
        if metric.unit == "share" and getattr(recipe, key) > 1:
            raise bad_value_error(key, getattr(recipe, key), f"from 0 to 1, as {metric.name} is")


def is_at_least(value: float, target: float, better: str) -> bool:
    """Whether a value is as good as a target, of a metric that is better "up" or "down"."""
    return value <= target if better == "down" else value >= target


def is_improvement(value: float, best: float | None, better: str) -> bool:
    """Whether a value is better than the best so far, of a metric that is better "up" or "down"."""
    return best is None or (value != best and is_at_least(value, best, better))


def pick_best(values: Iterable[float | None], better: str) -> float | None:
    """The best of the values that are there, of a metric that is better "up" or "down"; None where there is none."""
    there = [value for value in values if value is not None]
    return (min if better == "down" else max)(there, default=None)
