"""The command line as a newcomer meets it: every command, every mistake."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import shoal
from shoal.cli.commands import run_command_line
from shoal.compare.comparison import run_comparison
from shoal.core.errors import ERROR_KINDS
from shoal.core.part import POINTS

SMALL = "--devices 4 --sample 2 --steps 2 --batch 8".split()
TINY = [*SMALL, "--rounds", "3"]


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def kind(self) -> str:
        return self.err.strip().split(":")[0]


Shoal = Callable[..., Said]


@pytest.fixture(name="shoal_")
def _shoal(capsys, monkeypatch, tmp_path) -> Shoal:
    """Call the command line in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def call(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
        code = 0
        try:
            run_command_line()
        except SystemExit as end:
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return call


def assert_refused(said: Said, kind: str, *words: str) -> None:
    """Its own exit code, its kind by name, at most three lines, no traceback, and the words that matter."""
    assert (said.code, said.kind) == (ERROR_KINDS[kind].code, kind), said.err
    assert len(said.err.splitlines()) <= 3 and "Traceback" not in said.err
    assert said.out == ""
    for word in words:
        assert word in said.err, said.err


def history(folder: Path | str) -> list[dict]:
    lines = (Path(folder) / "history.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "wall_seconds"} for line in lines]


# run ------------------------------------------------------------------------------------------------------------------
def test_the_script_runs_the_line_of_the_manual(tmp_path):
    line = (
        "run --method fedprox --data digits --model mlp --split dirichlet:0.5 --devices 20 --sample 5 --rounds 3 "
        "--epochs 1 --batch 16 --lr 0.1 --lr-decay 0.99 --seed 0 --engine serial --fleet uniform --out runs/x"
    )
    script = Path(sys.executable).with_name("shoal")
    done = subprocess.run([script, *line.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout and "runs/x" in done.stdout
    assert len(history(tmp_path / "runs/x")) == 3


def test_a_recipe_from_a_file_and_values_over_it(shoal_):
    Path("recipe.toml").write_text('method = "scaffold"\ndevices = 6\nsample = 2\nrounds = 9\nsteps = "1"\n')
    assert shoal_("run", "recipe.toml", "-s", "rounds=2", "-s", "method=fedavg", "--out", "x").code == 0
    wanted = shoal.run("fedavg", devices=6, sample=2, rounds=2, steps="1")
    assert [row["accuracy"] for row in history("x")] == wanted.history["accuracy"]


def test_values_are_judged_when_all_of_them_are_known(shoal_):
    """A file for 3 devices asks for fewer per round than the default in a later word."""
    Path("recipe.toml").write_text('devices = 3\nsteps = "1"\nrounds = 1\n')
    assert shoal_("run", "recipe.toml", "-s", "sample=2", "-q").code == 0
    assert shoal_("run", "recipe.toml", "--sample", "2", "-q").code == 0
    assert shoal_("run", "-s", "devices=3", "--sample", "2", "--rounds", "1", "-q").code == 0


def test_quiet_is_silent(shoal_):
    assert shoal_("run", *TINY, "--quiet") == (0, "", "")
    assert shoal_("compare", "fedavg", "fedprox", *TINY, "--quiet") == (0, "", "")


@pytest.mark.parametrize(
    "words", [["run"], ["compare", "fedavg", "scaffold", "--seeds", "2"]], ids=lambda words: words[0]
)
def test_a_metric_of_ones_own_is_shown_at_the_end(shoal_, words):
    Path("mine.py").write_text("def sureness(logits, targets):\n    return logits.softmax(-1).amax(-1).mean()\n")
    assert "sureness" in shoal_(*words, "--metrics", "mine.py:sureness", *TINY).out


def test_json_is_one_row_per_round(shoal_):
    said = shoal_("run", *TINY, "--json")
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2] and said.err == ""
    keys = "round devices accuracy loss bytes_down bytes_up macs_forward macs_work sim_seconds wall_seconds".split()
    assert all(set(keys) <= set(row) for row in rows)


def test_json_rows_are_the_history(shoal_):
    rows = [json.loads(line) for line in shoal_("run", *TINY, "--json", "--out", "x").out.splitlines()]
    assert rows == [json.loads(line) for line in Path("x/history.jsonl").read_text().splitlines()]


def test_progress_goes_to_stderr(shoal_):
    said = shoal_("run", *TINY)
    assert "3/3" in said.err and "3/3" not in said.out


@pytest.mark.parametrize("words", [[], ["run"], ["compare"], ["resume"], ["list"], ["export"]])
def test_help(shoal_, words):
    said = shoal_(*words, "--help")
    assert said.code == 0 and "Usage" in said.out


def test_every_key_of_the_recipe_is_a_flag(shoal_):
    told = shoal_("run", "--help").out
    for key in shoal.Recipe().__dict__:
        assert "--" + key.replace("_", "-") in told


# compare, resume, list, export ----------------------------------------------------------------------------------------
def test_compare_with_seeds(shoal_):
    said = shoal_("compare", "fedavg", "fedprox(mu=0.1)", *TINY, "--seeds", 2, "--target", 0.05, "--out", "c")
    assert said.code == 0
    assert "fedprox(mu=0.1)" in said.out and "±" in said.out and "to 0.05" in said.out
    assert Path("c/comparison.png").read_bytes().startswith(b"\x89PNG")
    folders = sorted(str(p.parent.relative_to("c")) for p in Path("c").rglob("history.jsonl"))
    assert folders == [f"{m}/seed-{s}" for m in ("0-fedavg", "1-fedprox-mu-0.1") for s in (0, 1)]


def test_compare_as_json_is_the_table(shoal_):
    table = json.loads(shoal_("compare", "fedavg", "scaffold", *TINY, "--json").out)
    assert [row["method"] for row in table] == ["fedavg", "scaffold"]
    assert table[0]["accuracy"] == shoal.run("fedavg", devices=4, sample=2, steps="2", batch=8, rounds=3).accuracy


def test_resume_for_more_rounds_is_the_longer_run(shoal_):
    shoal_("run", "--method", "scaffold", *SMALL, "--rounds", 2, "--out", "x", "-q")
    assert shoal_("resume", "x", "-s", "rounds=5").code == 0
    shoal_("run", "--method", "scaffold", *SMALL, "--rounds", 5, "--out", "y", "-q")
    assert history("x") == history("y")
    assert Path("x/recipe.toml").read_text().count("rounds = 5\n") == 1


@pytest.mark.parametrize(
    "command, longest",
    [
        (["run"], "x"),
        (["compare", "fedavg", "scaffold"], "x/0-fedavg/seed-0"),
        (["tune", "fedavg", "--over", "lr=0.1,0.2"], "x/0-try-0/seed-0"),
    ],
)
def test_rounds_that_were_played_are_not_taken_back(shoal_, command, longest):
    assert shoal_(*command, *TINY, "--out", "x", "-q").code == 0
    before = {file: file.read_bytes() for file in Path("x").rglob("*.toml")}
    said = shoal_("resume", "x", "-s", "rounds=1")
    assert_refused(
        said, "bad-value", longest, "has played 3 rounds", "after round 1", "rounds=3 or more", "another folder"
    )
    assert {file: file.read_bytes() for file in Path("x").rglob("*.toml")} == before
    assert shoal_("resume", "x", "-s", "rounds=3", "-q").code == 0


def test_one_run_is_not_divided_among_processes(shoal_):
    shoal_("run", *TINY, "--out", "x", "-q")
    assert_refused(shoal_("resume", "x", "--workers", 2), "bad-value", "one run", "--workers")


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["x", "--rounds", "50"], "-s rounds=50."),
        (["--rounds=50", "x"], "-s rounds=50."),
        (["x", "--data-dir", "there"], "-s data_dir=there."),
        (["x", "--lr"], "-s lr=VALUE."),
    ],
)
def test_a_recipe_flag_of_resume_is_answered_with_the_key(shoal_, words, wanted):
    assert_refused(shoal_("resume", *words), "usage", "shoal resume has no flag --", f"Write {wanted}")
    assert "No such option" in shoal_("resume", "x", "--unicorn").err


