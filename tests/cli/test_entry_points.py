"""Ways in: the version, `python -m shoal`, completion in a shell, words that are nearly right, what may be missing."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli.commands import run_command_line

TINY = ["--devices", "4", "--sample", "2", "--rounds", "2", "--steps", "1", "--engine", "serial"]


def command(monkeypatch, capsys, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
    code = 0
    try:
        run_command_line()
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


def start_shoal(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_and_python_m_shoal(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "--version")[:2] == (0, f"shoal {shoal.__version__}\n")
    assert start_shoal("--version") == f"shoal {shoal.__version__}\n"


def test_a_shell_completes_commands_and_flags():
    """As bash asks for it after `shoal --install-completion`; the name of the variable is that of the program."""
    program = "import sys; sys.argv[0] = 'shoal'; from shoal.cli.commands import run_command_line; run_command_line()"

    def complete(words: str, at: int) -> list[str]:
        asked = {"_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **asked}
        )
        return done.stdout.split()

    assert complete("shoal re", 1) == ["reproduce", "resume", "report"]
    assert complete("shoal run --local-lr", 2) == ["--local-lr-schedule", "--local-lr-warmup"]


@pytest.mark.parametrize(
    "words, near",
    [
        (["runn"], "run"),
        (["data", "shwo"], "show"),
        (["run", "--method", "fedpox"], "fedprox"),
        (["run", "-s", "metod=x"], "method"),
        (["tune", "fedavg", "--over", "lr=0.1,0.2", "--sampler", "tpee"], "tpe"),
        (["run", "--engine", "seriall"], "serial"),
    ],
)
def test_a_near_name_is_suggested_once(words, near, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, *words)
    assert code != 0 and f"Did you mean '{near}'?" in err and (out + err).lower().count("did you mean") == 1


def test_a_split_is_shown_by_flags_as_by_pairs(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    by_flags = command(monkeypatch, capsys, "data", "show", "--split", "dirichlet:0.1", "--devices", "3")
    by_pairs = command(monkeypatch, capsys, "data", "show", "split=dirichlet:0.1", "devices=3")
    assert by_flags == by_pairs and by_flags[0] == 0 and "3 devices" in by_flags[1]
    assert command(monkeypatch, capsys, "data", "show", "--split", "nobody")[0] == 10


def test_a_comparison_needs_no_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "matplotlib" else find(name, *more)  # noqa: E731
    monkeypatch.setattr("shoal.cli.comparison_tables.find_spec", hidden)
    code, out, err = command(monkeypatch, capsys, "compare", "fedavg", "fedprox", *TINY, "--out", "c")
    assert (
        code == 0 and "fedprox" in out and "pip install 'shoal[plot]'" in err and not Path("c/comparison.png").exists()
    )
    code, out, err = command(monkeypatch, capsys, "resume", "c", "--json")
    assert code == 0 and len(json.loads(out)) == 2


def test_data_may_have_moved_when_a_run_is_resumed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, capsys, "run", *TINY, "--out", "r", "--data-dir", "old")[0] == 0
    code, _, err = command(monkeypatch, capsys, "resume", "r", "-s", "data_dir=new", "-s", "rounds=3")
    assert code == 0, err
    assert 'data_dir = "new"' in Path("r/recipe.toml").read_text()
    assert command(monkeypatch, capsys, "compare", "fedavg", *TINY, "--out", "c", "--data-dir", "old")[0] == 0
    assert command(monkeypatch, capsys, "resume", "c", "-s", "data_dir=new", "-s", "rounds=3")[0] == 0
    assert 'data_dir = "new"' in Path("c/0-fedavg/seed-0/recipe.toml").read_text()
    assert command(monkeypatch, capsys, "resume", "r", "-s", "lr=1")[0] == 11
