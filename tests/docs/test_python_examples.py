"""The short scripts of examples/python run as they are, and say something; the page beside them lists each."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def test_there_are_ten_and_the_page_lists_them():
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == [script.name for script in SCRIPTS] and len(SCRIPTS) == 10
    assert all(len(script.read_text().splitlines()) <= 25 for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        from matplotlib import pyplot

        pyplot.close("all")
    assert capsys.readouterr().out.strip()