def test_resume_of_a_finished_run_changes_nothing(shoal_):
    shoal_("run", *TINY, "--out", "x", "-q")
    before = history("x")
    assert shoal_("resume", "x").code == 0
    assert history("x") == before


def broken_off(folder: str) -> None:
    """A comparison of two methods, stopped in the second round of the second."""

    def stop(recipe, row, seen):
        if recipe.method == "scaffold" and len(seen) == 2:
            raise KeyboardInterrupt

    recipe = shoal.Recipe(devices=4, sample=2, rounds=3, steps="2", batch=8, out=folder)
    with pytest.raises(shoal.ShoalError, match="Stopped"):
        run_comparison(["fedavg", "scaffold"], recipe, 1, stop)


def test_resume_of_a_comparison_that_was_broken_off(shoal_):
    broken_off("c")
    assert shoal_("resume", "c").code == 0
    shoal_("compare", "fedavg", "scaffold", *TINY, "--out", "whole", "-q")
    for run in ("0-fedavg/seed-0", "1-scaffold/seed-0"):
        assert history(f"c/{run}") == history(f"whole/{run}")


def test_resume_of_a_comparison_whose_second_method_was_not_begun(shoal_):
    shoal_("compare", "fedavg", "scaffold", *TINY, "--out", "c", "-q")
    before = history("c/1-scaffold/seed-0")
    shutil.rmtree("c/1-scaffold")
    assert shoal_("resume", "c", "-q") == (0, "", "")
    assert history("c/1-scaffold/seed-0") == before


