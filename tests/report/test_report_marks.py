"""What a report says of runs that are not at their end, and of classes that are taken for each other."""

import json
import re
from pathlib import Path

import pytest
from test_report import browsed, rows, selftest

import shoal
from shoal.report.facts import average_confusion
from shoal.report.run_groups import ReportedRun, read_groups
from shoal.report.write import write_report

TINY = {"devices": 4, "sample": 2, "rounds": 3, "steps": "1", "batch": 8, "engine": "serial"}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr("shoal.report.write.draw_all", lambda *_: [])


def report(*folders: Path) -> str:
    """What a reader sees: the page without the numbers and the script that draws them."""
    page = write_report(list(folders), folders[0].parent / "report.html")[0].read_text()
    return page.partition('<script type="application/json"')[0]


def test_an_unfinished_run_is_marked(tmp_path):
    shoal.run(out=tmp_path / "whole", **TINY)
    assert "unfinished" not in report(tmp_path / "whole")
    recipe = tmp_path / "whole/recipe.toml"
    recipe.write_text(recipe.read_text().replace("rounds = 3", "rounds = 9"))
    page = report(tmp_path / "whole")
    assert "unfinished: 3 rounds" in page and "3 (unfinished)" in page


def test_some_seeds_may_be_unfinished(tmp_path):
    shoal.compare(["fedavg"], seeds=2, out=tmp_path / "c", **TINY)
    history = tmp_path / "c/0-fedavg/seed-1/history.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:2]))
    assert "unfinished (1 of 2 seeds): " in report(tmp_path / "c")


def test_a_stopped_run_says_why_and_is_no_unfinished_one(tmp_path):
    shoal.run(callbacks=lambda round: shoal.Stop("<b>dull</b>"), out=tmp_path / "r", **TINY)
    page = report(tmp_path / "r")
    assert "stopped: &lt;b&gt;dull&lt;/b&gt;" in page and "unfinished" not in page


def confuse(folder: Path, classes: int) -> None:
    """Add a matrix to the last row, as an evaluation does: 3 of 4 samples are right, the last class is untested."""
    found = rows(folder / "history.jsonl")
    matrix = [[3 if c == r else 1 if c == (r + 1) % classes else 0 for c in range(classes)] for r in range(classes - 1)]
    found[-1]["confusion"] = [*matrix, [0] * classes]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


@pytest.mark.parametrize("classes", [3, 30])
def test_a_confusion_matrix_is_shown_and_scrolls_on_a_narrow_page(classes, tmp_path):
    shoal.run(out=tmp_path / "r", **TINY)
    assert '<section id="confusions" hidden>' in report(tmp_path / "r")
    confuse(tmp_path / "r", classes)
    page = report(tmp_path / "r")
    assert '<section id="confusions">' in page
    table = re.search(r'<table class="confusion">.*?</table>', page, re.S)
    assert table and table[0].count(">75</td>") == classes - 1 and table[0].count("<td>-</td>") == classes
    dom, log = browsed((tmp_path / "report.html").as_uri() + "#selftest", tmp_path, "500,900", 1)
    assert selftest(dom) == "selftest ok" and "CONSOLE" not in log


def test_a_run_records_what_is_taken_for_what(tmp_path):
    recipe = {**TINY, "metrics": ("confusion",), "validation": 0.2}
    result = shoal.run(out=tmp_path / "r", **recipe)  # type: ignore
    assert sum(map(sum, result.history.last("confusion"))) == round(0.2 * 1437)
    assert "test_confusion" not in result.history.rows[-1]
    assert report(tmp_path / "r").count('<table class="confusion">') == 1


def test_confusions_of_seeds_are_added_and_odd_ones_left_out(tmp_path):
    shoal.run(out=tmp_path / "r", **TINY)
    (group,) = read_groups([tmp_path / "r"])

    def make_run(*matrices: object) -> list[ReportedRun]:
        made = [ReportedRun(run.path, run.recipe, run.history.cut(3)) for run in group.runs * len(matrices)]
        for run, matrix in zip(made, matrices):
            run.history.rows[-1] = run.history.rows[-1] | {"confusion": matrix}
        return made

    assert average_confusion(make_run([[1, 1], [0, 4]], [[3, 1], [2, 2]])) == [[0.6666667, 0.3333333], [0.25, 0.75]]
    for odd in ([[[1, 1]]], [[[1], [1, 2]]], [[[1, 1], [0, 4]], [[1]]], [[[0] * 41] * 41], [None]):
        assert average_confusion(make_run(*odd)) is None
