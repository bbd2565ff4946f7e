"""What somebody new to shoal gets wrong in the first hour, and the sentence that helps: found by trying it."""

import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shoal
from shoal.cli.commands import app
from shoal.core.errors import unknown_name_error

SMALL: dict[str, Any] = dict(rounds=1, devices=4, sample=2, engine="serial")


def refuse(call: Any) -> str:
    with pytest.raises(shoal.ShoalError) as refusal:
        call()
    return str(refusal.value)


def test_metrics_may_have_commas_between_them(tmp_path):
    flags = ["--rounds", "1", "--devices", "4", "--sample", "2", "--engine", "serial", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["run", *flags, "--metrics", "top3,log_loss", "--metrics", "per_class"])
    assert done.exit_code == 0, done.output
    recipe = shoal.Recipe().with_values(metrics=["top3,log_loss", "per_class"])
    assert recipe.metrics == ("top3", "log_loss", "per_class")
    assert 'metrics = ["top3", "log_loss", "per_class"]' in (tmp_path / "run/recipe.toml").read_text()


@pytest.mark.parametrize(
    "typed, meant", [("f1", "f1_macro"), ("acc", "balanced_accuracy"), ("aurocc", "auroc"), ("confusoin", "confusion")]
)
def test_a_name_that_was_cut_short_is_found(typed, meant):
    known = ["auroc", "balanced_accuracy", "confusion", "f1_macro", "f1_micro"]
    assert unknown_name_error("metric", typed, known).advice == f"Did you mean {meant!r}?"


def test_what_names_no_value_is_shown_with_the_flag_that_was_meant():
    assert "--vary lr=0.05,0.1" in refuse(lambda: shoal.compare(["fedavg"], vary=["lr"], **SMALL))
    assert "--over lr=0.01,0.1" in refuse(lambda: shoal.tune(["fedavg"], ["lr"], tries=1, **SMALL))


def test_a_comparison_is_no_run_and_one_of_its_runs_is_named(tmp_path):
    shoal.compare(["fedavg", "fedprox"], out=str(tmp_path / "two"), **SMALL)
    said = refuse(lambda: shoal.export(tmp_path / "two", tmp_path / "model.pt2"))
    assert "holds a comparison" in said and str(tmp_path / "two/0-fedavg") in said
    assert "holds no run" in refuse(lambda: shoal.export(tmp_path, tmp_path / "model.pt2"))


def test_a_list_of_texts_is_one_method_or_several():
    said = refuse(lambda: shoal.run(["fedprox", "scaffold"], **SMALL))
    assert '"fedprox+scaffold"' in said and "shoal.compare" in said


def test_a_function_that_makes_a_model_is_no_model():
    def make_net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    said = refuse(lambda: shoal.run(model=make_net, **SMALL))
    assert "the function make_net" in said and "FILE.py:NAME" in said


def test_a_loss_of_the_program_is_called_the_loss():
    said = refuse(lambda: shoal.run(loss=lambda outputs, targets: (outputs - targets).abs(), **SMALL))
    assert said.startswith("The loss cannot be used: it raises RuntimeError")


def test_a_fault_of_a_part_is_told_with_its_line():
    @dataclass(frozen=True)
    class Hurt(shoal.Part):
        def serve(self, params, state, round):
            return {name: value * self.scale for name, value in params.items()}, state  # type: ignore

    line = Hurt.serve.__code__.co_firstlineno + 1
    said = refuse(lambda: shoal.run(Hurt(), **SMALL))
    assert "no attribute 'scale'" in said and f", line {line}. Correct it there." in said


def test_a_class_with_the_name_of_a_shipped_part_is_called_by_its_own():
    @dataclass(frozen=True)
    class Half(shoal.Part):
        pass

    assert "The class Half would be called 'half', which is already the name of a part." in refuse(
        lambda: shoal.run(Half(), **SMALL)
    )


def test_a_callback_that_returns_true_is_told_how_to_stop(caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        result = shoal.run(callbacks=[lambda watched: True], **{**SMALL, "rounds": 3})
    assert len(result.history) == 3
    assert [record.getMessage() for record in caplog.records].count(
        "The callback test_a_callback_that_returns_true_is_told_how_to_stop.<locals>.<lambda> returned True, which "
        'means nothing: return shoal.Stop("why") to stop the run.'
    ) == 1


def test_the_class_stop_stops_like_an_object_of_it():
    assert shoal.run(callbacks=[lambda watched: shoal.Stop], **{**SMALL, "rounds": 3}).history.stop_reason


def test_a_run_without_rounds_is_named_by_the_report(tmp_path, caplog):
    pytest.importorskip("matplotlib")
    shoal.run(out=str(tmp_path / "done"), **SMALL)
    shoal.run(out=str(tmp_path / "begun"), **{**SMALL, "seed": 1})
    (tmp_path / "begun/history.jsonl").write_text("")
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.report.write_report([tmp_path / "done", tmp_path / "begun"], tmp_path / "report.html")
    assert any("begun has no round yet, and is left out" in record.getMessage() for record in caplog.records)


def test_a_notebook_shows_the_line_and_the_sentence():
    pytest.importorskip("IPython")
    program = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import shoal\\nmu = 0.1\\nshoal.run('fedpox', rounds=1)")
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.home())
    said = told.stdout + told.stderr
    assert "line 3: shoal.run('fedpox', rounds=1)" in said
    assert "ShoalError (unknown-name): There is no method called 'fedpox'. Did you mean 'fedprox'?" in said
    assert len(said.strip().splitlines()) <= 4, said


