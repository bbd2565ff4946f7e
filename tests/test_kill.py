"""A run that is killed, at whatever moment, goes on as if nothing had happened."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal import Result

METHODS = ("fedavg", "scaffold", "feddyn", "fedprox+scaffold+fedavgm")
TINY: dict[str, Any] = {"devices": 4, "sample": 2, "rounds": 24, "steps": "2", "batch": 8, "lr": 0.05}

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "shoal.cli", "torch._dynamo"])
"""Every process to be killed is a fork of one that has imported everything, which saves seconds each."""


@cache
def whole(method: str) -> Result:
    """The run that nobody disturbs."""
    return shoal.run(method, **TINY)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The history on disk without what a clock measured."""
    lines = (folder / "history.jsonl").read_bytes().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "wall_seconds"} for line in lines]


def assert_same(folder: Path, result: Result, wanted: Result) -> None:
    assert rows(folder) == [{k: v for k, v in row.items() if k != "wall_seconds"} for row in wanted.history.rows]
    assert list(result.params) == list(wanted.params)
    assert all(torch.equal(result.params[k], wanted.params[k]) for k in wanted.params)


def wait_for_rows(folder: Path, count: int, alive) -> None:
    file, limit = folder / "history.jsonl", time.monotonic() + 60
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert alive() and time.monotonic() < limit, "the run ended before it could be killed"
        time.sleep(0.001)


def killed_run(method: str, folder: Path, after: int, **more: Any) -> None:
    """Start a run in a process of its own and kill it when its history has so many rows."""
    recipe = TINY | more | {"method": method, "out": str(folder)}
    process = FORKS.Process(target=shoal.run, kwargs=recipe, daemon=True)
    process.start()
    wait_for_rows(folder, after, process.is_alive)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("every, after", [(1, 1), (1, 6), (3, 7), (3, 9)])
def test_killed_between_checkpoints(method, every, after, tmp_path):
    killed_run(method, tmp_path / "x", after, checkpoint_every=every)
    assert_same(tmp_path / "x", shoal.resume(tmp_path / "x"), whole(method))


@pytest.mark.parametrize("method", METHODS)
def test_killed_before_the_first_checkpoint(method, tmp_path):
    killed_run(method, tmp_path / "x", 4, checkpoint_every=1000)
    assert not (tmp_path / "x" / "checkpoint.safetensors").exists()
    assert_same(tmp_path / "x", shoal.resume(tmp_path / "x"), whole(method))


def test_killed_with_every_memory_on_disk(tmp_path):
    killed_run("scaffold", tmp_path / "x", 8, checkpoint_every=3, memory_mb=0)
    assert_same(tmp_path / "x", shoal.resume(tmp_path / "x"), whole("scaffold"))


def test_killed_again_and_again(tmp_path):
    """Fifteen kills at moments that nobody chose."""
    folder, moments = tmp_path / "x", random.Random(0)
    killed_run("scaffold", folder, 2, checkpoint_every=1, memory_mb=0)
    for _ in range(15):
        process = FORKS.Process(target=shoal.resume, args=(folder,), daemon=True)
        process.start()
        time.sleep(moments.uniform(0.02, 0.12))
        process.kill()
        process.join()
    assert_same(folder, shoal.resume(folder), whole("scaffold"))


def test_a_kill_while_a_file_is_written_leaves_no_litter(tmp_path):
    folder = tmp_path / "x"
    killed_run("scaffold", folder, 3, checkpoint_every=1)
    for torn in (".checkpoint.safetensors.4711.tmp", ".recipe.toml.4711.tmp", "memory/00/.0-2-0.safetensors.4711.tmp"):
        (folder / torn).write_bytes(b"half")
    shoal.resume(folder)
    assert not list(folder.rglob("*.tmp"))


def test_a_kill_before_the_recipe_is_written_does_not_block_the_folder(tmp_path):
    """What such a kill leaves is a folder with a lock in it and nothing else."""
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / ".lock").touch()
    assert_same(folder, shoal.run("fedavg", out=str(folder), **TINY), whole("fedavg"))


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path):
    folder = tmp_path / "x"
    flags = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "shoal.cli", "run", "--method", "scaffold", *flags, "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_rows(folder, 5, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "shoal resume" in errors and "Traceback" not in errors
    assert_same(folder, shoal.resume(folder), whole("scaffold"))


def test_an_interrupted_run_can_be_resumed_while_its_error_is_still_around(tmp_path):
    """As in a notebook, which keeps the last error and with it all that its frames hold."""

    def stop(recipe, row, history):
        if len(history) == 3:
            raise KeyboardInterrupt

    with pytest.raises(shoal.ShoalError, match="Stopped after 3 rounds") as kept:
        shoal.run("scaffold", watch=stop, out=str(tmp_path / "x"), **TINY)
    assert kept.value.kind.name == "interrupted"
    assert_same(tmp_path / "x", shoal.resume(tmp_path / "x"), whole("scaffold"))


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_run_without_room_for_memories_takes_the_same_course(method, tmp_path):
    result = shoal.run(method, out=str(tmp_path / "x"), memory_mb=0, **TINY)
    assert any((tmp_path / "x" / "memory").rglob("*.safetensors"))
    assert_same(tmp_path / "x", result, whole(method))


def test_memories_need_no_run_folder_to_go_to_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = shoal.run("scaffold", memory_mb=0, **TINY)
    assert all(torch.equal(v, whole("scaffold").params[k]) for k, v in result.params.items())
    assert os.listdir(tmp_path) == []
