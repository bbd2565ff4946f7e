"""Writes what the documentation says about the code: methods, recipe keys, history columns, exit codes, commands.

    python tools/generate_docs.py            rewrite the sections between markers, and two whole pages
    python tools/generate_docs.py --check    change nothing; end with 1 where a page is not what would be written

`make generate` runs the first, the tests the second. The sections and their writers are listed in `WRITERS`.
"""

import ast
import inspect
import json
import re
import sys
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

from audit_page import write_audit_page
from command_page import write_command_page
from markers import ROOT, fill_sections, format_cell, format_table, list_sections, write_changes
from method_choice import METHOD_PAGES, make_writers
from round_drawing import draw_round

import shoal
from shoal.cli.listings import read_first_sentence
from shoal.cli.recipe_flags import PANELS
from shoal.core.builtin_tasks import TASKS
from shoal.core.compose import Method
from shoal.core.errors import ERROR_KINDS
from shoal.core.metric import AMOUNTS, COLUMNS, METRICS, Metric, list_part_metrics
from shoal.core.part import POINTS, Neutral, Part
from shoal.data.dataset import DATASETS
from shoal.data.sources import SOURCES
from shoal.data.splits import SPLITS
from shoal.fleet.fleets import FLEET_FORMS
from shoal.models import MODELS
from shoal.parts import PRESETS, find_shipped_parts
from shoal.report.citations import ENTRIES, FEDAVG_KEY
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_values import format_toml

IDEA = re.compile(r"(?:(?P<title>[^:(]{1,40}): )?(?P<idea>.*?)(?: \([^()]*\d{4}[^()]*\))?\.?")
"""A part's module docstring begins with its title, the idea in one sentence and the paper in brackets."""
FEDAVG_IDEA = "the empty list of parts: the mean of the replies, weighted by samples"

POINTS_BY_SIDE = {
    "once": "model enrol declare_card taps",
    "state": "init_server init_device",
    "server, before training": "select plan send",
    "device": "data begin draw pad_extras mask objective gradient step end measure declare_extras",
    "wire": "encode decode outline error",
    "server, after training": "sift weigh combine serve prune observe evaluate",
    "a device's own model": "personal finetune",
}
"""The methods that a part may override, as docs/explanation/the-round.md groups them."""


# methods --------------------------------------------------------------------------------------------------------------
def read_idea(part: type[Part]) -> str:
    """What the part is for, from its module's docstring, or from its own where a module holds several parts."""
    parts = find_shipped_parts().values()
    if sum(other.__module__ == part.__module__ for other in parts) > 1:
        return read_first_sentence(part).rstrip(".")
    about = " ".join((sys.modules[part.__module__].__doc__ or "").strip().split("\n\n")[0].split())
    found = IDEA.fullmatch(about)
    return found["idea"] if found else read_first_sentence(part).rstrip(".")


def begin_small(idea: str) -> str:
    """With a small first letter, unless a name stands there."""
    return idea if idea[1:2].isupper() else idea[:1].lower() + idea[1:]


def list_points(part: type[Part]) -> str:
    """The points of a round at which a part acts, those whose value it sets marked."""
    points = [p for p in POINTS if p in part.sets or getattr(part, p) is not getattr(Part, p)]
    return ", ".join(f"{point} (sets)" if point in part.sets else point for point in points)


def format_neutral(neutral: Neutral | None) -> str:
    """The setting at which a part changes nothing, and under which condition."""
    if neutral is None:
        return "none"
    setting = ", ".join(f"{name}={value!r}" for name, value in neutral.settings.items())
    until = f"the first {neutral.rounds} rounds" if (neutral.rounds or 0) > 1 else "the first round"
    words = (
        [f"`{setting}`"] * bool(setting) + [until] * bool(neutral.rounds) + ["equal devices"] * neutral.equal_devices
    )
    return ", ".join(words) or "always"


def link_paper(name: str) -> str:
    """The first paper that a part cites, by its address."""
    part = find_shipped_parts().get(name)
    keys = part.cite if part else (FEDAVG_KEY,)
    if unknown := set(keys) - ENTRIES.keys():
        raise SystemExit(f"{name} cites {', '.join(sorted(unknown))}, which src/shoal/report/bibliography.py lacks.")
    entry = ENTRIES[keys[0]] if keys else ""
    known = dict(re.findall(r"^ +(\w+) += \{(.*?)(?:\},?)?$", entry, re.MULTILINE))
    arxiv = re.search(r"\b\d{4}\.\d{5}\b", known.get("eprint", known.get("journal", "")))
    if arxiv:
        return f"[{arxiv[0]}](https://arxiv.org/abs/{arxiv[0]})"
    author = f"{known['author'].split(',')[0]} et al. {known['year']}" if known else ""
    return f"[{author}](https://doi.org/{known['doi']})" if "doi" in known else author