@pytest.mark.parametrize(
    "takes, told",
    [
        ("hidden", "Net gets hidden = 10, the number of classes:"),
        ("shape, hidden", "Net gets shape = (1, 8, 8), the shape of one input and hidden = 10, the number of classes:"),
        ("classes", None),
        ("input_shape, num_classes", None),
        ("hidden=3", None),
    ],
)
def test_the_arguments_of_a_model_class_are_told_where_they_are_given_by_place(takes, told, tmp_path, caplog):
    head = "from torch import nn\nclass Net(nn.Sequential):\n"
    (tmp_path / "own.py").write_text(
        f"{head}    def __init__(self, {takes}):\n        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    with caplog.at_level(logging.INFO, "shoal"):
        shoal.run(model=f"{tmp_path}/own.py:Net", **SMALL)
    lines = [record.getMessage() for record in caplog.records if "Net gets" in record.getMessage()]
    assert lines == [] if told is None else told in lines[0] and "call these input_shape and classes" in lines[0]


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.embed(x).mean(1))


@pytest.mark.parametrize(
    "rows, token, told",
    [
        (
            range(60),
            49,
            ("its embedding with 10 rows is too small for the tokens", "is 49", "Give its embedding 50 rows"),
        ),
        ([30], 49, ("its embedding with 10 rows is too small for the tokens", "is 49", "Give its embedding 50 rows")),
        (range(60), -1, ("smallest token in the data is -1", "Number tokens from 0 up")),
    ],
)
def test_tokens_beyond_the_embedding_of_an_own_model(rows, token, told):
    x = torch.arange(360).reshape(60, 6) % 10
    x[list(rows), 2] = token
    said = refuse(lambda: shoal.run(data=(x, torch.arange(60) % 3), model=TokenModel(), **SMALL))
    assert all(words in said for words in told) and "in place" not in said


def test_positions_beyond_the_embedding_are_not_blamed_on_tokens():
    class PositionModel(TokenModel):
        def __init__(self):
            super().__init__()
            self.place = nn.Embedding(4, 4)

        def forward(self, x):
            return self.out((self.embed(x) + self.place(torch.arange(x.shape[1]))).mean(1))

    x = torch.arange(360).reshape(60, 6) % 10
    said = refuse(lambda: shoal.run(data=(x, torch.arange(60) % 3), model=PositionModel(), **SMALL))
    assert "index out of range" in said or "embedding with 4 rows is asked for the rows 0 to 5" in said
    assert "tokens" not in said


def test_a_column_that_no_row_has_is_refused_with_the_nearest():
    history = shoal.run(**SMALL).history
    assert "There is no column called 'acuracy'. Did you mean 'accuracy'?" in refuse(lambda: history["acuracy"])
    assert history["accuracy"] == [history.last("accuracy")] and history["void"] == history["top3"] == [None]


def test_a_part_that_acts_nowhere_is_told(caplog):
    @dataclass(frozen=True)
    class Idle(shoal.Part):
        mu: float = 0.1

        def compute_penalty(self, params):
            return self.mu

    shoal.run(Idle(), **SMALL)
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if line.startswith("The part idle acts at no point of a round and changes nothing.")]


def test_a_point_of_another_form_gets_the_wanted_one():
    @dataclass(frozen=True)
    class Bare(shoal.Part):
        def serve(self, params, state):
            return params, state

    said = refuse(lambda: shoal.run(Bare(), **SMALL))
    assert "bare breaks a rule at serve" in said and "Define it as serve(self, params, state, round)." in said
    assert "Correct it there" not in said


def list_warnings(caplog: Any, call: Any) -> list[str]:
    caplog.clear()
    call()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_loss_far_above_guessing_or_the_first_one_is_told_in_one_line(caplog):
    told = list_warnings(caplog, lambda: shoal.run(lr=1000, **{**SMALL, "rounds": 2}))
    assert len(told) == 1 and told[0].startswith("fedavg: The loss is ") and "that of guessing is 2.3" in told[0]
    assert "Give a smaller lr" in told[0]
    told = list_warnings(caplog, lambda: shoal.compare(["fedavg"], seeds=2, lr=1000, **SMALL))
    assert len(told) == 1 and "fedavg (2 of 2 seeds): The loss" in told[0]
    frame = (torch.randn(60, 4), torch.randn(60))
    keys: dict[str, Any] = dict(data=frame, split="iid", lr=1.5, steps="4", task="regress", **{**SMALL, "rounds": 6})
    told = list_warnings(caplog, lambda: shoal.run(model=nn.Linear(4, 1), **keys))
    assert len(told) == 1 and "The loss rose from" in told[0] and "after round 6" in told[0]
    assert list_warnings(caplog, lambda: shoal.run(**{**SMALL, "rounds": 3})) == []


@pytest.mark.parametrize(
    "typed, told",
    [
        ("acuracy", "The nearest is accuracy, which every run tells: leave it out of metrics."),
        ("acc", "The nearest is accuracy, which"),
        ("los", "The nearest is loss, which"),
        ("aurocc", "Did you mean 'auroc'?"),
        ("balanced_acuracy", "Did you mean 'balanced_accuracy'?"),
    ],
)
def test_a_misspelt_metric_that_is_always_told_is_named_as_such(typed, told):
    said = refuse(lambda: shoal.run(metrics=[typed], **SMALL))
    assert f"There is no metric called {typed!r}." in said and told in said