def test_values_for_the_resume_of_a_comparison_are_not_ignored(shoal_):
    shoal_("compare", "fedavg", "scaffold", *TINY, "--out", "c", "-q")
    said = shoal_("resume", "c", "-s", "rounds=4")
    assert said.code != 0 or len(history("c/0-fedavg/seed-0")) == 4


def test_the_bars_of_a_comparison_that_runs_longer_know_its_new_end(shoal_):
    shoal_("compare", "fedavg", "scaffold", *TINY, "--out", "c", "-q")
    said = shoal_("resume", "c", "-s", "rounds=5")
    assert said.err.count(" 5/5 ") == 2 and " 10/10 " in said.err


@pytest.mark.parametrize(
    "what, some",
    [
        ("methods", ["fedavg", "fedprox(mu=0.01)", "scaffold ", "feddyn(alpha=0.01)", "trimmedmean(trim=0.1)"]),
        ("data", ["digits"]),
        ("models", ["mlp", "lenet"]),
        ("splits", ["iid", "dirichlet"]),
        ("fleets", ["uniform"]),
    ],
)
def test_list(shoal_, what, some):
    said = shoal_("list", what)
    assert said.code == 0
    assert [name for name in some if name not in said.out] == []


def test_list_shows_only_what_can_be_set(shoal_):
    assert "frozenset" not in shoal_("list", "methods").out


def test_export_is_the_model_of_the_run(shoal_):
    shoal_("run", "--method", "feddyn", *TINY, "--out", "x", "-q")
    said = shoal_("export", "x", "model.safetensors")
    assert said.code == 0 and "model.safetensors" in said.out
    wanted = shoal.run("feddyn", devices=4, sample=2, steps="2", batch=8, rounds=3)
    found = load_file("model.safetensors")
    assert found.keys() == wanted.params.keys()
    assert all(torch.equal(found[k], v) for k, v in wanted.params.items())