def write_methods() -> str:
    """The table of parts with formulas and neutral settings."""
    header = ["part", "what it does", "how", "acts at", "neutral setting", "paper"]
    rows = [["fedavg", FEDAVG_IDEA, "", "", ""]]
    for name, part in find_shipped_parts().items():
        idea, how = read_idea(part), read_first_sentence(part)
        told = format_cell(how) if how.rstrip(".") != idea else ""
        neutral = format_cell(format_neutral(part.neutral))
        rows.append([name, format_cell(begin_small(idea)), told, list_points(part), neutral])
    return format_table(header, [[f"[`{row[0]}`]({row[0]}.md)", *row[1:], link_paper(row[0])] for row in rows])


def write_presets() -> str:
    """The table of names for combinations; those with a page of their own are linked."""
    rows = []
    for name, expression in sorted(PRESETS.items()):
        page = (METHOD_PAGES / f"{name}.md").exists()
        shown = f"[`{name}`]({name}.md)" if page else f"`{name}`"
        rows.append([shown, f"`{expression}`" if expression else "the empty list of parts"])
    return format_table(["preset", "stands for"], rows)


# points ---------------------------------------------------------------------------------------------------------------
def write_points(names: str) -> str:
    """The signatures of some methods of Part, as the class has them."""
    tree = ast.parse(inspect.getsource(Part)).body[0]
    known = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines = []
    for name in names.split():
        node = known[name]
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        lines.append(f"def {name}({ast.unparse(node.args)}){returns}\n")
    return f"```python\n{''.join(lines)}```\n"


# recipe keys ----------------------------------------------------------------------------------------------------------
def list_names(key: str) -> str:
    """What can be chosen for a recipe key, as it is written."""
    forms = {
        "data": [name for name in (*DATASETS, *SOURCES) if not name.startswith("noise-")],  # those are for smoke runs
        "model": list(MODELS),
        "split": [form.split(" with ")[0] for _, _, form in SPLITS.values()],
        "fleet": [form.split(" or ")[0] for form, _ in FLEET_FORMS.values()],
    }
    return ", ".join(f"`{name}`" for name in forms[key])


def format_range(rule: Any) -> str:
    """The numbers that a key takes, where they are not merely positive."""
    low, high = rule["low"], rule["high"]
    return "" if high is None or high >= 10**5 or high == 1024 else f" From {low:g} to {high:g}."


def write_recipe_keys(panel: str) -> str:
    """The recipe keys of one panel of the command line's help."""
    known = {f.name: f for f in fields(Recipe)}
    rows = []
    for key in PANELS[panel].split():
        f = known[key]
        beside = f.metadata["page"]
        if "{names}" in beside:
            beside = beside.replace("{names}", list_names(key))
        text = f"{f.metadata['help']}{format_range(f.metadata)} {beside}"
        assert f.default is not MISSING
        rows.append([f"`{key}`", f"`{format_toml(f.default)}`", format_cell(text)])
    return format_table(["key", "default", "meaning"], rows)


# tasks ----------------------------------------------------------------------------------------------------------------
def write_tasks() -> str:
    """The table of learning tasks: what for, what they are judged by, and what can be asked for."""
    rows = []
    for name, task in TASKS.items():
        metric = next(m for m in task.metrics if m.name == task.headline)
        judged = f"`{task.headline}`, {'more' if metric.better == 'up' else 'less'} is better"
        rows.append([f"`{name}`", task.about, judged, ", ".join(f"`{word}`" for word in task.words)])
    return format_table(["task", "learns", "judged by", "further metrics"], rows)


def write_class_parts() -> str:
    """The parts that need classes, whatever their settings or at some."""
    needing = [name for name, part in find_shipped_parts().items() if part.needs_class_logits is True]
    maybe = [name for name, part in find_shipped_parts().items() if isinstance(part.needs_class_logits, property)]
    listed = ", ".join(f"`{name}`" for name in needing)
    return f"{listed}; by their settings, {', '.join(f'`{name}`' for name in maybe)}.\n"


# history, exit codes --------------------------------------------------------------------------------------------------
def describe_type(metric: Metric) -> str:
    """The type of a metric's column, and when it is there."""
    kind = "int" if metric.unit in ("bytes", "macs") else "float"
    null = " or null" if metric.is_in_every_row and metric.unit not in AMOUNTS and "." not in metric.name else ""
    asked = f", with `--metrics {metric.asked}`" if metric.asked else ""
    return kind + null + asked + (f", {metric.when}" if metric.when else "")


