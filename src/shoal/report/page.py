"""The page of a report: one HTML file that needs nothing else, drawn by a small script from numbers inside it."""

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from shoal.display.curve_style import COLOURS
from shoal.report.citations import cite_method
from shoal.report.facts import collect_facts, list_recipe_lines
from shoal.report.run_groups import RunGroup, read_budgets, read_groups
from shoal.report.tables import (
    render_budgets_table,
    render_confusions,
    render_devices_table,
    render_results_table,
    render_summaries,
    render_targets_table,
)

__all__ = ["read_budgets", "collect_facts", "read_groups", "render_page"]


def render_page(groups: Sequence[RunGroup], facts: dict[str, Any], pictures: str) -> str:
    """The page as text. All that comes from a recipe or a history is escaped; no script but ours may run."""
    script = read_asset("page.js")
    names = [group.label for group in groups]
    title = ", ".join(names)
    return Template(read_asset("page.html")).substitute(
        title=escape(title if len(title) <= 90 else f"{len(names)} methods" if len(names) > 1 else "One method"),
        hash=b64encode(sha256(script.encode()).digest()).decode(),
        style=read_asset("page.css"),
        setting=escape(describe_common_settings(groups)),
        summaries=render_summaries(facts),
        table=render_results_table(facts) + render_targets_table(facts) + render_budgets_table(facts),
        devices_table=render_devices_table(facts["groups"]),
        confusions=render_confusions(facts["groups"]),
        confusions_hidden="" if any(group["confusion"] for group in facts["groups"]) else " hidden",
        recipes=render_recipes(groups),
        citations=render_citations(groups),
        pictures=escape(pictures),
        facts=embed_json(facts | {"palette": len(COLOURS)}),
        script=script,
    )


def read_asset(name: str) -> str:
    return files("shoal.report").joinpath(name).read_text(encoding="utf-8")


def embed_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def describe_common_settings(groups: Sequence[RunGroup]) -> str:
    """What all the runs have in common, in one line."""

    def format_common_value(key: str, form: str = "{}") -> str:
        values = {getattr(group.recipe, key) for group in groups}
        return form.format(values.pop()) if len(values) == 1 else ""

    seeds = max(len(group.runs) for group in groups)
    texts = [
        format_common_value("data"),
        format_common_value("model"),
        format_common_value("split"),
        format_common_value("devices", "{:,} devices"),
    ]
    texts += [
        format_common_value("sample", "{:,} per round"),
        format_common_value("rounds", "{:,} rounds"),
        f"{seeds} seed{'s' * (seeds > 1)}",
    ]
    return " · ".join(text for text in texts if text)


def render_recipes(groups: Sequence[RunGroup]) -> str:
    details = []
    for group, lines in zip(groups, list_recipe_lines(groups)):
        text = "\n".join(
            f"<mark>{escape(f'{key} = {value}')}</mark>" if differs else escape(f"{key} = {value}")
            for key, value, differs in lines
        )
        details.append(f"<details><summary>{escape(group.label)}</summary><pre>{text}</pre></details>")
    return "\n".join(details)


def render_citations(groups: Sequence[RunGroup]) -> str:
    """The papers of all parts, each once."""
    entries = dict.fromkeys(entry for group in groups for entry in cite_method(group.recipe.method))
    return escape("\n\n".join(entries))
