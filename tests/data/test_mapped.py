"""Data larger than memory: arrays stay in their files, and train to the same bits as those in memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import shoal
from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams
from shoal.data import mapped, parquet_files
from shoal.data.user_data import build_user_dataset
from shoal.runs.fingerprint import fingerprint_dataset
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import load_recipe_dataset

TINY: dict[str, Any] = dict(split="iid", devices=4, sample=3, rounds=2, batch=4, metrics=("devices",))


def make_arrays(dtype: type, rows: int = 60) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (rows, 1, 5, 5)).astype(dtype)
    return {"x": x, "y": np.arange(rows) % 3, "test_x": x[:9], "test_y": np.arange(9) % 3}


def write_arrays(arrays: dict[str, np.ndarray], folder: Path, kind: str) -> str:
    if kind == "npy":
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return str(folder)
    if kind == "npz":
        np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
        return str(folder / "data.npz")
    save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / "data.safetensors")
    return str(folder / "data.safetensors")


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("engine", ["serial", "batched", "pool"])
def test_arrays_in_files_train_to_the_bits_of_arrays_in_memory(kind, dtype, engine, tmp_path, monkeypatch):
    if engine == "pool" and (kind != "npy" or sys.platform == "win32"):
        pytest.skip("worker processes take the same path for each file")
    arrays = make_arrays(dtype)
    expected = shoal.run(data=arrays, engine=engine, **TINY).history.rows
    monkeypatch.setattr(mapped, "LEFT_ON_DISK", 0)
    path = write_arrays(arrays, tmp_path, kind)
    assert build_user_dataset(path).mapped == (kind != "npz")
    rows = shoal.run(data=path, engine=engine, **TINY).history.rows
    assert [(row["loss"], row["accuracy"]) for row in rows] == [(row["loss"], row["accuracy"]) for row in expected]


def test_inputs_of_several_arrays(tmp_path):
    arrays = make_arrays(np.float32)
    for name in ("x", "test_x"):
        np.save(tmp_path / f"{name}.image.npy", arrays[name])
        np.save(tmp_path / f"{name}.numbers.npy", arrays[name][:, 0, 0])
    for name in ("y", "test_y"):
        np.save(tmp_path / f"{name}.npy", arrays[name])
    own = build_user_dataset(tmp_path)
    assert own.inputs["image"].shape == (60, 1, 5, 5) and own.inputs["numbers"].shape == (60, 5) and own.mapped


def test_samples_are_held_back_without_a_copy_where_they_are_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "LEFT_ON_DISK", 0)
    arrays = make_arrays(np.float32)
    halves = {"x": arrays["x"], "y": arrays["y"]}
    with pytest.raises(ShoalError, match="cannot be held back at random"):
        build_user_dataset(write_arrays(halves, tmp_path, "npy"))
    own = build_user_dataset(write_arrays(halves | {"order": np.arange(60)}, tmp_path, "npy"))
    assert len(own.test_inputs) == 12 and own.test_inputs.untyped_storage().data_ptr() == (
        own.inputs.untyped_storage().data_ptr()
    )
    with pytest.raises(ShoalError, match="normalise would copy"):
        shoal.run(data=write_arrays(arrays, tmp_path, "npy"), normalise=True, **TINY)


def test_memory_maps_of_numpy_are_not_copied(tmp_path):
    write_arrays(make_arrays(np.float32), tmp_path, "npy")
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    own = build_user_dataset({"x": x, "y": np.arange(60) % 3}, test=(x[:3], [0, 1, 2]))
    assert own.inputs.data_ptr() == x.ctypes.data and own.mapped


BIG = """
import os, resource, sys
import numpy as np
import shoal
folder, engine, dtype = sys.argv[1:]
size = np.dtype(dtype).itemsize
rows = 4 * 2**30 // size // 1024
x = np.lib.format.open_memmap(f"{folder}/x.npy", "w+", np.dtype(dtype), (rows, 1024))  # holes, but for a few rows
for row in range(0, rows, rows // 500):
    x[row, row % 10] = 1
y = np.lib.format.open_memmap(f"{folder}/y.npy", "w+", np.int64, (rows,))
y[:] = np.arange(rows) % 10
del x, y
np.save(f"{folder}/test_x.npy", np.eye(10, 1024, dtype=dtype))
np.save(f"{folder}/test_y.npy", np.arange(10))
status = dict(line.split(":") for line in open("/proc/self/status"))
allowed = int(status["VmData"].split()[0]) * 1024 + 4 * 2**30 + 2**30  # what is there, the mapping, and 1 GB
resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
result = shoal.run(data=folder, split="iid", devices=100, sample=4, rounds=2, steps="3", batch=16, engine=engine)
assert len(result.history.rows) == 2
status = dict(line.split(":") for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) // 1024)
"""


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in /proc")
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_four_gigabytes_are_trained_on_in_one(dtype, engine, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BIG, str(tmp_path), engine, dtype], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1024


def write_parquet(folder: Path, halves: tuple[str, ...] = ("",)) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rng = np.random.default_rng(0)
    for half in halves:
        (folder / half).mkdir(exist_ok=True, parents=True)
        for i in range(3):
            columns = {"a": rng.normal(size=40), "b": rng.integers(0, 9, 40), "owner": rng.integers(0, 4, 40)}
            columns |= {"label": rng.choice(["u", "v"], 40)}
            parquet.write_table(pyarrow.table(columns), folder / half / f"{i}.parquet", row_group_size=7)
    return folder


@pytest.mark.parametrize("halves", [("",), ("train", "test")])
def test_large_parquet_files_are_copied_once_and_give_the_same_data_set(halves, tmp_path, monkeypatch):
    folder = write_parquet(tmp_path / "files", halves)
    recipe = Recipe().with_values(data=str(folder), data_dir=str(tmp_path / "cache"), owner="owner")
    expected = load_recipe_dataset(recipe, RandomStreams(0))
    monkeypatch.setattr(parquet_files, "READ_AS_A_WHOLE", 0)
    monkeypatch.setattr(parquet_files, "ROWS", 11)
    for _ in range(2):
        own = load_recipe_dataset(recipe, RandomStreams(0))
        assert own.mapped and fingerprint_dataset(own) == fingerprint_dataset(expected)
        monkeypatch.setattr(parquet_files, "convert_parquet", None)  # the second time nothing is converted
    for keys, words in ((dict(missing="mean"), "too large to be read"), (dict(label="a"), "holds string")):
        monkeypatch.undo()
        monkeypatch.setattr(parquet_files, "READ_AS_A_WHOLE", 0)
        with pytest.raises(ShoalError, match=words):
            load_recipe_dataset(recipe.with_values(**keys), RandomStreams(0))


def test_lists_in_parquet_files_are_one_array(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pixels = np.random.default_rng(0).integers(0, 256, (30, 6)).astype(np.uint8)
    lists = pyarrow.FixedSizeListArray.from_arrays(pixels.reshape(-1), 6)
    parquet.write_table(pyarrow.table({"pixels": lists, "label": np.arange(30) % 3}), tmp_path / "t.parquet")
    recipe = Recipe().with_values(data=str(tmp_path / "t.parquet"), data_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(parquet_files, "READ_AS_A_WHOLE", 0)
    own = load_recipe_dataset(recipe, RandomStreams(0))
    assert own.inputs.dtype == torch.uint8 and own.inputs.shape == (24, 6) and own.test_inputs.shape == (6, 6)
    rows = shoal.run(**{**vars(recipe), **TINY, "engine": "serial"}).history.rows
    assert len(rows) == 2


def test_lists_of_unequal_length_in_large_parquet_files_are_refused(tmp_path, monkeypatch):
    """Also where all of them together could be cut into as many rows of one length."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lists = [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0]] * 10
    parquet.write_table(pyarrow.table({"a": lists, "label": np.arange(20) % 2}), tmp_path / "t.parquet")
    monkeypatch.setattr(parquet_files, "READ_AS_A_WHOLE", 0)
    recipe = Recipe().with_values(data=str(tmp_path / "t.parquet"), data_dir=str(tmp_path / "cache"))
    with pytest.raises(ShoalError, match="lists of unequal length"):
        load_recipe_dataset(recipe, RandomStreams(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_safetensors_is_read(dtype, tmp_path):
    x, y = torch.randn(20, 3).to(dtype), torch.arange(20) % 2
    save_file({"x": x, "y": y, "test_x": x.clone(), "test_y": y.clone()}, tmp_path / "own.safetensors")
    assert torch.equal(build_user_dataset(tmp_path / "own.safetensors").inputs, x.float())  # type: ignore[arg-type]
    save_file({"x": x.index_fill(0, torch.tensor([7]), torch.inf), "y": y}, tmp_path / "odd.safetensors")
    with pytest.raises(ShoalError, match="not finite in sample 7"):
        build_user_dataset(tmp_path / "odd.safetensors")