def write_metric(metric: Metric) -> list[str]:
    """The line of a metric in the tables of columns."""
    return [f"`{metric.name}`", describe_type(metric), "yes" if metric.total == "sum" else "", metric.about]


def write_history_columns() -> str:
    """The table of columns of every history, as the registry has them: those of every row first."""
    lines = {
        name: [
            f"`{name}`",
            column.kind + (f", with `--metrics {column.asked}`" if column.asked else ""),
            "",
            column.about,
        ]
        for name, column in COLUMNS.items()
    }
    first = [lines.pop("round"), lines.pop("devices")]
    first += [write_metric(metric) for metric in METRICS.values() if metric.is_in_every_row]
    rest = [write_metric(metric) for metric in METRICS.values() if not metric.is_in_every_row]
    judged = [
        ["`NAME`", "float, with `--metrics FILE.py:NAME`", "", OWN_METRIC],
        ["`accuracy_NAME`, `loss_NAME`", "float, where a part says so", "", FURTHER_MODEL],
        ["`test_NAME`", "float, with `--validation`", "", TEST_HALF],
    ]
    rows = [*first, *lines.values(), *rest, *judged]
    return format_table(["field", "type", "adds up", "meaning"], [[format_cell(cell) for cell in row] for row in rows])


TEST_HALF = "a judgement on the test half, where those without `test_` are on [validation samples](../how-to/watch.md)"
OWN_METRIC = "[your own metric](../how-to/recipes.md#a-metric-of-your-own) of the whole test set"
FURTHER_MODEL = "the same for a further model that a part has judged"


def write_part_metrics() -> str:
    """The table of columns that parts tell."""
    metrics = list_part_metrics(Method(tuple(part() for part in find_shipped_parts().values())))
    rows = [[format_cell(cell) for cell in write_metric(metric)] for metric in metrics.values()]
    return format_table(["column", "type", "adds up", "meaning"], rows)


def write_exit_codes() -> str:
    rows = [["0", "", "all went well", "", ""]]
    rows += [[str(k.code), f"`{k.name}`", k.meaning, k.cause, k.remedy] for k in ERROR_KINDS.values()]
    header = ["code", "name", "meaning", "typical cause", "remedy"]
    return format_table(header, [[format_cell(cell) for cell in row] for row in rows])


def write_notebook_navigation() -> str:
    """The notebooks of docs/ for mkdocs.yml, which tools/notebook_pages.py makes pages of; nothing without any."""
    lines = []
    for file in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        title = next((found[1] for text in texts if (found := re.search("^# (.+)", text, re.MULTILINE))), file.stem)
        lines.append(f'      - "{title}": notebooks/{file.stem}.md\n')
    return "".join(["  - Notebooks:\n", *lines]) if lines else ""


def write_public_names() -> str:
    """What mkdocstrings is to make entries of: every name of `shoal` that is public, and the checks for parts."""
    names = [f"shoal.{name}" for name in sorted(shoal.__all__)]
    names += ["shoal.testing.laws.check_part", "shoal.testing.laws.check_pair", "shoal.testing.toy.toy"]
    return "\n".join(f"::: {name}\n" for name in names)


WRITERS = {
    "public names": write_public_names,
    "notebook navigation": write_notebook_navigation,
    "methods": write_methods,
    "presets": write_presets,
    "drawing of the round": draw_round,
    "history columns": write_history_columns,
    "metrics of parts": write_part_metrics,
    "exit codes": write_exit_codes,
    "tasks": write_tasks,
    "parts that need classes": write_class_parts,
}
WRITERS |= make_writers({name: begin_small(read_idea(part)) for name, part in find_shipped_parts().items()})
WRITERS |= {f"recipe keys: {panel}": partial(write_recipe_keys, panel) for panel in PANELS}
WRITERS |= {f"points: {side}": partial(write_points, names) for side, names in POINTS_BY_SIDE.items()}


def generate() -> dict[Path, str]:
    """Every page that has a section of ours, and the pages of commands and of the audit, as they must be."""
    places = [ROOT / "README.md", ROOT / "mkdocs.yml", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = {place: place.read_text(encoding="utf-8") for place in places}
    absent = WRITERS.keys() - {name for page in pages.values() for name in list_sections(page)}
    if absent:
        raise SystemExit(f"No page has the section {', '.join(sorted(absent))}.")
    written = {place: fill_sections(page, WRITERS) for place, page in pages.items()}
    return written | {
        ROOT / "docs/reference/commands.md": write_command_page(),
        ROOT / "docs/reference/audit.md": write_audit_page(),
    }


if __name__ == "__main__":
    sys.exit(write_changes(generate(), check="--check" in sys.argv[1:]))