def test_export_says_what_it_holds(shoal_):
    shoal_("run", *TINY, "--out", "x", "-q")
    shoal_("export", "x", "model.safetensors")
    with safe_open("model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["shoal"]) == {"model": "mlp", "method": "fedavg", "rounds": 3}


def test_an_exported_model_can_start_the_next_run(shoal_):
    shoal_("run", *TINY, "--out", "x", "-q")
    shoal_("export", "x", "model.safetensors")
    assert shoal_("run", *TINY, "--init", "model.safetensors", "--out", "y", "-q").code == 0
    assert history("y")[0]["loss"] < history("x")[0]["loss"]


# mistakes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words, near",
    [
        (["--method", "fedprx"], "fedprox"),
        (["--method", "FedAvgg"], "fedavg"),
        (["--method", "fedprox(nu=1)"], "mu"),
        (["--data", "digit"], "digits"),
        (["--model", "lenett"], "lenet"),
        (["--split", "dirichle:0.5"], "dirichlet"),
        (["--fleet", "unifrom"], "uniform"),
        (["--engine", "seriell"], "serial"),
        (["--precision", "float23"], "float32"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(shoal_, words, near):
    assert_refused(shoal_("run", *TINY, *words), "unknown-name", f"Did you mean '{near}'?")


@pytest.mark.parametrize("words", [["-s", "roundz=3"], ["recipe.toml"]])
def test_an_unknown_key_gets_the_nearest_one(shoal_, words):
    Path("recipe.toml").write_text("roundz = 3\n")
    said = shoal_("run", *words)
    assert said.kind in ("unknown-name", "bad-recipe")
    assert_refused(said, said.kind, "Did you mean 'rounds'?")


def test_a_bare_name_for_data_show_is_answered_with_its_keys(shoal_):
    said = shoal_("data", "show", "digits")
    assert_refused(said, "bad-recipe", "'digits' is not of the form key=value", "shoal data show data=digits")
    assert "-s " not in said.err


def test_a_name_like_no_other_gets_the_whole_list(shoal_):
    assert_refused(shoal_("run", "--data", "zzzz"), "unknown-name", "Known names: cifar10")
    assert_refused(shoal_("list", "unicorns"), "unknown-name")


@pytest.mark.parametrize("key", ["self", "path", "watch", "given", "cls", "__class__", "", "method.__class__"])
@pytest.mark.parametrize("command", ["run", "resume"])
def test_no_key_reaches_more_than_the_recipe(shoal_, command, key):
    shoal_("run", *TINY, "--out", "x", "-q")
    said = shoal_(command, *(["x"] if command == "resume" else []), "-s", f"{key}=1")
    assert said.kind in ("unknown-name", "bad-value", "bad-recipe"), said.err
    assert_refused(said, said.kind)


@pytest.mark.parametrize(
    "words",
    [
        "--rounds 0",
        "--rounds -3",
        "--devices 0",
        "--sample 0",
        "--batch 0",
        "--lr -0.1",
        "--lr nan",
        "--lr inf",
        "--lr-decay 11",
        "--momentum 1",
        "--weight-decay -1",
        "--clip -1",
        "--seed -1",
        "--eval-every 0",
        "--target 1.5",
        "--until-accuracy 2",
        "--until-bytes -1",
        "--epochs 0",
        "--epochs 5-1",
        "--epochs many",
        "--steps 0",
        "--steps -5",
        "--split dirichlet:0",
        "--split dirichlet:much",
        "--split dirichlet",
        "--split iid:3",
        "--augment blur",
        "--augment crop:-1",
        "--server-data share:2",
        "--server-data all",
        "--compute tpu",
        "--memory-mb -1",
        "--checkpoint-every -1",
        "--devices 3 --sample 4",
        "--method fedprox(mu=-1)",
        "--method fedavgm(beta=1)",
        "--method fedprox(mu='a')",
        "--method fedprox(mu=True)",
        "--method fedprox(mu=1e999)",
        "--method trimmedmean(trim=0.5)",
        "-s rounds=x",
        "-s rounds=2.5",
        "-s normalise=maybe",
        "-s lr=1e999",
    ],
)
def test_a_value_out_of_its_range(shoal_, words):
    assert_refused(shoal_("run", *words.split()), "bad-value")


def test_more_devices_in_a_round_than_there_are(shoal_):
    assert_refused(shoal_("run", "--devices", 3, "--sample", 4), "bad-value", "sample is 4", "devices")


@pytest.mark.parametrize("method", ["median+trimmedmean", "fedprox+fedprox", "uniform+weighted", "median+fednova"])
def test_parts_that_clash(shoal_, method):
    assert_refused(shoal_("run", "--method", method), "clash")
    assert_refused(shoal_("compare", "fedavg", method), "clash")


@pytest.mark.parametrize(
    "method",
    [
        "",
        "+",
        "fedprox+",
        "fedprox(",
        "fedprox(0.1)",
        "fedprox(mu=0.1",
        "fedprox*scaffold",
        "fedavg(mu=1)",
        "fedprox(**{})",
        "fedprox(mu=mu)",
        "fedprox(mu=1+1)",
        "[fedprox]",
        "lambda: 0",
        "fedprox.mu",
        "fedprox; scaffold",
        "__import__('os').system('touch owned')",
        "fedprox(mu=__import__('os').system('touch owned'))",
        "open('owned', 'w')",
        "(" * 900,
        "-" * 1900,
        "a" * 3000,
        "fedprox(mu='\\d\\e\\g\\h')+5 if 1else 2",
        "é(",
        "fedprox\x01",
    ],
    ids=lambda m: m[:20],
)
def test_an_expression_that_cannot_be_read(shoal_, method):
    assert_refused(shoal_("run", "--method", method), "bad-expression")
    assert not Path("owned").exists()


@pytest.mark.parametrize("text", ["rounds", "rounds = ", "[run]\nrounds = 3", "\xff\x00", "rounds = 3\nrounds = 4"])
def test_a_recipe_that_cannot_be_read(shoal_, text):
    Path("recipe.toml").write_text(text, encoding="latin-1")
    assert_refused(shoal_("run", "recipe.toml"), "bad-recipe", "recipe.toml")


def test_a_recipe_that_is_not_there(shoal_):
    assert_refused(shoal_("run", "nowhere.toml"), "bad-recipe", "nowhere.toml")
    assert_refused(shoal_("compare", "fedavg", "--recipe", "nowhere.toml"), "bad-recipe", "nowhere.toml")
    assert_refused(shoal_("run", "-s", "rounds"), "bad-recipe", "key=value")


@pytest.mark.parametrize("data", ["./pets", "pets/train", "t.xlsx"])
def test_data_that_look_like_a_path_are_not_taken_for_a_name(shoal_, data):
    assert_refused(shoal_("run", "--data", data), "no-data", f"no file or folder {data}")
    Path("t.xlsx").write_bytes(b"PK")
    assert_refused(shoal_("run", "--data", "t.xlsx"), "bad-value", "t.xlsx", ".csv, .parquet")


def test_a_folder_as_a_model_gets_the_form_that_reads_it(shoal_):
    Path("mybert").mkdir()
    assert_refused(shoal_("run", "--model", "mybert"), "unknown-name", "hf:mybert")


def test_a_compute_device_that_is_not_there(shoal_):
    assert_refused(shoal_("run", "--compute", "cuda:99"), "no-device", "--compute cpu")


@pytest.mark.parametrize("fleet", ["tiers:a:b", "tiers:[b]:1"])
def test_an_error_quotes_what_was_typed(shoal_, fleet):
    assert fleet in shoal_("run", "--fleet", fleet, *TINY).err


@pytest.mark.parametrize("value", ["cosine:100:0.1", "linear:100"])
def test_a_value_between_colons_is_no_emoji(shoal_, value):
    said = shoal_("compare", "fedavg", "--vary", f"lr_schedule={value},step:5:0.5", *TINY)
    assert said.code == 0 and f"lr_schedule={value}" in said.out and f"lr_schedule={value}" in said.err


def test_a_folder_is_shown_as_it_is_called(shoal_):
    assert "runs/:100:[b]" in shoal_("run", "--out", "runs/:100:[b]", *TINY).out


def test_a_name_that_is_no_text(shoal_):
    """Linux allows names that are not UTF-8; Python passes them on as lone surrogates."""
    said = shoal_("run", *TINY, "-q", "--out", os.fsdecode(b"run-\xff"))
    assert said.code in (0, ERROR_KINDS["bad-value"].code, ERROR_KINDS["disk"].code), said.err


def test_a_folder_that_is_taken(shoal_):
    shoal_("run", *TINY, "--out", "x", "-q")
    assert_refused(shoal_("run", *TINY, "--out", "x"), "folder-exists", "shoal resume x")
    assert_refused(shoal_("compare", "fedavg", *TINY, "--out", "x"), "folder-exists", "--out")


def test_a_file_in_the_place_of_a_folder(shoal_):
    Path("x").write_text("")
    said = shoal_("run", *TINY, "--out", "x")
    assert_refused(said, "folder-exists", "x is a file")
    assert "resume" not in said.err


LONG = "x" * 300
"""A name that no file system takes."""


@pytest.mark.parametrize(
    "words",
    [
        ["resume", LONG],
        ["report", LONG],
        ["predict", LONG, LONG],
        ["run", "--out", LONG],
        ["run", "--model", f"{LONG}.py:Net"],
        ["run", "--data", LONG],
        ["data", "show", "--data", LONG],
        ["proxy", "--keys", LONG],
        ["join", "--server", "h:1", "--data", "x.csv", "--key", LONG],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_is_too_long_is_no_bug(shoal_, words):
    told = shoal_(*words)
    assert told.code in (14, 16, 24) and "bug" not in told.err and "too long" in told.err


def test_a_program_that_is_not_there(shoal_):
    assert_refused(shoal_("predict", "runs/nowhere", "rows.csv"), "no-data", "no file or folder runs/nowhere")


def test_a_trace_that_is_not_there(shoal_):
    said = shoal_("run", *TINY, "--fleet", "trace:nowhere.csv")
    assert_refused(said, "no-data", "nowhere.csv cannot be read: No such file or directory.")


def test_a_folder_without_a_run(shoal_):
    for words in (["resume", "nowhere"], ["resume", "."], ["export", ".", "model.safetensors"]):
        assert_refused(shoal_(*words), "no-run")


def test_what_steers_a_run_cannot_be_changed_later(shoal_):
    shoal_("run", *TINY, "--out", "x", "-q")
    assert_refused(shoal_("resume", "x", "-s", "lr=0.5"), "bad-value", "lr", "rounds")


def test_an_export_needs_a_known_ending(shoal_):
    shoal_("run", *TINY, "--out", "x", "-q")
    assert_refused(shoal_("export", "x", "model.pt"), "bad-value", ".safetensors")


def test_an_export_to_nowhere(shoal_):
    shoal_("run", *TINY, "--out", "x", "-q")
    Path("file").write_text("a file")
    assert_refused(shoal_("export", "x", "file/model.safetensors"), "disk")


@pytest.mark.parametrize("words", [["nonsense"], ["run", "--nonsense"], ["run", "--rounds", "x"], ["resume"]])
def test_a_command_line_that_cannot_be_read(shoal_, words):
    said = shoal_(*words)
    assert said.code == ERROR_KINDS["usage"].code and "Traceback" not in said.err


# parts of one's own ---------------------------------------------------------------------------------------------------
MINE = '''
"""Steps along a mix of the gradient and its sign, more and more of the sign the more often a device took part."""

from dataclasses import dataclass

import torch

from shoal import Part


@dataclass(frozen=True)
class SignMix(Part):
    """Mixes the sign of the gradient into it."""

    share: float = 0.1

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"signmix needs 0 <= share <= 1, got {self.share}")

    def init_device(self, params):
        return {"times": torch.zeros(())}

    def begin(self, params, memory, device):
        return params, {"times": memory["times"]}

    def step(self, update, state, scored, local):
        share = self.share * state["times"] / (1 + state["times"])
        return {k: (1 - share) * u + share * u.sign() for k, u in update.items()}, state

    def end(self, params, state, memory, device):
        return params, {"times": memory["times"] + 1}
'''


def test_a_part_in_a_file_of_ones_own(shoal_):
    Path("mine.py").write_text(MINE)
    for method, out in (("signmix(share=0.5)+scaffold", "x"), ("signmix(share=0)+scaffold", "y"), ("scaffold", "z")):
        assert shoal_("run", "--method", method, "--parts", "mine.py", *TINY, "--out", out, "-q").code == 0
    assert history("x")[-1]["loss"] != history("y")[-1]["loss"]
    assert [row["loss"] for row in history("y")] == [row["loss"] for row in history("z")]


def test_a_run_with_a_part_of_ones_own_can_be_resumed(shoal_):
    Path("mine.py").write_text(MINE)
    words = ["--method", "signmix(share=0.5)", "--parts", "mine.py", *SMALL]
    shoal_("run", *words, "--rounds", 2, "--out", "x", "-q")
    assert shoal_("resume", "x", "-s", "rounds=5", "-q").code == 0
    shoal_("run", *words, "--rounds", 5, "--out", "y", "-q")
    assert history("x") == history("y")


def test_parts_of_ones_own_are_listed_compared_and_checked(shoal_):
    Path("mine.py").write_text(MINE)
    assert "signmix(share=0.1)" in shoal_("list", "methods", "--parts", "mine.py").out
    assert shoal_("compare", "fedavg", "signmix", "--parts", "mine.py", *TINY, "-q").code == 0
    assert_refused(shoal_("run", "--method", "signmix(share=2)", "--parts", "mine.py"), "bad-value", "share")
    assert_refused(shoal_("run", "--method", "signmx", "--parts", "mine.py"), "unknown-name", "'signmix'")


HEAD = """
from dataclasses import dataclass
import torch
from shoal import Part

@dataclass(frozen=True)
class Mine(Part):
    \"\"\"Mine.\"\"\"
"""
BROKEN = {
    "raises": ("def step(self, update, state, scored, local):\n    raise OSError('no such luck')", "no such luck"),
    "raises-nothing-said": ("def step(self, update, state, scored, local):\n    assert False", "AssertionError"),
    "raises-at-length": (
        "def step(self, update, state, scored, local):\n    raise OSError('a\\nb\\nc\\nd')",
        "OSError",
    ),
    "wrong-shape": (
        "def step(self, update, state, scored, local):\n    return {k: u.sum() for k, u in update.items()}, state",
        "shape",
    ),
    "loses-a-tensor": ("def step(self, update, state, scored, local):\n    return {}, state", "nothing"),
    "one-value": ("def step(self, update, state, scored, local):\n    return update", "two values"),
    "no-value": ("def step(self, update, state, scored, local):\n    pass", "two values"),
    "not-a-dict": ("def step(self, update, state, scored, local):\n    return 5, state", "step"),
    "not-tensors": (
        "def step(self, update, state, scored, local):\n    return {k: 0.0 for k in update}, state",
        "step",
    ),
    "new-state": ("def step(self, update, state, scored, local):\n    return update, {'n': 1}", "state"),
    "mutates-update": (
        "def step(self, update, state, scored, local):\n    [u.mul_(2) for u in update.values()]\n"
        "    return update, state",
        "changes what it is given",
    ),
    "mutates-dict": (
        "def step(self, update, state, scored, local):\n    name = next(iter(update))\n"
        "    update[name] = update[name] * 2\n    return update, state",
        "changes what it is given",
    ),
    "mutates-anchor": (
        "def step(self, update, state, scored, local):\n    next(iter(local.anchor.values())).add_(1)\n"
        "    return update, state",
        "changes what it is given",
    ),
    "mutates-memory": (
        "def init_device(self, params):\n    return {'n': torch.zeros(())}\n\n"
        "def end(self, params, state, memory, device):\n    memory['n'].add_(1)\n    return params, memory",
        "changes what it is given",
    ),
    "mutates-model": (
        "def serve(self, params, state, round):\n    [p.mul_(2) for p in params.values()]\n    return params, state",
        "changes what it is given",
    ),
    "branches-in-objective": (
        "def objective(self, inner, local):\n    def score(params, batch):\n        scored = inner(params, batch)\n"
        "        return scored if scored.loss > 0 else scored._replace(loss=scored.loss * 2)\n    return score",
        "branches",
    ),
    "branches-in-step": (
        "def step(self, update, state, scored, local):\n    return update if scored.loss > 0 else {}, state",
        "branches",
    ),
    "branches-on-a-number": (
        "def step(self, update, state, scored, local):\n    late = local.numbers['step'] > 1\n"
        "    return (update if late else dict(update)), state",
        "branches",
    ),
    "takes-a-number-out": (
        "def step(self, update, state, scored, local):\n    factor = float(scored.loss)\n"
        "    return {k: factor * u for k, u in update.items()}, state",
        "branches",
    ),
    "vector-loss": (
        "def objective(self, inner, local):\n    def score(params, batch):\n        scored = inner(params, batch)\n"
        "        return scored._replace(loss=scored.loss.expand(2))\n    return score",
        "loss of shape (2,)",
    ),
    "loss-without-a-gradient": (
        "def objective(self, inner, local):\n    def score(params, batch):\n        scored = inner(params, batch)\n"
        "        return scored._replace(loss=scored.loss.detach())\n    return score",
        "a loss without a gradient",
    ),
    "no-scorer": ("def objective(self, inner, local):\n    return None", "objective"),
    "raises-in-objective": ("def objective(self, inner, local):\n    raise OSError('no such luck')", "no such luck"),
    "raises-in-combine": ("def combine(self, replies, state, round):\n    return {}['x'], state", "KeyError"),
    "combines-wrongly": ("def combine(self, replies, state, round):\n    return {}, state", "combine"),
    "selects-strangers": ("def select(self, devices, state, round):\n    return [99], state", "select"),
    "weighs-wrongly": ("def weigh(self, weights, state, round):\n    return weights[:1] * 0 - 1, state", "weigh"),
    "judges-wrongly": ("def evaluate(self, judged, state, round):\n    return {}", "evaluate"),
    "unknown-type": ("size: 'Elephant' = 1", "Elephant"),
    "raises-in-its-third-round": (
        "def serve(self, params, state, round):\n    return {}['x'] if round.number == 2 else params, state",
        "KeyError",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_part_that_breaks_a_rule_is_told_in_one_sentence(shoal_, fault):
    body, word = BROKEN[fault]
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.splitlines())
    Path("mine.py").write_text(HEAD + lines)
    assert_refused(shoal_("run", "--method", "mine", "--parts", "mine.py", *TINY, "-q"), "bad-part", word)


@pytest.mark.parametrize("point", ["init_server", "init_device", *(p for p in POINTS if p != "enrol")])
def test_a_part_that_raises_is_told_where(shoal_, point):
    """At every point; only nobody is asked to enrol unless a part wants to know."""
    stage = "    stage = 'pack'\n" if point in ("encode", "decode") else ""
    Path("mine.py").write_text(f"{HEAD}{stage}    def {point}(self, *args):\n        raise OSError('no such luck')\n")
    said = shoal_("run", "--method", "mine", "--parts", "mine.py", *TINY, "-q")
    assert_refused(said, "bad-part", "mine", point, "no such luck")


FILES = {
    "syntax-error": ("def (:\n", "line 1"),
    "not-python": ("\x00\x01", "mine.py"),
    "raises-on-import": ("raise OSError('no such luck')", "no such luck"),
    "imports-what-is-not-there": ("import sys\nimport nowhere_at_all\n", "line 2"),
    "not-frozen-by-half": (HEAD.replace("(frozen=True)", "") + "    mu: float = 1.0\n", "line 6"),
    "raises-many-lines": ("raise OSError('a\\nb\\nc\\nd\\ne')", "OSError"),
    "exits": ("import sys\nsys.exit(0)", "SystemExit"),
    "no-part": ("x = 1\n", "no part"),
    "only-imports-one": ("from shoal import Part\n", "no part"),
    "not-a-dataclass": ("from shoal import Part\nclass Mine(Part):\n    '''Mine.'''\n", "frozen"),
    "not-frozen": (HEAD.replace("@dataclass(frozen=True)\n", "") + "    def __init__(self): pass\n", "frozen"),
    "empty": ("", "no part"),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_file_that_holds_no_part_is_told_in_one_sentence(shoal_, fault):
    text, word = FILES[fault]
    Path("mine.py").write_text(text)
    assert_refused(shoal_("run", "--method", "mine", "--parts", "mine.py", *TINY), "bad-part", "mine.py", word)


def test_a_file_of_parts_that_is_not_there(shoal_):
    assert_refused(shoal_("run", "--parts", "mine.py"), "bad-part", "mine.py")
    Path("mine.txt").write_text(MINE)
    assert_refused(shoal_("run", "--parts", "mine.txt"), "bad-part", ".py")


@pytest.mark.parametrize("name", ["FedProx", "fedavg", "Scaffold"])
def test_the_name_of_a_shipped_part_is_taken(shoal_, name):
    Path("mine.py").write_text(HEAD.replace("Mine", name) + "    pass\n")
    assert_refused(shoal_("run", "--parts", "mine.py"), "clash", name.lower())


def test_two_files_cannot_share_a_name(shoal_):
    Path("one.py").write_text(HEAD + "    pass\n")
    Path("two.py").write_text(HEAD + "    pass\n")
    assert_refused(shoal_("run", "--parts", "one.py", "--parts", "two.py", *TINY), "clash", "mine")


@pytest.mark.parametrize("value", ["mine(size=3)", "mine(size=0.5)", "mine(size='x')"])
def test_a_value_of_a_type_that_cannot_be_written(shoal_, value):
    """A field may be of any type; what cannot be given on the command line is told."""
    Path("mine.py").write_text(HEAD + "    size: int | None = None\n")
    said = shoal_("run", "--method", value, "--parts", "mine.py", *TINY, "-q")
    assert said.code == 0 or said.code in (ERROR_KINDS["bad-value"].code, ERROR_KINDS["bad-part"].code), said.err


def installed(folder: Path, target: str, text: str = MINE) -> Path:
    """What pip leaves of a package that offers a part."""
    about = folder / "strange-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "strange.py").write_text(text)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[shoal.parts]\nsignmix = {target}\n")
    return folder


def test_an_installed_package_can_offer_a_part(tmp_path):
    place = installed(tmp_path / "site", "strange:SignMix")
    command = [sys.executable, "-m", "shoal.cli", "run", "--method", "signmix(share=0.5)", *TINY, "--json"]
    environment = os.environ | {"PYTHONPATH": str(place)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize("target", ["nowhere:SignMix", "strange:Nothing", "strange:dataclass", "strange:torch"])
def test_an_installed_package_that_is_broken(shoal_, monkeypatch, tmp_path, target):
    monkeypatch.syspath_prepend(installed(tmp_path / "site", target))
    assert_refused(shoal_("run", "--method", "signmix", *TINY), "bad-part", "signmix")


# the core alone -------------------------------------------------------------------------------------------------------
def test_the_python_side_needs_only_torch_numpy_and_safetensors():
    code = """
        import sys
        sys.modules.update(dict.fromkeys(("typer", "click", "rich", "matplotlib", "pandas")))  # None: not to be found
        import shoal
        result = shoal.run("scaffold", devices=4, sample=2, rounds=2, steps="1")
        assert len(result.history.to_dict()["accuracy"]) == 2
        try:
            result.history.to_pandas()
        except shoal.ShoalError as error:
            print(error.kind.name)
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "missing-extra\n", "")


def test_profile_prints_where_the_time_went_and_writes_a_trace(shoal_, tmp_path):
    said = shoal_("run", *TINY, "--profile", "--out", "profiled")
    assert said.code == 0 and "where the time went" in said.out and "profiled/trace.json: round 2" in said.out
    assert [line for line in said.out.splitlines() if "combine" in line and "%" in line]
    assert "traceEvents" in json.loads((tmp_path / "profiled" / "trace.json").read_text())
    assert shoal_("resume", "profiled", "-s", "rounds=4").code == 0, "a trace in its folder is no part of the run"


def test_profile_without_a_folder_writes_the_trace_here(shoal_, tmp_path):
    said = shoal_("run", *TINY, "--profile", "--quiet")
    assert said == (0, "", "") and (tmp_path / "trace.json").is_file()
