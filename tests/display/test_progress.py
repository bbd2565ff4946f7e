"""Bars for those who call shoal from Python: in notebooks and terminals, and nowhere else."""

import io
import subprocess
import sys
from typing import Any

import pytest

import shoal
from shoal.cli.live_progress import follow_runs, open_bars
from shoal.display.notebook_progress import MAX_BARS, NotebookProgress

SMALL: dict[str, Any] = dict(devices=4, sample=2, rounds=3, split="iid", engine="serial")


def test_a_notebook_sees_a_bar_per_run_drawn_in_place():
    shown: list[str] = []
    bars = NotebookProgress(shown.append, with_seeds=True)
    shoal.compare(["fedavg", "fedprox(mu=0.1)"], seeds=2, watch=bars.show_row, **SMALL)
    bars.close()
    assert shown[0].count("<progress") == 1 and shown[-1].count("<progress") == 4
    assert 'value="3" max="3"' in shown[-1] and "fedprox(mu=0.1) seed 1" in shown[-1] and "acc 0." in shown[-1]


def test_many_runs_make_room_for_those_that_go_on():
    shown: list[str] = []
    bars = NotebookProgress(shown.append)
    bars.runs = {str(i): (f"run {i}", 3 if i < 30 else 1, 3, "") for i in range(33)}
    bars.close()
    html = shown[-1]
    assert html.count("<progress") == MAX_BARS and "run 32" in html and "run 0<" not in html
    assert "and 21 more, 30 are over" in html and len(html.splitlines()) <= 20


def test_bars_are_for_those_who_look(monkeypatch):
    assert open_bars(None, None, 1, ()) is None, "tests have no terminal"
    assert open_bars(False, None, 1, ()) is None
    assert open_bars(True, None, 1, ()) is not None
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    assert open_bars(None, None, 1, ()) is not None
    assert open_bars(None, print, 1, ()) is None, "who watches prints, too"


def test_watchers_are_called_beside_the_bars_and_answered():
    rows: list[int] = []
    own: Any = lambda recipe, row, history: rows.append(row["round"]) or "answer"  # noqa: E731
    with follow_runs(True, own, own) as watch:
        result = shoal.run(watch=watch, **SMALL)
        assert watch is not None and watch(result.recipe, result.history.rows[-1], result.history) == "answer"
    assert rows == [0, 1, 2, 2]


def test_a_run_that_a_callback_stops_ends_its_bar():
    shown: list[str] = []
    bars = NotebookProgress(shown.append)
    shoal.run(
        callbacks=[lambda round: shoal.Stop("enough") if round.number == 2 else None], watch=bars.show_row, **SMALL
    )
    bars.close()
    assert 'value="2" max="2"' in shown[-1] and "stopped" in shown[-1]


def test_a_terminal_sees_bars_and_a_pipe_sees_nothing():
    program = f"import shoal, sys\nfor shown in (True, None):\n    shoal.run(progress=shown, **{SMALL!r})"
    program += "\n    print('end', shown, file=sys.stderr, flush=True)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    shown, nothing = said.split("end True\n")
    assert "fedavg" in shown and "3/3" in shown and nothing == "end None\n"


def test_a_notebook_is_found_by_its_kernel(monkeypatch):
    pytest.importorskip("IPython")
    from IPython.core import getipython

    from shoal.display.notebook_progress import find_notebook

    class Shell:
        kernel = object()

    assert find_notebook() is None
    monkeypatch.setattr(getipython, "get_ipython", Shell)
    assert isinstance(find_notebook(), Shell)
