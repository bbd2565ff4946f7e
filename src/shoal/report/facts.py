"""The numbers of a report: curves, costs by cause, splits and devices, as plain lists that JSON can hold."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean, pstdev
from typing import Any, cast

import numpy as np

from shoal.compare.budgets import CHEAPEST, Budgets
from shoal.compare.comparison import Comparison
from shoal.core.metric import EVALUATED, Metric
from shoal.report.plots import assign_cause_colours, rank_cause
from shoal.report.run_groups import PLACES, ReportedRun, RunGroup
from shoal.runs.recipe_values import format_toml

POINTS, BARS, DEVICES, ROWS, CONFUSED = 600, 100, 200, 60, 40
"""The most points of a curve, bars of a stack, devices and classes of a split, and classes of a table of confusions
that a page shows."""


def collect_facts(groups: Sequence[RunGroup], budgets: Budgets = CHEAPEST) -> dict[str, Any]:
    """All numbers of the page: per method curves, costs and table rows; metrics, targets, colours and splits.

    `metrics` are those of the loop that are drawn, `told` those of parts, and `about` says of all what readers show.
    """
    comparison = Comparison(cast(Any, {group.label: group.runs for group in groups}), budgets=budgets)
    group_facts, at_budgets = [collect_group_facts(group) for group in groups], comparison.at_budgets()
    found = [name for name in comparison.metrics if any(name in group["curves"] for group in group_facts)]
    for group in group_facts:
        group["table"]["at_budgets"] = at_budgets[group["label"]]
    return {
        "groups": group_facts,
        "metrics": [name for name in found if "." not in name],
        "told": [name for name in found if "." in name],
        "about": {
            name: describe_metric(metric)
            for name, metric in comparison.metrics.items()
            if name in (*found, comparison.headline) or any(g["table"].get(name) is not None for g in group_facts)
        },
        "headline": comparison.headline,
        "targets": sorted({g.recipe.target for g in groups if g.recipe.target}),
        "colours": {what: assign_cause_colours(group_facts, what) for what in ("bytes", "seconds")},
        "splits": collect_splits(groups),
        "budgets": budgets.describe(comparison.headline) if budgets or len(group_facts) > 1 else None,
    }


def describe_metric(metric: Metric) -> dict[str, Any]:
    """What the page shows of a metric: its title, its label, its unit, and whether and how tables compare it."""
    return {
        "title": metric.title,
        "label": metric.label or metric.name,
        "unit": metric.unit,
        "better": metric.better,
        "compared": metric.compared,
        "total": metric.total,
    }


def collect_group_facts(group: RunGroup) -> dict[str, Any]:
    """One method, over its seeds."""
    length = min(len(run.history) for run in group.runs)
    drawn = {name: None for run in group.runs for name, metric in run.history.metrics.items() if metric.drawn}
    curves = {name: found for name in drawn if (found := compute_curve(group.runs, length, name))}
    return {
        "label": group.label,
        "seeds": [run.recipe.seed for run in group.runs],
        "rounds": length,
        "curves": curves,
        "bytes": stack_costs(group.runs, length, split_bytes_by_cause),
        "seconds": stack_costs(group.runs, length, split_seconds_by_cause),
        "devices": summarise_devices(group.runs),
        "classes": average_class_accuracy(group.runs),
        "confusion": average_confusion(group.runs),
        "table": make_table_row(group),
    }


def compute_curve(runs: Sequence[ReportedRun], length: int, metric: str) -> dict[str, list[float]] | None:
    """Lowest, mean and highest value over seeds, at the rounds all of them evaluated, against four kinds of cost."""
    at = [r for r in range(length) if all(run.history.rows[r].get(metric) is not None for run in runs)]
    if not at:
        return None
    at = [at[i] for i in pick_evenly(len(at), POINTS)]
    y = np.array([[run.history.rows[r][metric] for r in at] for run in runs], dtype=float)

    def accumulate_cost(*columns: str) -> list[float]:
        sums = [np.cumsum([sum(row[c] for c in columns) for row in run.history.rows], dtype=float) for run in runs]
        return shorten_numbers(np.mean([s[at] for s in sums], axis=0))

    return {
        "rounds": [r + 1 for r in at],
        "seconds": accumulate_cost("sim_seconds"),
        "bytes": accumulate_cost("bytes_down", "bytes_up"),
        "macs": accumulate_cost("macs_work"),
        "low": shorten_numbers(y.min(0)),
        "mean": shorten_numbers(y.mean(0)),
        "high": shorten_numbers(y.max(0)),
    }


def stack_costs(
    runs: Sequence[ReportedRun], length: int, causes_of: Callable[[dict], dict[str, float]]
) -> dict[str, Any]:
    """What a round cost, by cause: the mean over seeds, and over neighbouring rounds where there are many."""
    rows = [[causes_of(run.history.rows[r]) for run in runs] for r in range(length)]
    causes = sorted({cause for row in rows for found in row for cause in found}, key=rank_cause)
    edges = np.linspace(0, length, min(length, BARS) + 1).astype(int).tolist()
    values = {
        cause: [
            mean(found.get(cause, 0.0) for row in rows[low:high] for found in row)
            for low, high in zip(edges, edges[1:])
        ]
        for cause in causes
    }
    return {"edges": edges, "causes": causes, "values": [shorten_numbers(values[cause]) for cause in causes]}


def split_bytes_by_cause(row: dict[str, Any]) -> dict[str, float]:
    """The bytes of a round by direction and by what they carried."""
    by_cause: dict[str, float] = {}
    for way in ("down", "up"):
        by = (row.get("bytes_by") or {}).get(way) or {}
        by_cause |= {f"{way}: {cause}": value for cause, value in by.items()} if isinstance(by, dict) else {way: by}
        rest = row[f"bytes_{way}"] - sum(v for k, v in by_cause.items() if k.startswith(way))
        if rest > 0:
            by_cause[f"{way}: other" if by else way] = rest
    return by_cause


def split_seconds_by_cause(row: dict[str, Any]) -> dict[str, float]:
    """The simulated time of a round by what the slowest device did."""
    by_cause = {k: v for k, v in (row.get("seconds_by") or {}).items() if not isinstance(v, dict)}
    rest = row["sim_seconds"] - sum(by_cause.values())
    return by_cause | ({"other" if by_cause else "all": rest} if rest > 1e-6 * row["sim_seconds"] else {})


def summarise_devices(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """The accuracy of all devices of all seeds in rising order; mean, worst tenth and spread as means over seeds."""
    metric = runs[0].history.metrics.get("personal_mean") if runs[0].recipe.has_own_tests else None
    is_error = metric is not None and metric.better == "down"  # the worst come first
    accuracies = [sorted(run.devices, reverse=is_error) for run in runs if run.devices]
    if not accuracies:
        return None
    pooled = sorted((v for values in accuracies for v in values), reverse=is_error)
    return {
        "sorted": shorten_numbers([pooled[i] for i in pick_evenly(len(pooled), POINTS)]),
        "count": len(accuracies[0]),
        "mean": mean(map(mean, accuracies)),
        "worst": mean(mean(values[: max(1, len(values) // 10)]) for values in accuracies),
        "spread": mean(map(pstdev, accuracies)),
    }


def average_class_accuracy(runs: Sequence[ReportedRun]) -> list[float | None] | None:
    """The accuracy of each class at the end, as the mean over seeds; too many classes for a picture have none."""
    by_seed = [last for run in runs if (last := run.history.last("per_class"))]
    if not by_seed or len({len(values) for values in by_seed}) > 1 or len(by_seed[0]) > DEVICES:
        return None
    columns = [[v for v in column if v is not None] for column in zip(*by_seed)]
    return [shorten_numbers([mean(column)])[0] if column else None for column in columns]


def average_confusion(runs: Sequence[ReportedRun]) -> list[list[float | None]] | None:
    """Of the samples of each true class (row) the shares that got each class, at the last evaluation, over seeds.

    None where no run recorded it, or where there are too many classes for a table.
    """
    by_seed = [last for run in runs if (last := run.history.last("confusion"))]
    sizes = {(len(table), *(len(row) for row in table)) for table in by_seed}
    if not by_seed or len(sizes) > 1 or len(by_seed[0]) > CONFUSED or set(*sizes) != {len(by_seed[0])}:
        return None
    counts = np.sum(np.array(by_seed, dtype=float), axis=0)
    totals = counts.sum(1)
    return [[*shorten_numbers(row / total)] if total else [None] * len(row) for row, total in zip(counts, totals)]


def collect_splits(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """The split of the first seed of every group, each different one once."""
    splits: list[dict[str, Any]] = []
    for group in groups:
        run = next((r for r in group.runs if r.split), None)
        if run is None or run.split is None:
            continue
        split = condense_split(run.split)
        same = next((s for s in splits if all(s[key] == split[key] for key in split if key != "all")), None)
        if same:
            same["labels"].append(group.label)
        else:
            splits.append(split | {"labels": [group.label], "seed": run.recipe.seed, "split": run.recipe.split})
            splits[-1]["all"] = max(splits[-1]["all"], run.recipe.devices)
    return splits


def condense_split(split: dict[str, Any]) -> dict[str, Any]:
    """A table of classes and devices; many classes are drawn together, of many devices the first are drawn."""
    labels = np.array(split["labels"][:DEVICES], dtype=float)
    edges = np.linspace(0, labels.shape[1], min(labels.shape[1], ROWS) + 1).astype(int)
    counts = np.add.reduceat(labels, edges[:-1], axis=1)
    return {
        "counts": [[int(n) for n in row] for row in counts],
        "rows": [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in zip(edges.tolist(), edges[1:].tolist())],
        "sizes": split["sizes"][:DEVICES],
        "degrees": shorten_numbers(split["degrees"][:DEVICES]) if "degrees" in split else None,
        "degree": split.get("degree"),
        "all": len(split["sizes"]),
        "server": split.get("server"),
    }


def make_table_row(group: RunGroup) -> dict[str, Any]:
    """End values and costs, as a comparison counts them."""
    row = Comparison(cast(Any, {group.label: group.runs}), group.recipe.target).table()[0]
    row["rounds"] = mean(len(run.history) for run in group.runs)
    row["target"] = group.recipe.target
    row["unfinished"] = sum(not run.is_finished for run in group.runs)
    row["stop_reasons"] = list(dict.fromkeys(run.history.stop_reason for run in group.runs if run.history.stop_reason))
    for way in ("bytes_down", "bytes_up"):
        row[way] = mean(run.history.total(way) for run in group.runs)
    for name in (metric.name for metric in EVALUATED if metric.name != "accuracy"):
        ends = [run.history.last(name) for run in group.runs]
        ends = [end for end in ends if end is not None]
        row[name] = mean(ends) if ends else None
    return row


def list_recipe_lines(groups: Sequence[RunGroup]) -> list[list[tuple[str, str, bool]]]:
    """For each group the key, the value and whether it differs between groups."""
    recipes = [asdict(group.recipe) for group in groups]
    lines = []
    for group, recipe in zip(groups, recipes):
        shown = {key: format_toml(value) for key, value in recipe.items() if key not in PLACES}
        shown["seed"] = ", ".join(str(run.recipe.seed) for run in group.runs)
        differs = {key: key != "seed" and any(r[key] != recipe[key] for r in recipes) for key in shown}
        lines.append([(key, value, differs[key]) for key, value in shown.items()])
    return lines


def pick_evenly(count: int, most: int) -> list[int]:
    """At most so many places out of a count, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def shorten_numbers(values: Any) -> list[float]:
    """Seven digits are more than a picture shows."""
    return [float(f"{float(v):.7g}") for v in values]
