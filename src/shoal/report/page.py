"""The page of a report: one HTML file that needs nothing else, drawn by a small script from numbers inside it."""

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from shoal.report.citations import cited
from shoal.report.facts import facts, recipe_lines
from shoal.report.plots import COLOURS
from shoal.report.run_groups import Group, budgets_in, groups_in
from shoal.report.tables import budgets_table, devices_table, results_table, summaries, targets_table

__all__ = ["budgets_in", "facts", "groups_in", "render"]


def render(groups: Sequence[Group], found: dict[str, Any], pictures: str) -> str:
    """The page as text. All that comes from a recipe or a history is escaped; no script but ours may run."""
    script = asset("page.js")
    names = [group.label for group in groups]
    title = ", ".join(names)
    return Template(asset("page.html")).substitute(
        title=escape(title if len(title) <= 90 else f"{len(names)} methods" if len(names) > 1 else "One method"),
        hash=b64encode(sha256(script.encode()).digest()).decode(),
        style=asset("page.css"),
        setting=escape(setting(groups)),
        summaries=summaries(found["groups"]),
        table=results_table(found) + targets_table(found) + budgets_table(found),
        devices_table=devices_table(found["groups"]),
        recipes=recipes(groups),
        citations=citations(groups),
        pictures=escape(pictures),
        facts=embedded(found | {"palette": len(COLOURS)}),
        script=script,
    )


def asset(name: str) -> str:
    return files("shoal.report").joinpath(name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def setting(groups: Sequence[Group]) -> str:
    """What all the runs have in common, in one line."""

    def common(key: str, told: str = "{}") -> str:
        values = {getattr(group.recipe, key) for group in groups}
        return told.format(values.pop()) if len(values) == 1 else ""

    seeds = max(len(group.runs) for group in groups)
    told = [common("data"), common("model"), common("split"), common("devices", "{:,} devices")]
    told += [common("sample", "{:,} per round"), common("rounds", "{:,} rounds"), f"{seeds} seed{'s' * (seeds > 1)}"]
    return " · ".join(text for text in told if text)


def recipes(groups: Sequence[Group]) -> str:
    made = []
    for group, lines in zip(groups, recipe_lines(groups)):
        told = "\n".join(
            f"<mark>{escape(f'{key} = {value}')}</mark>" if differs else escape(f"{key} = {value}")
            for key, value, differs in lines
        )
        made.append(f"<details><summary>{escape(group.label)}</summary><pre>{told}</pre></details>")
    return "\n".join(made)


def citations(groups: Sequence[Group]) -> str:
    """The papers of all parts, each once."""
    entries = dict.fromkeys(entry for group in groups for entry in cited(group.recipe.method))
    return escape("\n\n".join(entries))
