"""Runs whose power is cut or whose disk fails: whatever is lost, they go on and end with the same numbers."""

import errno
import random
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from power import RememberingDisk, Step, World, materialise

import shoal
from shoal.runs.store import refuse_nonempty_folder
from shoal.storage import durable
from shoal.storage.files import read_tree

EVERY = 2
TINY: dict[str, Any] = {"devices": 4, "sample": 2, "rounds": 5, "steps": "1", "batch": 8, "engine": "serial"}
TINY |= {"method": "scaffold", "checkpoint_every": EVERY, "memory_mb": 0}


@pytest.fixture(scope="module")
def whole() -> shoal.Result:
    """The run that nobody disturbs."""
    return shoal.run(**TINY)


def recorded(root: Path, call, *args: Any, **more: Any) -> list[Step]:
    """The steps of writing that a run takes, with a mark where a round was told."""
    disk = RememberingDisk(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "disk", disk)
        call(*args, watch=lambda recipe, row, history: disk.note("told", root, len(history)), **more)
    return disk.log


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> list[Step]:
    """The steps of a whole run, none of which went past the disk that remembers."""
    root = tmp_path_factory.mktemp("power")
    log = recorded(root, shoal.run, out=str(root / "x"), **TINY)
    found = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != ".lock"}
    assert World(log).left(lambda: True, lambda file: file.written) == found
    return log


def cuts(before: list[Step], log: list[Step]) -> Iterator[tuple[int, World, dict[str, bytes]]]:
    """Everything that may be left of a disk after any step, each once."""
    chances, seen = random.Random(0), set()
    for step in range(len(log) + 1):
        for files in World([*before, *log[:step]]).outcomes(chances):
            key = frozenset(files.items())
            if key not in seen:
                seen.add(key)
                yield step, World([*before, *log[:step]]), files


def assert_goes_on(root: Path, files: dict[str, bytes], told: int, whole: shoal.Result) -> None:
    """What is left is resumable, with no more to play again than the rounds since the last checkpoint."""
    shutil.rmtree(root, ignore_errors=True)
    materialise(files, root)
    folder = root / "x"
    if not (folder / "recipe.toml").exists():
        assert not told
        return refuse_nonempty_folder(folder)  # nothing is left that would be in the way of starting again
    kept = read_tree(folder / "checkpoint.safetensors")["rounds"] if (folder / "checkpoint.safetensors").exists() else 0
    assert kept >= told // EVERY * EVERY
    assert (folder / "history.jsonl").read_bytes().count(b"\n") >= kept if kept else True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable.Disk, "sync", lambda disk, path: None)  # takes time and has nothing to say here
        result = shoal.resume(folder)
    assert result.history.equals_except_wall_time(whole.history)
    assert all(torch.equal(result.params[k], whole.params[k]) for k in whole.params)
    assert not list(folder.rglob("*.tmp"))


def test_a_power_cut_at_any_step_loses_no_checkpoint(log, whole, tmp_path):
    tried = 0
    for step, world, files in cuts([], log):
        try:
            assert_goes_on(tmp_path / "cut", files, world.told, whole)
        except (AssertionError, shoal.ShoalError) as error:
            raise AssertionError(f"cut after step {step}, {log[step - 1][:2]}") from error
        tried += 1
    assert tried > len(log)


def test_a_power_cut_while_a_killed_run_is_taken_up_again(log, whole, tmp_path):
    """A kill loses nothing that was written, but it may come before a sync; the next process has to make up for it."""
    renamed = [n + 1 for n, (what, _, new) in enumerate(log) if what == "rename" and "checkpoint" in str(new)]
    for kill in renamed[1:]:
        root = tmp_path / f"killed-{kill}"
        materialise(World(log[:kill]).left(lambda: True, lambda file: file.written), root)
        again = recorded(root, shoal.resume, root / "x")
        for step, _, files in cuts(log[:kill], again):
            try:
                assert_goes_on(tmp_path / "cut", files, 0, whole)
            except (AssertionError, shoal.ShoalError) as error:
                raise AssertionError(f"killed after {kill}, cut after step {step}, {again[step - 1][:2]}") from error


class FailingDisk(durable.Disk):
    """A disk without room for one thing that is written, and with room again for the next."""

    def __init__(self, at: int):
        self.left = at

    def write(self, path: Path, file: IO[bytes], content: bytes) -> None:
        self.left -= 1
        if self.left == 0:
            super().write(path, file, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, file, content)

    def sync(self, path: Path) -> None:
        pass


@pytest.mark.parametrize("memory_mb", [0, 64])
def test_a_disk_that_fails_at_any_write_leaves_no_half_of_a_round(memory_mb, whole, tmp_path, monkeypatch):
    """What can still be written after it, the memories of devices and the checkpoint, is of the same round."""
    for at in count(1):
        folder = tmp_path / str(at)
        monkeypatch.setattr(durable, "disk", FailingDisk(at))
        try:
            shoal.run(out=str(folder), **TINY | {"memory_mb": memory_mb})
            break
        except shoal.ShoalError as error:
            assert "No space left" in error.problem
        assert not list(folder.rglob("*.tmp"))
        if (folder / "recipe.toml").exists():
            result = shoal.resume(folder)
            assert result.history.equals_except_wall_time(whole.history), at
            assert all(torch.equal(result.params[k], whole.params[k]) for k in whole.params), at
    assert at > 15
