"""What lies on disk: damage is told in one sentence, and nothing that was there is lost."""

import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import shoal
from shoal.core.errors import ERROR_KINDS
from shoal.core.model.tree import pack_tree
from shoal.report.run_groups import read_run
from shoal.report.write import write_report
from shoal.runs.checkpoint import RESERVED
from shoal.runs.start import load_result
from shoal.runs.store import RunFolder
from shoal.storage.files import read_tree, tree_as_bytes, write_tree

TINY: dict[str, Any] = {"method": "scaffold", "devices": 4, "sample": 2, "steps": "2", "batch": 8}
PACKAGE = Path(shoal.__file__).parent


@cache
def whole(rounds: int) -> shoal.Result:
    return shoal.run(rounds=rounds, **TINY)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of four rounds."""
    folder = tmp_path_factory.mktemp("store") / "x"
    shoal.run(rounds=4, checkpoint_every=1, out=str(folder), **TINY)
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(finished, tmp_path / "x"))


def kind(call: Callable, *args: Any, **more: Any) -> str:
    """The kind of the error that a call ends with, or nothing."""
    try:
        call(*args, **more)
    except shoal.ShoalError as error:
        assert error.problem and error.advice and "\n" not in f"{error}"
        return error.kind.name
    return ""


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def refusal(folder: Path) -> str:
    """The kind of the error that both resume and export end with; neither may touch the folder."""
    before = contents(folder)
    kinds = {kind(shoal.resume, folder, rounds=6), kind(load_result, folder)}
    assert contents(folder) == before and len(kinds) == 1
    return kinds.pop()


def assert_same(result: shoal.Result, wanted: shoal.Result) -> None:
    assert result.history.equals_except_wall_time(wanted.history)
    assert all(torch.equal(result.params[k], wanted.params[k]) for k in wanted.params)


# checkpoints ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 8, 9, 300, 50_000, -1])
def test_a_truncated_checkpoint_is_refused(folder, size):
    file = folder / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert refusal(folder) == "damaged"


@pytest.mark.parametrize(
    "garbage",
    [b"not a checkpoint", bytes(1000), b"\xff" * 1000, b"\x02" + bytes(7) + b"{}", b"\x80\x04\x95 a pickle", b"PK"],
)
def test_garbage_is_no_checkpoint(folder, garbage):
    (folder / "checkpoint.safetensors").write_bytes(garbage)
    assert refusal(folder) == "damaged"


def test_a_checkpoint_that_is_a_folder_is_refused(folder):
    (folder / "checkpoint.safetensors").unlink()
    (folder / "checkpoint.safetensors").mkdir()
    assert refusal(folder) in ("damaged", "disk")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "5",
        "null",
        "[]",
        "{}",
        '"text"',
        '{"dict": []}',
        '{"dict": 5}',
        '{"dict": "ab"}',
        '{"dict": [[["a"], 1]]}',
        '{"dict": [["a", {}]]}',
        '{"tensor": "0"}',
        '{"tensor": []}',
        '{"list": null}',
        '{"object": ["os.system", "true"]}',
        '{"dict": [], "list": []}',
        "[" * 100_000,
        '{"list": [' * 300 + "]}" * 300,
        '{"list": [' * 2_000 + "]}" * 2_000,
        '{"list": [' * 50_000 + "]}" * 50_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_hostile_header_is_refused(folder, header):
    (folder / "checkpoint.safetensors").write_bytes(save({}, {"shoal": header}))
    assert refusal(folder) == "damaged"


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "memory/*/*.safetensors", "best-*.safetensors"])
def test_a_changed_bit_of_a_tree_is_refused(name, tmp_path):
    """In the header it could be another structure, in a tensor another model; both were gone on with."""
    small: dict = {"devices": 4, "sample": 2, "steps": "1", "memory_mb": 0, "checkpoint_every": 1}
    small |= {"validation": 0.1, "keep_best": True}
    shoal.run("scaffold", rounds=2, out=str(tmp_path / "x"), **small)
    bits = random.Random(name)
    for file in sorted((tmp_path / "x").glob(name))[:2]:
        whole = file.read_bytes()
        assert read_tree(file)
        for _ in range(300):
            spoilt = bytearray(whole)
            spoilt[bits.randrange(8, len(whole))] ^= 1 << bits.randrange(8)
            file.write_bytes(spoilt)
            try:
                found = read_tree(file)
            except shoal.ShoalError as error:
                assert error.kind.name == "damaged"
                continue
            assert tree_as_bytes(found) == whole  # a bit of the padding, or of a name that nobody reads
        file.write_bytes(whole)
    assert len(shoal.resume(tmp_path / "x", rounds=3).history) == 3


def test_a_tree_of_a_former_version_has_no_checksum(tmp_path):
    plain, tensors = pack_tree({"a": torch.ones(2), "b": [1, "x"]})
    (tmp_path / "old").write_bytes(save(tensors, {"shoal": json.dumps(plain)}))
    found = read_tree(tmp_path / "old")
    assert found["a"].tolist() == [1, 1] and found["b"] == [1, "x"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (0, 3)])
def test_a_tree_is_read_as_it_was_written(dtype, shape, tmp_path):
    value = torch.ones(shape).to(dtype)
    write_tree(tmp_path / "tree", {"x": value, "turned": torch.ones(2, 3).T})
    found = read_tree(tmp_path / "tree")
    assert found["x"].dtype == dtype and torch.equal(found["x"], value) and found["turned"].shape == (3, 2)


def test_a_headline_that_no_metric_has_is_refused(tmp_path):
    shoal.run("fedavg", rounds=1, devices=2, sample=1, steps="1", out=str(tmp_path / "x"))
    (tmp_path / "x" / "task.json").write_text('{"headline": "nothing"}')
    for read in (load_result, lambda path: write_report([path], tmp_path / "page.html")):
        with pytest.raises(shoal.ShoalError, match="headline is none of the run's metrics"):
            read(tmp_path / "x")


KEYS = ("format", "recipe", "rounds", "params", "states", "cards", "cuts", "memory")


@pytest.mark.parametrize("key", KEYS)
def test_a_checkpoint_without_a_key_is_refused(folder, key):
    file = folder / "checkpoint.safetensors"
    state = read_tree(file)
    del state[key]
    write_tree(file, state)
    assert refusal(folder) == "damaged"


WRONG = [(key, value) for key in KEYS if key != "recipe" for value in (5, -1, "x", None, inf, [[1]])]
WRONG += [(key, value) for key in ("format", "rounds", "params", "states", "memory", "history") for value in ([], {})]
WRONG += [("history", value) for value in (5, "x", None, torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8))]


@pytest.mark.parametrize("key, value", WRONG, ids=repr)
def test_a_value_of_the_wrong_kind_in_a_checkpoint_is_refused(folder, key, value):
    file = folder / "checkpoint.safetensors"
    write_tree(file, read_tree(file) | {key: value})
    assert refusal(folder) == "damaged"


@pytest.mark.parametrize("version", [0, 3, 2.0, True])
def test_a_checkpoint_of_a_later_version_is_refused(folder, version):
    file = folder / "checkpoint.safetensors"
    write_tree(file, read_tree(file) | {"format": version})
    assert refusal(folder) == "damaged"


@pytest.mark.parametrize("key, value", [("in_flight", [1]), ("clock", 2.5), ("charges", [0.1])])
def test_what_only_a_later_version_can_continue_is_refused(folder, key, value):
    file = folder / "checkpoint.safetensors"
    content = read_tree(file)
    assert content[key] == type(value)()
    write_tree(file, content | {key: value})
    assert refusal(folder) == "damaged"


def test_a_checkpoint_of_the_first_version_is_read(folder):
    file = folder / "checkpoint.safetensors"
    content = {key: value for key, value in read_tree(file).items() if key not in (*RESERVED, "model_digest")}
    again = folder.with_name("again")
    shutil.copytree(folder, again)
    write_tree(again / "checkpoint.safetensors", content | {"format": 1})
    first, second = (shoal.resume(path, rounds=6).params for path in (folder, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "index", [5, [5], [[0]], [["0", 3, 0]], [[0, "../../x", 0]], [[0, 3, "0"]], [[0, 3, 99]], [[0, 99, 0]]], ids=repr
)
def test_a_hostile_index_of_memories_is_refused_and_costs_no_memory(folder, index):
    file = folder / "checkpoint.safetensors"
    write_tree(file, read_tree(file) | {"memory": {"versions": index}})
    before = contents(folder / "memory")
    assert kind(shoal.resume, folder, rounds=12) in ("damaged", "disk")
    assert contents(folder / "memory").items() >= before.items()


def test_a_checkpoint_of_another_model_is_refused(folder):
    file = folder / "checkpoint.safetensors"
    state = read_tree(file)
    state["params"]["fc1.bias"] = torch.zeros(5)
    write_tree(file, state)
    assert refusal(folder) == "damaged"


def test_a_checkpoint_of_other_numbers_is_refused(folder):
    file = folder / "checkpoint.safetensors"
    state = read_tree(file)
    state["params"]["fc1.bias"] = state["params"]["fc1.bias"].long()
    write_tree(file, state)
    assert refusal(folder) == "damaged"


def test_a_checkpoint_of_another_recipe_is_refused(folder):
    file = folder / "recipe.toml"
    file.write_text(file.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))
    assert refusal(folder) == "other-recipe"


def test_a_damaged_memory_is_refused(folder):
    for file in (folder / "memory").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    assert kind(shoal.resume, folder, rounds=6) == "damaged"


def test_a_missing_memory_is_refused(folder):
    shutil.rmtree(folder / "memory")
    assert kind(shoal.resume, folder, rounds=6) in ("damaged", "disk")


# history --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("torn", [b"{", b'{"round":4,"accu', b'{"round":4}', b"\xff\xfe"])
def test_a_torn_last_line_is_dropped(folder, torn):
    with open(folder / "history.jsonl", "ab") as file:
        file.write(torn)
    assert_same(shoal.resume(folder, rounds=6), whole(6))


def test_rows_after_the_checkpoint_are_played_again(folder):
    """A kill between the row of a round and its checkpoint leaves a row too many, whatever it says."""
    with open(folder / "history.jsonl", "ab") as file:
        file.write(b'{"round":4,"accuracy":1.0}\nrubbish\n')
    assert_same(shoal.resume(folder, rounds=6), whole(6))


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"5", b"\xff", b"{}", b'{"round":7}', b"[" * 100_000, b"null"], ids=lambda b: str(b[:9])
)
def test_a_damaged_line_in_the_middle_is_refused(folder, line):
    lines = (folder / "history.jsonl").read_bytes().splitlines()
    (folder / "history.jsonl").write_bytes(b"\n".join([lines[0], line, *lines[2:], b""]))
    assert refusal(folder) == "damaged"


def test_a_row_without_its_columns_is_refused(folder):
    lines = (folder / "history.jsonl").read_bytes().splitlines()
    (folder / "history.jsonl").write_bytes(b"\n".join([lines[0], b'{"round":1}', *lines[2:], b""]))
    assert refusal(folder) == "damaged"


WRONG_CELLS = ['"accuracy":NaN', '"accuracy":Infinity', '"accuracy":1e999', '"accuracy":"0.9"', '"accuracy":true']
WRONG_CELLS += ['"accuracy":0.5,"accuracy":0.9', '"accuracy":0.5,"bytes_up":-1', '"accuracy":0.5,"mine":[1e999]']
WRONG_CELLS += ['"accuracy":0.5,"per_class":["a"]', '"accuracy":0.5,"dropped":3', '"accuracy":1' + "0" * 400]


@pytest.mark.parametrize("cell", WRONG_CELLS, ids=lambda cell: cell[:40])
def test_a_row_with_a_wrong_cell_is_refused_by_all_who_read_it(folder, cell):
    """Told with its line, by resume and report alike."""
    lines = (folder / "history.jsonl").read_bytes().splitlines(keepends=True)
    row = {k: v for k, v in json.loads(lines[1]).items() if f'"{k}"' not in cell}
    lines[1] = (json.dumps(row, separators=(",", ":"))[:-1] + "," + cell + "}\n").encode()
    (folder / "history.jsonl").write_bytes(b"".join(lines))
    for read in (shoal.resume, read_run):
        with pytest.raises(shoal.ShoalError, match=r"history.jsonl .*line 2: ") as error:
            read(folder)
        assert error.value.kind.name == "damaged"


@pytest.mark.parametrize("rest", [b"", b'{"round":3,"accu', bytes(700)], ids=("cut", "torn", "zeros"))
@pytest.mark.parametrize("rows", [0, 3])
def test_rows_that_the_history_lost_are_in_the_checkpoint(folder, rows, rest):
    lines = (folder / "history.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "history.jsonl").write_bytes(b"".join(lines[:rows]) + rest)
    assert load_result(folder).history.equals_except_wall_time(whole(4).history)
    assert_same(shoal.resume(folder, rounds=6), whole(6))
    assert (folder / "history.jsonl").read_bytes().splitlines(keepends=True)[:4] == lines


def test_a_history_that_is_gone_is_in_the_checkpoint(folder):
    (folder / "history.jsonl").unlink()
    assert load_result(folder).history.equals_except_wall_time(whole(4).history)
    assert_same(shoal.resume(folder, rounds=6), whole(6))


def test_a_checkpoint_of_a_former_version_keeps_no_rows(folder):
    file = folder / "checkpoint.safetensors"
    state = read_tree(file)
    del state["history"]
    write_tree(file, state)
    assert_same(shoal.resume(Path(shutil.copytree(folder, folder.with_name("y"))), rounds=6), whole(6))
    (folder / "history.jsonl").write_bytes(b"")
    assert refusal(folder) == "damaged"


@pytest.mark.parametrize("text", ["", "x", "{}\n{}\n{}\n{}\n"])
def test_rows_in_a_checkpoint_are_looked_at_too(folder, text):
    file = folder / "checkpoint.safetensors"
    write_tree(file, read_tree(file) | {"history": torch.tensor(list(text.encode()), dtype=torch.uint8)})
    assert_same(shoal.resume(Path(shutil.copytree(folder, folder.with_name("y"))), rounds=6), whole(6))
    (folder / "history.jsonl").write_bytes(b"")
    assert refusal(folder) == "damaged"


# folders --------------------------------------------------------------------------------------------------------------
def test_a_folder_with_a_run_is_not_written_over(folder):
    before = contents(folder)
    assert kind(shoal.run, rounds=2, out=str(folder), **TINY) == "folder-exists"
    assert contents(folder) == before


def test_a_folder_with_anything_in_it_is_not_written_into(tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    assert kind(shoal.run, rounds=2, out=str(tmp_path), **TINY) == "folder-exists"
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "x").write_text("a file")
    assert kind(shoal.run, rounds=2, out=str(tmp_path / "x"), **TINY) == "folder-exists"


def test_an_empty_folder_will_do(tmp_path):
    assert_same(shoal.run(rounds=4, out=str(tmp_path), **TINY), whole(4))


@pytest.mark.parametrize("call", [shoal.resume, load_result])
@pytest.mark.parametrize("where", ["empty", "missing", "file"])
def test_a_folder_without_a_run(tmp_path, where, call):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    assert kind(call, tmp_path / where) == "no-run"


def test_a_run_that_has_no_checkpoint_yet_has_no_model(folder):
    (folder / "checkpoint.safetensors").unlink()
    assert kind(load_result, folder) == "no-run"


def test_a_bad_recipe_leaves_no_folder(tmp_path):
    assert kind(shoal.run, data="nothing", out=str(tmp_path / "x")) == "unknown-name"
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("a file")
    assert kind(shoal.run, rounds=2, out=str(tmp_path / "file" / "x"), **TINY) == "disk"


def test_a_second_process_is_kept_out(folder):
    held, before = RunFolder.open(folder), contents(folder)
    command = [sys.executable, "-m", "shoal.cli", "resume", str(folder), "-s", "rounds=9"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ERROR_KINDS["folder-exists"].code
    assert "another process" in done.stderr and contents(folder) == before
    held.close()


def test_a_finished_run_lets_go_of_its_folder(folder):
    result = shoal.resume(folder, rounds=5)
    assert_same(shoal.resume(folder, rounds=6), whole(6))
    assert len(result.history) == 5


def test_a_finished_run_leaves_nothing_unneeded(folder):
    """One memory for each device that took part, and no temporary file."""
    took_part = {d for row in whole(4).history.rows for d in row["devices"]}
    names = sorted(contents(folder))
    memories = [n for n in names if n.startswith("memory/")]
    assert names == sorted(
        [
            "checkpoint.safetensors",
            "engine.json",
            "history.jsonl",
            "metrics.json",
            "recipe.toml",
            "split.json",
            "task.json",
            *memories,
        ]
    )
    assert sorted(int(Path(n).name.split("-")[0]) for n in memories) == sorted(took_part)


# a full disk ----------------------------------------------------------------------------------------------------------
class Disk:
    """A small disk that can be filled up and emptied; where none can be mounted, files are kept from growing."""

    def __init__(self, path: Path):
        self.path, self.filler = path, path / "filler"
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
        self.mounted = not subprocess.run(mount, capture_output=True).returncode
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, but: int) -> None:
        """Leave so many bytes free."""
        if self.mounted:
            free = os.statvfs(self.path)
            self.filler.write_bytes(bytes(free.f_bavail * free.f_frsize - but))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (but // 8, self.limits[1]))

    def empty(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        self.filler.unlink(missing_ok=True)

    def remove(self) -> None:
        self.empty()
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    small = Disk(tmp_path / "disk")
    yield small
    small.remove()


def test_a_run_on_a_full_disk_can_be_resumed_when_there_is_room(disk):
    disk.fill(but=300_000)
    assert kind(shoal.run, rounds=6, checkpoint_every=1, out=str(disk.path / "x"), **TINY) == "disk"
    assert not list(disk.path.rglob("*.tmp"))
    disk.empty()
    assert_same(shoal.resume(disk.path / "x"), whole(6))


def test_a_disk_that_fills_up_later_keeps_what_was_saved(disk):
    folder = disk.path / "x"
    shoal.run(rounds=3, checkpoint_every=1, out=str(folder), **TINY)
    disk.fill(but=8_192)
    assert kind(shoal.resume, folder, rounds=6) == "disk"
    disk.empty()
    assert load_result(folder).history.equals_except_wall_time(whole(3).history)
    assert_same(shoal.resume(folder, rounds=6), whole(6))


def test_a_disk_that_is_full_from_the_start(disk):
    """The folder of a run that could not even begin is free for the next one."""
    disk.fill(but=0)
    assert kind(shoal.run, rounds=4, out=str(disk.path / "x"), **TINY) == "disk"
    disk.empty()
    assert_same(shoal.run(rounds=4, out=str(disk.path / "x"), **TINY), whole(4))


# a folder that goes away ----------------------------------------------------------------------------------------------
def away(change: Callable[[Path], Any], at: int = 2) -> Callable:
    """A watcher that does something to the folder of its run after so many rounds."""
    return lambda recipe, row, history: change(Path(recipe.out)) if len(history) == at else None


GONE = [
    {},
    {"memory_mb": 0},
    {"checkpoint_every": 1},
    {"checkpoint_every": 100},
    {"memory_mb": 0, "checkpoint_every": 1},
]


@pytest.mark.parametrize("more", GONE, ids=repr)
def test_a_folder_that_was_deleted_during_its_run_does_not_come_back(tmp_path, more):
    with pytest.raises(shoal.ShoalError, match="deleted, moved or replaced") as told:
        shoal.run(rounds=4, out=str(tmp_path / "x"), watch=away(shutil.rmtree), **TINY | more)
    assert told.value.kind.name == "disk" and not (tmp_path / "x").exists()


def test_a_folder_that_was_moved_during_its_run_goes_on_where_it_is(tmp_path):
    there = tmp_path / "y"
    with pytest.raises(shoal.ShoalError, match="deleted, moved or replaced"):
        shoal.run(rounds=4, out=str(tmp_path / "x"), watch=away(lambda path: path.rename(there)), **TINY)
    assert not (tmp_path / "x").exists()
    assert_same(shoal.resume(there), whole(4))


def test_a_run_in_the_place_of_a_deleted_one_is_left_alone(tmp_path):
    def replace(path: Path) -> None:
        shutil.rmtree(path)
        shoal.run(rounds=4, out=str(path), **TINY)

    with pytest.raises(shoal.ShoalError, match="deleted, moved or replaced"):
        shoal.run(rounds=6, out=str(tmp_path / "x"), watch=away(replace), **TINY)
    assert_same(load_result(tmp_path / "x"), whole(4))


@pytest.mark.parametrize("name", ["recipe.toml", "history.jsonl"])
def test_a_file_that_was_deleted_during_a_run_does_not_come_back_without_its_content(tmp_path, name):
    with pytest.raises(shoal.ShoalError) as told:
        shoal.run(rounds=4, out=str(tmp_path / "x"), watch=away(lambda path: (path / name).unlink()), **TINY)
    assert told.value.kind.name == "disk" and not (tmp_path / "x" / name).exists()


def test_a_lock_that_was_deleted_during_a_run_costs_nothing(tmp_path):
    ended = shoal.run(rounds=4, out=str(tmp_path / "x"), watch=away(lambda p: (p / ".lock").unlink()), **TINY)
    assert_same(ended, whole(4))


def test_runs_side_by_side_keep_theirs_when_the_folder_of_one_goes_away(tmp_path):
    def delete(recipe, row, history):
        if recipe.seed == 0 and len(history) == 2:
            shutil.rmtree(recipe.out)

    many = {**TINY, "methods": [TINY["method"]], "seeds": 2, "engine": "batched", "checkpoint_every": 100}
    del many["method"]
    with pytest.raises(shoal.ShoalError, match="deleted, moved or replaced"):
        shoal.compare(rounds=4, out=str(tmp_path / "x"), watch=delete, **many)
    [other] = tmp_path.glob("x/*/seed-*")
    assert other.name == "seed-1" and len(load_result(other).history) >= 2


# what is never used ---------------------------------------------------------------------------------------------------
def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [n.name for n in names]
        case ast.ImportFrom(module=module, names=names):
            return [module or "", *(f"{module}.{n.name}" for n in names)]
    return []


# the reader of CIFAR's batches, whose unpickler knows arrays and containers only; the pipes between a process and its
# own children, which nobody else can write to; and what goes to a Ray cluster, which unpickles anyway
MAY_PICKLE = (
    "data/safe_unpickle.py",
    "engines/workers/shared_memory.py",
    "engines/workers/fork_worker.py",
    "engines/workers/tensor_pickle.py",
    "compare/object_transfer.py",
)


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_pickled_or_evaluated(file):
    for node in ast.walk(ast.parse(file.read_text())):
        roots = {name.split(".")[0] for name in imported(node)}
        if str(file.relative_to(PACKAGE)) not in MAY_PICKLE:
            assert "pickle" not in roots
        assert not roots & {"_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
        assert not {"torch.load", "torch.save"} & set(imported(node))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert f"{node.value.id}.{node.attr}" not in ("torch.load", "torch.save")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant) and node.value.value is False


def test_a_checkpoint_is_plain_safetensors(folder):
    """Anybody can read it: the header is JSON, the rest are tensors."""
    raw = (folder / "checkpoint.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert json.loads(header["__metadata__"]["shoal"])["dict"][0] == ["format", 2]
