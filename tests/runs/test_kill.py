"""A run that is killed, at whatever moment, goes on as if nothing had happened."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal import Result
from shoal.cli.commands import run_command_line
from shoal.compare.comparison import resume_comparison
from shoal.runs.start import load_result
from shoal.storage import durable

METHODS = ("fedavg", "scaffold", "feddyn", "fedprox+scaffold+fedavgm")
TINY: dict[str, Any] = {"devices": 4, "sample": 2, "rounds": 24, "steps": "2", "batch": 8, "lr": 0.05}

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "shoal.cli.commands", "torch._dynamo"])
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
    file, limit = folder / "history.jsonl", time.monotonic() + 180
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert alive() and time.monotonic() < limit, "the run ended before it could be killed"
        time.sleep(0.001)


def wait_to_be_killed(recipe: Any, row: dict, history: Any) -> None:
    """Do not make the last round, so that whoever is to kill the run may be as slow as the machine is busy."""
    if len(history) == recipe.rounds - 1:
        signal.pause()


def killed_run(method: str, folder: Path, after: int, **more: Any) -> None:
    """Start a run in a process of its own and kill it when its history has so many rows."""
    recipe = TINY | more | {"method": method, "out": str(folder), "watch": wait_to_be_killed}
    process = FORKS.Process(target=shoal.run, kwargs=recipe, daemon=True)
    process.start()
    wait_for_rows(folder, after, process.is_alive)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


MOMENTS = ((1, 1), (1, 6), (3, 7), (3, 9))
FEW = list(zip(METHODS, MOMENTS))
"""Every method and every moment once."""
WHOLE = [pytest.param(*case, marks=pytest.mark.whole) for case in product(METHODS, MOMENTS) if case not in FEW]


@pytest.mark.parametrize("method, moment", [*FEW, *WHOLE])
def test_killed_between_checkpoints(method, moment, tmp_path):
    every, after = moment
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


PERSONAL = (
    "fedper+topk(ratio=0.3)",
    "fedrep+feddh",
    "ditto",
    "apfl(adaptive=True)",
    "fedala",
    "fedas",
    "pfedme",
    "apfl+fjord",
    "fedrod",
    "lgfedavg+finetune",
)
OWN: dict[str, Any] = {"rounds": 9, "local_test": 0.25, "engine": "serial"}


FEW_PERSONAL = ("fedper+topk(ratio=0.3)", "apfl(adaptive=True)", "fedala", "fedas")


@pytest.mark.parametrize(
    "method", [m if m in FEW_PERSONAL else pytest.param(m, marks=pytest.mark.whole) for m in PERSONAL]
)
def test_killed_with_models_of_devices_own(method, tmp_path):
    """What devices remember and what they get on their own tests goes on, too; one checkpoint in three rounds."""
    wanted = shoal.run(method, **TINY | OWN, out=str(tmp_path / "whole"))
    killed_run(method, tmp_path / "x", 5, checkpoint_every=3, **OWN)
    assert_same(tmp_path / "x", shoal.resume(tmp_path / "x"), wanted)
    ends = [json.loads((tmp_path / name / "devices.json").read_text()) for name in ("x", "whole")]
    assert ends[0] == ends[1] and wanted.history.last("personal_mean") is not None


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


def strays(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def run_until_it_writes(folder: Path) -> tuple[Any, Path]:
    """A run that stands still in the middle of writing a file, and that file."""
    many = TINY | {"rounds": 4000, "checkpoint_every": 1, "model": "mlp-1024", "out": str(folder), "sample": 1}
    process = FORKS.Process(target=shoal.run, args=("fedavg",), kwargs=many, daemon=True)
    process.start()
    assert process.pid
    limit = time.monotonic() + 180
    while time.monotonic() < limit:
        os.kill(process.pid, signal.SIGSTOP)
        if (folder / "checkpoint.safetensors").exists() and (found := strays(folder)):
            return process, found[0]
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.002)
    raise AssertionError("the run was never met while it wrote")


def test_what_a_kill_leaves_of_a_file_is_removed_when_the_folder_is_opened(tmp_path):
    folder = tmp_path / "x"
    process, stray = run_until_it_writes(folder)
    durable.remove_strays(folder)
    assert stray.exists()  # its writer lives
    process.kill()
    process.join()
    assert strays(folder) == [stray]
    shoal.resume(folder, rounds=1 + len(load_result(folder).history))
    assert not strays(folder)


def test_only_files_of_our_own_are_taken_for_strays(tmp_path):
    folder = tmp_path / "x"
    killed_run("scaffold", folder, 3, checkpoint_every=1)
    torn = [".checkpoint.safetensors.4711.tmp", ".recipe.toml.4711.tmp", "memory/00/.0-2-0.safetensors.4711.tmp"]
    own = ["thesis.tmp", ".thesis.tmp", ".tmp", ".lock.tmp"]
    for name in (*torn, *own):
        (folder / name).write_bytes(b"half")
    shoal.resume(folder)
    assert sorted(p.name for p in strays(folder)) == sorted(own)


def test_strays_of_a_comparison_are_removed_too(tmp_path):
    folder = tmp_path / "x"
    shoal.compare(["fedavg"], out=str(folder), **TINY)
    for name in (".compare.toml.4711.tmp", "0-fedavg/seed-0/.engine.json.4711.tmp"):
        (folder / name).write_bytes(b"half")
    resume_comparison(folder, changes={"rounds": TINY["rounds"] + 1})
    assert not strays(folder)


def test_strays_in_a_folder_without_a_run_are_removed_by_the_run_that_takes_it(tmp_path):
    (tmp_path / ".recipe.toml.4711.tmp").write_bytes(b"half")
    shoal.run("fedavg", out=str(tmp_path), **TINY)
    assert not strays(tmp_path)


def test_a_kill_before_the_recipe_is_written_does_not_block_the_folder(tmp_path):
    """What such a kill leaves is a folder with a lock in it and nothing else."""
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / ".lock").touch()
    assert_same(folder, shoal.run("fedavg", out=str(folder), **TINY), whole("fedavg"))


def command_line(*words: str, **more: Any) -> list[str]:
    flags = [word for key, value in (TINY | more).items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "shoal.cli", *words, *flags]


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.whole)]
)
def test_a_signal_leaves_a_run_that_can_be_resumed(number, code, tmp_path):
    folder = tmp_path / "x"
    flags = ("--checkpoint-every", "10000", "--engine", "serial", "--out", str(folder))
    command = command_line("run", "--method", "scaffold", *flags, rounds=4000)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_rows(folder, 5, lambda: process.poll() is None)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code and "Traceback" not in errors
    assert f"{'interrupted' if code == 130 else 'terminated'}: Stopped after" in errors and "shoal resume" in errors
    more: dict[str, Any] = TINY | {"rounds": len(load_result(folder).history.rows) + 3}
    assert_same(folder, shoal.resume(folder, rounds=more["rounds"]), shoal.run("scaffold", **more))


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for child processes in /proc")
def test_sigterm_to_every_process_of_a_pool(tmp_path):
    """A scheduler sends it to all of them."""
    folder = tmp_path / "x"
    command = command_line("run", "--method", "scaffold", "--engine", "pool", "--out", str(folder), rounds=400)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_rows(folder, 5, lambda: process.poll() is None)
    workers = children(process.pid)
    for number in (*workers, process.pid):
        os.kill(number, signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143 and "terminated: Stopped after" in errors, errors
    assert workers and not any(Path(f"/proc/{number}").exists() for number in workers)
    assert len(load_result(folder).history) == len(rows(folder)) >= 5


@pytest.mark.skipif(sys.platform != "linux", reason="looks for child processes in /proc")
@pytest.mark.parametrize("all_of_them", [pytest.param(False, marks=pytest.mark.whole), True])
def test_sigterm_to_the_processes_of_a_comparison(all_of_them, tmp_path):
    folders = [tmp_path / "x" / name / "seed-0" for name in ("0-fedavg", "1-scaffold")]
    command = command_line("compare", "fedavg", "scaffold", "--workers", "2", "--checkpoint-every", "1000", rounds=4000)
    command += ["--engine", "serial", "--out", str(tmp_path / "x")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for folder in folders:
        wait_for_rows(folder, 5, lambda: process.poll() is None)
    for number in (*(children(process.pid) if all_of_them else ()), process.pid):
        os.kill(number, signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143 and "Traceback" not in errors, errors
    assert f"shoal resume {tmp_path / 'x'}" in errors.replace("\n", " ")
    for folder in folders:
        assert len(load_result(folder).history) == len(rows(folder)) >= 5


def terminate_at(rounds: int):
    """A watcher that sends SIGTERM to its own process."""
    return lambda recipe, row, history: os.kill(os.getpid(), signal.SIGTERM) if len(history) == rounds else None


def test_sigterm_in_python_keeps_what_was_reached_and_leaves_no_handler(tmp_path):
    for call in (
        lambda watch: shoal.run("scaffold", watch=watch, out=str(tmp_path / "x"), checkpoint_every=1000, **TINY),
        lambda watch: shoal.resume(tmp_path / "x", watch=watch),
        lambda watch: shoal.compare(["scaffold"], watch=watch, out=str(tmp_path / "y"), **TINY),
    ):
        with pytest.raises(shoal.ShoalError, match="Stopped after [36] rounds") as told:
            call(terminate_at(6 if (tmp_path / "x").exists() and not (tmp_path / "y").exists() else 3))
        assert (told.value.kind.name, told.value.kind.code) == ("terminated", 143)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert_same(tmp_path / "x", shoal.resume(tmp_path / "x"), whole("scaffold"))


def test_sigterm_while_several_runs_are_saved_costs_none_of_them(tmp_path, monkeypatch):
    """A scheduler that sends it again and again."""

    class Pressing(durable.Disk):
        def sync(self, path: Path) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop(recipe, row, history):
        if recipe.seed == 1 and len(history) == 3:
            monkeypatch.setattr(durable, "disk", Pressing())
            os.kill(os.getpid(), signal.SIGTERM)

    many = TINY | {"engine": "batched", "checkpoint_every": 1000, "seeds": 2}
    with pytest.raises(shoal.ShoalError, match="Stopped after 3 rounds") as told:
        shoal.compare(["scaffold"], watch=stop, out=str(tmp_path / "x"), **many)
    assert told.value.kind.name == "terminated"
    assert [len(load_result(folder).history) for folder in tmp_path.glob("x/*/seed-*")] == [3, 3]


def test_handlers_of_others_are_kept(tmp_path):
    met = []
    before = signal.signal(signal.SIGTERM, lambda *args: met.append(args))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        result = shoal.run("scaffold", watch=terminate_at(3), out=str(tmp_path / "x"), **TINY)
        assert signal.getsignal(signal.SIGTERM) is mine and len(met) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert_same(tmp_path / "x", result, whole("scaffold"))


def test_threads_install_no_handlers(tmp_path):
    seen = []

    def watch(recipe, row, history):
        seen.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(
        target=shoal.run, args=("fedavg",), kwargs=TINY | {"watch": watch, "out": str(tmp_path / "x")}
    )
    thread.start()
    thread.join()
    assert set(seen) == {(signal.SIG_DFL, signal.default_int_handler)} and len(seen) == TINY["rounds"]


@pytest.mark.parametrize("number, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_before_the_first_round_has_its_exit_code(number, code, tmp_path, monkeypatch, capfd):
    """Sent while a file of parts is imported, which is long before any round."""
    part = tmp_path / "part.py"
    part.write_text(f"import os, signal\nos.kill(os.getpid(), signal.{number})\n")
    monkeypatch.setattr(sys, "argv", ["shoal", "run", "--parts", str(part), "--out", str(tmp_path / "x")])
    with pytest.raises(SystemExit) as ended:
        run_command_line()
    assert ended.value.code == code and "Traceback" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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
