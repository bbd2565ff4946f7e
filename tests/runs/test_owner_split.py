"""Where data say whose each sample is, devices are their owners unless the user says how to split."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from typer.testing import CliRunner

import shoal
from shoal.cli.commands import app
from shoal.cli.recipe_flags import resolve_recipe

SMALL: dict[str, Any] = dict(rounds=1, engine="serial")
PARTS = [(torch.randn(10, 5), torch.arange(10) % 2) for _ in range(3)]
X, Y, OWNERS = np.ones((30, 4), np.float32), np.arange(30) % 2, np.arange(30) % 3
SAID = "split: owner, since the data say whose each sample is"


def write_csv(path: Any, head: str = "a,Device,label") -> str:
    rows = [f"{i},{'pqr'[i % 3]},{i % 2}" for i in range(30)]
    path.write_text("\n".join([head, *rows]) + "\n")
    return str(path)


def write_npz(folder: Any) -> str:
    np.savez(folder / "arrays.npz", x=X, y=Y, owners=OWNERS)
    return str(folder / "arrays.npz")


def write_safetensors(folder: Any) -> str:
    save_file({"x": X, "y": Y, "owners": OWNERS}, folder / "arrays.safetensors")
    return str(folder / "arrays.safetensors")


def write_npy(folder: Any) -> str:
    for name, array in {"x": X, "y": Y, "owners": OWNERS}.items():
        np.save(folder / f"{name}.npy", array)
    return str(folder)


def write_images(folder: Any) -> str:
    for device in "pqr":
        for label in "ab":
            (folder / device / label).mkdir(parents=True)
            for i in range(5):
                Image.new("L", (4, 4), i).save(folder / device / label / f"{i}.png")
    return str(folder)


@pytest.mark.parametrize(
    "write", [lambda f: write_csv(f / "t.csv"), write_npz, write_safetensors, write_npy, write_images]
)
def test_files_that_name_owners_are_split_by_them(write, tmp_path, caplog):
    data = write(tmp_path)
    with caplog.at_level(logging.INFO, "shoal"):
        result = shoal.run(data=data, **SMALL)
    assert (result.recipe.split, result.recipe.devices) == ("owner", 0)
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith(SAID)] == [
        SAID + ": 3 devices; --split and --devices choose another one"
    ]
    recipe = resolve_recipe(None, [f"data={data}"], {})
    assert (recipe.split, recipe.devices) == ("owner", 0)


def test_parquet_that_names_owners_is_split_by_them(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame({"a": X[:, 0], "owner": OWNERS, "label": Y}).to_parquet(tmp_path / "t.parquet")
    recipe = resolve_recipe(None, None, {"data": str(tmp_path / "t.parquet")})
    assert (recipe.split, recipe.devices) == ("owner", 0)


def test_a_list_per_device_is_split_by_device_and_resumed(tmp_path):
    whole = shoal.run(data=PARTS, **{**SMALL, "rounds": 3})
    assert whole.recipe.split == "owner" and sorted(whole.history.rows[0]["devices"]) == [0, 1, 2]
    shoal.run(data=PARTS, out=str(tmp_path / "run"), **SMALL)
    resumed = shoal.resume(tmp_path / "run", rounds=3, data=PARTS)
    assert resumed.history["loss"] == whole.history["loss"]


@pytest.mark.parametrize(
    "said, split", [({"split": "dirichlet:0.5", "devices": 20}, "dirichlet:0.5"), ({"split": "iid"}, "iid"),
                    ({"devices": 20}, "dirichlet:0.5")]
)  # fmt: skip
def test_what_the_user_says_counts_without_a_word(said, split, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "shoal"):
        results = [shoal.run(data=data, **said, **SMALL) for data in (PARTS, write_csv(tmp_path / "t.csv"))]
    assert all((r.recipe.split, r.recipe.devices) == (split, 20) for r in results)
    assert not [r for r in caplog.records if "whose each sample is" in r.getMessage()]


def test_a_recorded_run_of_the_default_split_goes_on_with_it(tmp_path):
    keys: dict[str, Any] = dict(data=write_csv(tmp_path / "t.csv"), split="dirichlet:0.5", devices=20, **SMALL)
    shoal.run(out=str(tmp_path / "run"), **keys)
    assert shoal.resume(tmp_path / "run", rounds=2).recipe.split == "dirichlet:0.5"


def test_a_split_that_is_varied_is_no_default(tmp_path):
    data = write_csv(tmp_path / "t.csv")
    made = shoal.compare(["fedavg"], vary=["split=iid,dirichlet:1"], data=data, **SMALL)
    assert [runs[0].recipe.devices for runs in made.results.values()] == [20, 20]
    words = ["compare", "fedavg", "--vary", "split=iid,dirichlet:1", "--data", data, "--rounds", "1", "--workers", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["run", "--data", data, "--rounds", "1", "--engine", "serial"])
    assert " ".join(done.output.split()).count(SAID + ": 3 devices") == 1


def test_columns_with_another_role_and_shipped_data_name_no_owners(tmp_path):
    data = write_csv(tmp_path / "t.csv")
    assert resolve_recipe(None, None, {"data": data, "label": "Device"}).split == "dirichlet:0.5"
    assert resolve_recipe(None, None, {"data": write_csv(tmp_path / "u.csv", "a,b,label")}).devices == 20
    assert resolve_recipe(None, None, {"data": "shakespeare"}).split == "dirichlet:0.5"


def test_a_function_whose_data_name_owners_is_told_what_to_add(tmp_path, caplog):
    (tmp_path / "own.py").write_text(
        "import torch\ndef make():\n    x, y = torch.randn(9, 2), torch.arange(9) % 2\n"
        "    return {'x': x, 'y': y, 'owners': torch.arange(9) % 3, 'test_x': x, 'test_y': y}\n"
    )
    shoal.run(data=f"{tmp_path}/own.py:make", **SMALL)
    told = [r.getMessage() for r in caplog.records if "whose each sample is" in r.getMessage()]
    assert len(told) == 1 and "3 owners" in told[0] and "split = owner and devices = 0" in told[0]
