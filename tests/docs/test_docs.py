"""The documentation says what the program does: whatever can be compared or run, is."""

import gzip
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import Block, differ, read_blocks, run_block, run_page
from torch import nn

import shoal
from shoal.core.builtin_tasks import TASKS
from shoal.models import MODELS, describe_model
from shoal.parts import find_shipped_parts
from shoal.parts.fedbr import FedBR
from shoal.plugins.load import load_part_files
from shoal.plugins.smoke_run import smoke_test_part
from shoal.runs.history_rows import check_row
from shoal.runs.recipe import Recipe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def table_rows(page: str, header: str) -> list[list[str]]:
    """The cells of every table of a page whose first line begins like this."""
    tables = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-| :]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


def as_shown(value: Any) -> set[str]:
    """The ways in which a page may write a default."""
    if isinstance(value, str):
        return {f'"{value}"', f"`{value}`", f'`"{value}"`'} | ({"none", '`""`'} if value == "" else set())
    if isinstance(value, bool):
        return {str(value), f"`{str(value).lower()}`"}
    if isinstance(value, tuple):
        return {f"`{list(value)}`"}
    return {str(value), f"`{value}`"} | ({str(int(value))} if value == int(value) else set())


@pytest.mark.parametrize("name", sorted(find_shipped_parts()))
def test_a_methods_page_lists_its_options_with_their_defaults(name):
    page = (DOCS / f"methods/{name}.md").read_text()
    told: dict[str, str] = {}
    for cells in table_rows(page, "option"):
        names = re.findall(r"`(\w+)`", cells[0])
        values = [v.strip() for v in cells[1].split(", ")] if len(names) > 1 else [cells[1]]
        told |= dict(zip(names, values * len(names) if len(values) == 1 else values))
    known = {f.name: f.default for f in fields(find_shipped_parts()[name])}
    assert told.keys() == known.keys()
    wrong = {k: (v, known[k]) for k, v in told.items() if v not in as_shown(known[k])}
    assert not wrong


@pytest.mark.parametrize("name", sorted(find_shipped_parts()))
def test_a_parts_docstring_names_options_that_exist(name):
    part = find_shipped_parts()[name]
    options = {f.name: f.type for f in fields(part)}
    words = set(re.findall(r"`([A-Za-z_]\w*)`", part.__doc__ or "")) - options.keys()
    texts = [option for option, kind in options.items() if kind is str]

    def accepted(option: str, word: str) -> bool:
        try:
            part(**{option: word})
        except ValueError:
            return False
        return True

    unknown = {word for word in words if not any(accepted(option, word) for option in texts)}
    assert not unknown


