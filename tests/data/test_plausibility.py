"""Data that are probably not what was meant are told in one line; a run that learns nothing ends with its own code."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal.cli.commands import run_command_line
from shoal.core.errors import ERROR_KINDS
from shoal.models import build_model

TINY: dict[str, Any] = dict(devices=4, sample=2, rounds=2, steps="1", batch=4, split="iid")
FLAGS = "--devices 4 --sample 2 --rounds 2 --steps 1 --batch 4 --split iid"


def samples(labels: list[int], count: int = 60, shape: tuple[int, ...] = (5,)) -> dict[str, torch.Tensor]:
    """As many samples of noise, with these labels in turn, and the same to test with."""
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.tensor(labels).repeat(count)[:count]
    return {"x": x, "y": y, "test_x": x, "test_y": y}


@pytest.fixture
def warned(caplog):
    """The warnings of a call."""

    def call(function, *args: Any, **more: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shoal"):
            function(*args, **more)
        return [record.getMessage() for record in caplog.records]

    return call


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """A command line in an empty folder: its code, its lines on stdout, its lines on stderr."""
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr("sys.argv", ["shoal", *line.split()])
        capsys.readouterr()
        try:
            run_command_line()
            code: Any = 0
        except SystemExit as error:
            code = error.code or 0
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return call


# data -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "more", "says"),
    [
        (samples([1, 2, 3]), {}, ["1 of 4 classes have no sample (0)", "subtract 1 from every label"]),
        (samples([0, 7, 14]), {}, ["12 of 15 classes have no sample (1, 2, 3, 4, 5, 6, 8, 9, ...)", "0, 1, 2 and so"]),
        (samples([0, 7, 140]), {}, ["138 of 141 classes have no sample", "task = regress where they are amounts"]),
        (samples([0, 1], shape=(32, 32, 3)), {}, ["(32, 32, 3) are read as 32 channels of 32 x 3", "permute(0, 3, 1"]),
        (samples([0, 1], shape=(28, 28, 1)), {}, ["28 channels of 28 x 1"]),
        (samples([0, 1], count=100), {"devices": 500}, ["500 devices for 100 samples: at least 400", "fewer devices"]),
        (
            samples([0, 1]) | {"test_y": torch.arange(60) % 3},
            {},
            ["1 of 3 classes are tested and have no sample", "(2)"],
        ),
    ],
)
def test_odd_data_are_told_once_in_a_run_and_once_in_a_comparison(warned, data, more, says):
    for lines in (
        warned(shoal.run, data=data, **TINY | more),
        warned(shoal.compare, ["fedavg", "fedprox"], seeds=2, data=data, **TINY | more),
    ):
        assert len(lines) == 1 and all(words in lines[0] for words in says)


THREE_DEVICES = [(torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2)] * 3


@pytest.mark.parametrize(
    "more",
    [
        {"data": samples([0, 1, 2])},
        {"data": samples([0, 1], shape=(3, 32, 32))},
        {"data": samples([0, 1], shape=(1, 28, 28))},
        {"data": samples([0, 1], shape=(4, 4, 4))},
        {"data": samples([0, 1], count=30), "devices": 30},
        {"data": samples([0, 1], count=30), "devices": 300, "split": "virtual:5"},
        {"split": "dirichlet:0.1", "devices": 100},
        {"data": THREE_DEVICES},
        {"data": THREE_DEVICES, "split": "owner", "devices": 0},
        {"data": "noise-cifar100"},
        {"data": "noise-ptb", "model": "lstm"},
    ],
    ids=lambda more: str(more)[:30],
)
def test_sound_data_are_not_remarked_upon(warned, more):
    assert warned(shoal.run, **TINY | more) == []


def test_a_run_that_goes_on_repeats_no_remark(warned, tmp_path, command):
    (tmp_path / "t.csv").write_text("a,b,label\n" + "".join(f"{i},{i % 3},{1 + i % 3}\n" for i in range(40)))
    assert len(warned(shoal.run, data=tmp_path / "t.csv", out=tmp_path / "x", **TINY)) == 1
    assert warned(shoal.resume, tmp_path / "x", rounds=3) == []


@pytest.mark.whole
def test_remarks_come_once_from_several_processes(warned, tmp_path):
    (tmp_path / "t.csv").write_text("a,b,label\n" + "".join(f"{i},{i % 3},{1 + i % 3}\n" for i in range(40)))
    lines = warned(shoal.compare, ["fedavg", "fedprox"], workers=2, data=tmp_path / "t.csv", **TINY)
    assert len(lines) == 1 and "1 of 4 classes" in lines[0]


@pytest.mark.parametrize(("flags", "count"), [("", 1), ("--json", 1), ("--quiet", 0)])
def test_the_command_line_says_it_on_stderr(command, flags, count):
    Path("t.csv").write_text("a,b,label\n" + "".join(f"{i},{i % 3},{1 + i % 3}\n" for i in range(40)))
    code, out, err = command(f"run --data t.csv {FLAGS} {flags}")
    found = [line for line in err if line.startswith("warning: 1 of 4 classes have no sample (0)")]
    assert code == 0 and len(found) == count and not any("warning" in line for line in out)
    assert flags != "--json" or [json.loads(line)["round"] for line in out] == [0, 1]


# nothing learnt -------------------------------------------------------------------------------------------------------
def test_a_run_without_a_round_that_counts_has_its_own_exit_code_and_loses_nothing(command):
    code, out, err = command(f"run --lr 1e38 --clip 0 {FLAGS} --steps 5 --out x")
    assert code == ERROR_KINDS["nothing-learnt"].code == 40
    assert err[-2] == (
        "nothing-learnt: In all 2 rounds no reply could be used (its update is not finite): "
        "the model is as it was before the run."
    )
    assert "smaller lr" in err[-1] and any("accuracy" in line for line in out)
    rows = [json.loads(line) for line in Path("x/history.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["void"] for row in rows) and Path("x/checkpoint.safetensors").is_file()
    assert command("resume x -s rounds=3")[0] == 40
    assert len(command(f"run --lr 1e38 {FLAGS} --steps 5 --json")[1]) == 2


def test_a_comparison_ends_so_only_where_no_run_has_learnt_anything(command):
    code, out, err = command(f"compare fedavg --vary lr=0.1,1e38 {FLAGS} --steps 5")
    assert code == 0 and any("1e38" in line for line in out)
    assert len([line for line in err if line.startswith("warning: fedavg, lr=1e38: In all 2 rounds")]) == 1
    code, out, err = command(f"compare fedavg fedprox --lr 1e38 {FLAGS} --steps 5 --json")
    assert code == 40 and len(json.loads(out[0])) == 2 and err[0].startswith("nothing-learnt") and len(err) == 2


def test_in_python_the_result_is_returned_and_a_warning_given(warned):
    made = []
    lines = warned(lambda: made.append(shoal.run(failures=1.0, **TINY)))
    assert len(lines) == 1 and "(it failed)" in lines[0] and "smaller --failures" in lines[0]
    assert len(made[0].history) == 2
    lines = warned(shoal.compare, ["fedavg"], seeds=2, lr=1e38, **TINY | {"steps": "5"})
    assert len(lines) == 1 and lines[0].startswith("fedavg (2 of 2 seeds): In all 2 rounds no reply")


def test_a_run_that_ends_without_a_loss_is_told(command, warned):
    """At this rate the first round still counts, and leaves a model from which no other does."""
    code, out, err = command("run --rounds 3 --lr 1e9")
    said = [
        line for line in err if line.startswith("warning: fedavg: The loss of the model is not finite after 3 rounds")
    ]
    assert code == 0 and len(said) == 1 and "smaller lr" in said[0] and any("accuracy" in line for line in out)
    assert len(warned(shoal.run, rounds=3, lr=1e9)) == 1
    assert len(warned(shoal.compare, ["fedavg"], seeds=2, rounds=3, lr=1e9)) == 1


def test_a_run_in_which_some_rounds_count_ends_well(warned):
    assert warned(shoal.run, failures=0.7, **TINY | {"rounds": 6}) == []


# first weights --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e300])
def test_first_weights_that_are_not_finite_are_refused_at_once(tmp_path, wrong):
    weights = {k: v.double() for k, v in build_model("mlp", (1, 8, 8), 10, 0).initial.items()}
    name = list(weights)[0]
    weights[name].view(-1)[3] = wrong
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(shoal.ShoalError, match=rf"w.safetensors has first weights that are not finite \({name}\)") as e:
        shoal.run(init=tmp_path / "w.safetensors", out=tmp_path / "x", **TINY)
    assert e.value.kind.name == "bad-value" and not (tmp_path / "x").exists()


def test_a_module_with_weights_that_are_not_finite_is_refused():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.constant_(module[1].bias, float("nan"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(shoal.ShoalError, match=r"not finite \(1.bias\)"):
        shoal.run(model=module, **TINY)