@pytest.mark.parametrize("tool, target", [("generate_docs.py", "generate"), ("build_results.py", "results")])
def test_generated_sections_are_what_would_be_written(tool, target, tmp_path):
    """In a copy. What is committed is what a first run wrote, so one more run must change nothing."""
    for name in ("README.md", "mkdocs.yml", "docs", "results", "tools"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    before = read_files(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, f"tools/{tool}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, ""), f"{done.stdout}{done.stderr}\nRun `make {target}`."
    assert read_files(tmp_path) == before


def test_one_run_fills_all_sections_of_results(tmp_path):
    """Also those that are about what others of them say: which pages quote a file of the ledger."""
    for name in ("README.md", "mkdocs.yml", "docs", "results", "tools"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    before = read_files(tmp_path)
    for page in [tmp_path / "README.md", *tmp_path.rglob("*/*.md")]:
        emptied = re.sub(
            r"(<!-- generated: results .*? -->\n).*?(?=<!-- end -->)", r"\1", page.read_text(), flags=re.DOTALL
        )
        page.write_text(emptied)
    assert read_files(tmp_path) != before
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "tools/build_results.py"], cwd=tmp_path, env=environment, check=True)
    changed = [str(file) for file, page in read_files(tmp_path).items() if page != before[file]]
    assert not changed


def read_files(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_ledger_is_small_and_every_run_can_be_repeated():
    files = list((ROOT / "results").glob("*.jsonl.gz"))
    assert sum(file.stat().st_size for file in files) <= 10_000_000
    texts = [page.read_text() for page in DOCS.rglob("*.md")]
    for file in files:
        assert any(f"results/{file.name}" in text for text in texts), f"no page quotes {file.name}"
        for line in gzip.open(file):
            run = json.loads(line)
            recipe = Recipe().with_values(**tomllib.loads(run["recipe"]))
            assert (recipe.method, recipe.seed, recipe.rounds) == (run["method"], run["seed"], len(run["rows"]))
            assert re.fullmatch("[0-9a-f]{40}", run["commit"]) and run["machine"]
            for number, row in enumerate(run["rows"]):
                assert row["round"] == number
                check_row(row)


def test_tables_of_results_come_from_the_ledger_or_say_that_they_do_not():
    for page in (DOCS / "results").glob("*.md"):
        hand_written = re.sub(r"<!-- generated: .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+(?:\n.*)?", hand_written, re.MULTILINE):
            assert "history not kept" in table.splitlines()[-1], f"{page.name}: {table.splitlines()[0]}"


def test_history_columns_are_those_of_a_run(tmp_path):
    """The meanings are kept beside the generator, so the names are held against the rows of runs."""
    (tmp_path / "mine.py").write_text("def mine(logits, targets):\n    return 0.0\n")
    metrics = (*TASKS["classify"].words, f"{tmp_path}/mine.py:mine")
    small = {"rounds": 1, "devices": 4, "sample": 4, "engine": "serial"}
    full = shoal.run("fedbr", metrics=metrics, fleet="tiers", local_test=0.25, **small)
    void = shoal.run(failures=1.0, **small)
    regress = shoal.run(task="regress", metrics=TASKS["regress"].words, **small)
    found = {*full.history.rows[0], *void.history.rows[0], *regress.history.rows[0]} - {"mine"}
    page = (DOCS / "reference/history.md").read_text()
    told, of_parts = (
        {name for row in table_rows(page, head) for name in re.findall(r"`([\w.]+)`", row[0]) if "NAME" not in name}
        for head in ("field", "column")
    )
    assert found <= told | of_parts and {f"fedbr.{m.name}" for m in FedBR.metrics} <= of_parts
    assert told - found <= {"joules", "log", "stopped", "bytes_down_by_blocks"}  # a fleet knows, a part speaks, of 0.1


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_names_that_a_page_imports_or_quotes_are_there(page):
    text = page.read_text()
    wanted = [
        f"{module}.{name.split(' as ')[0].strip()}"
        for module, names in re.findall(r"from (shoal[\w.]*) import ([\w, ]+)", text)
        for name in names.split(",")
    ]
    wanted += re.findall(r"`(shoal(?:\.\w+)+)[`(]", text)
    absent = [path for path in wanted if not can_resolve(path)]
    assert not absent
    files = re.findall(
        r"`((?:core|storage|parts|data|models|fleet|engines|remote|plugins|runs|service|compare|report|reproduce|cli)/[\w/]+\.py)`",
        text,
    )
    assert not [file for file in files if not (ROOT / "src/shoal" / file).exists()]


def test_the_architecture_names_rooms_files_and_functions_that_are_there():
    page = (DOCS / "explanation/architecture.md").read_text()
    rooms = [cells[0].strip("`") for cells in table_rows(page, "room")]
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    assert rooms == [room for layer in reversed(layers) for room in reversed(layer.split(" | "))]
    for name, file in re.findall(r"`(\w+)` in `([\w/]+\.py)`", page):
        text = (ROOT / "src/shoal" / file).read_text()
        assert re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ", text, re.MULTILINE), f"{name} in {file}"


def can_resolve(path: str) -> bool:
    """Whether a dotted path leads to a module or to something in one."""
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def test_what_goes_with_what_is_what_compose_says():
    known = find_shipped_parts()
    section = (DOCS / "methods/choose.md").read_text().split("## What goes with what")[1].split("<!-- end -->")[0]
    told: set[frozenset[str]] = set()
    for cell in (line.split("|")[1] for line in section.splitlines() if line.startswith("| ")):
        left, right = (re.findall(r"`(\w+)`", side) for side in (cell + " with none of ").split(" with none of ")[:2])
        pairs = combinations(left, 2) if cell.startswith(" one of") else product(left, right)
        told |= {frozenset(pair) for pair in pairs}
    refused = set()
    for a, b in combinations(known, 2):
        try:
            shoal.compose([known[a](), known[b]()])
        except shoal.ShoalError:
            refused.add(frozenset((a, b)))
    assert told == refused


def test_the_first_page_names_every_engine():
    engines = set(next(f for f in fields(Recipe) if f.name == "engine").metadata["among"]) - {"auto"}
    last = (DOCS / "index.md").read_text().rpartition("Version")[2]
    assert {e for e in engines if f"`{e}`" in last} == engines


def test_models_are_listed_with_their_counts():
    rows = table_rows((DOCS / "reference/models.md").read_text(), "name")
    told = {cells[0].strip("`"): tuple(int(c.replace(",", "")) for c in cells[2:4]) for cells in rows}
    assert told == {name: describe_model(name) for name in MODELS}


@pytest.mark.parametrize("name", ["feddrop", "fjord", "heterofl", "afd", "fedmp", "fedad", "fedap"])
def test_a_model_without_axes_is_refused_as_the_page_says(name):
    text = (DOCS / f"methods/{name}.md").read_text()
    assert "A model without axes is refused." in text
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(shoal.ShoalError) as refusal:
        shoal.run(name, model=module, rounds=1, engine="serial")
    assert refusal.value.kind.name == "bad-part"
    assert "shoal[axes]" not in refusal.value.advice  # it is installed: there is nothing to find


def test_who_has_axes_is_not_told_to_install_what_finds_them():
    filters_only = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    with pytest.raises(shoal.ShoalError) as refusal:
        shoal.run("feddrop", model=filters_only, rounds=1, engine="serial")
    assert refusal.value.advice == "Write filters=True."


def test_the_lines_of_everyday_tasks_are_those_of_the_blocks():
    page = (DOCS / "explanation/other-frameworks.md").read_text()
    rows = table_rows(page, "task")
    assert len(rows) == 10
    for cells in rows:
        title = re.match(r"\[(.+?)\]", cells[0])
        told = re.match(r"(\d+) line", cells[1])
        assert title and told
        name = title[1][0].upper() + title[1][1:]
        place = DOCS / "how-to/devices.md" if name == "Deploy" else DOCS / "explanation/other-frameworks.md"
        heading = "From a laptop to three devices, in ten commands" if name == "Deploy" else name
        section = place.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
        lines = [line for block in read_blocks(section) for line in block.body.splitlines()]
        assert int(told[1]) == len([line for line in lines if line.strip() and not line.startswith("#")]), name


@pytest.mark.whole
@pytest.mark.parametrize(
    "page", ["README.md", "docs/tour.md", "docs/tutorial.md", "docs/explanation/other-frameworks.md"]
)
def test_what_a_page_shows_is_what_comes_out(page, tmp_path):
    for block, printed in run_page((ROOT / page).read_text(), tmp_path):
        if block.shown is not None:
            assert not differ(block.shown, printed), block.body


@pytest.mark.whole
def test_the_readme_shows_what_make_demo_prints(tmp_path):
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    command = recipe.split("$(SHOAL) ")[1].replace("\\\n", " ").strip()
    printed, _ = run_block(Block("sh", f"shoal {command}", False, None), tmp_path, "")
    shown = (ROOT / "README.md").read_text().split("`make demo` prints\n\n```text\n")[1].split("```")[0]
    tables = printed.split("The last accuracy within")[0]
    assert not differ(shown, tables)


def test_the_readme_is_read_in_three_minutes_and_leads_on():
    """At 250 words a minute, tables and blocks of code aside, which are looked at rather than read."""
    readme = (ROOT / "README.md").read_text()
    prose = re.sub(r"```.*?```|<!--.*?-->|^\|.*$|^!.*$", "", readme, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 500 and len(readme.splitlines()) <= 120
    assert len(re.findall(r"^\|[-| :]+\|$", readme, re.MULTILINE)) == 2, "the evidence, and where to go next"
    (program,) = [block for block in read_blocks(readme) if block.language == "python"]
    assert len([line for line in program.body.splitlines() if line.strip()]) <= 10
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", readme):
        page = ROOT / target
        assert page.exists(), target
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"


def test_the_start_page_leads_to_every_page_for_users():
    start = (DOCS / "index.md").read_text()
    pages = [f"how-to/{page.name}" for page in (DOCS / "how-to").glob("*.md")] + ["tour.md", "tutorial.md"]
    pages += [f"notebooks/{page.stem}.md" for page in (DOCS / "notebooks").glob("*.ipynb")]
    assert not [page for page in pages if f"]({page})" not in start]


def test_a_changed_output_is_seen():
    shown = "accuracy  0.6472\nwall time  5.12 s\n"
    assert not differ(shown, "accuracy  0.6479\nwall time  1 min\n")
    assert differ(shown, "accuracy  0.7472\nwall time  5.12 s\n")
    assert differ(shown, "precision  0.6472\nwall time  5.12 s\n")
    assert differ(shown, "accuracy  0.6472\n")


def test_the_parts_of_the_guide_are_accepted(tmp_path):
    """The blocks of how-to/write-a-part.md are one file, and what it defines is played like any part of a user."""
    page = (DOCS / "how-to/write-a-part.md").read_text()
    blocks = [block.body for block in read_blocks(page) if block.language == "python"]
    head = next(body for body in blocks if body.startswith("from dataclasses import"))
    (tmp_path / "my_parts.py").write_text(head + "\n\n" + "\n\n".join(b for b in blocks if "(Part)" in b))
    parts = load_part_files([str(tmp_path / "my_parts.py")])
    assert {"damp", "lag", "logitnorm", "doubt", "float16"} <= parts.keys()
    for part in parts.values():
        smoke_test_part(part())
