"""Runs on data, models and populations of any kind, as a user would start them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.errors import ShoalError
from shoal.core.measures.divergence import jensen_shannon_divergence
from shoal.core.model import tree
from shoal.data.dataset import read_digits

TINY: dict[str, Any] = dict(devices=4, sample=2, rounds=2, split="iid", batch=16)

SINGLE: dict[str, Any] = TINY | {"batch": 1}


def two_moons(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (count,), generator=generator)
    x = torch.randn(count, 3, generator=generator) + 2 * y[:, None]
    return x, y


def test_tensors_of_ones_own():
    result = shoal.run(data=two_moons(), **TINY)
    assert result.accuracy is not None and result.accuracy > 0.8


def test_a_torch_data_set_and_a_list_per_device():
    x, y = two_moons()
    whole = shoal.run(data=TensorDataset(x, y), **TINY)
    devices = [(x[:20], y[:20]), (x[20:50], y[20:50]), (x[50:120], y[50:120]), (x[120:], y[120:])]
    own: dict[str, Any] = TINY | {"split": "owner", "sample": 4}
    parts = shoal.run(data=devices, **own)
    assert whole.accuracy and parts.accuracy
    assert parts.history["devices"] == [[0, 1, 2, 3]] * 2


def test_a_table_by_its_path(tmp_path):
    x, y = two_moons()
    lines = ["a,b,c,label", *(",".join(map(str, [*row.tolist(), int(label)])) for row, label in zip(x, y))]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    assert shoal.run(data=str(tmp_path / "table.csv"), **TINY).accuracy is not None


def test_a_run_whose_devices_would_have_other_samples_is_not_gone_on_with(tmp_path):
    table, folder = tmp_path / "table.csv", tmp_path / "run"
    rows = [f"{number}.5,{number % 3}" for number in range(60)]
    table.write_text("\n".join(["a,label", *rows]))
    shoal.run(data=str(table), out=folder, **TINY)
    table.write_text("\n".join(["a,label", *rows[:40], *(f"{number}.5,0" for number in range(40, 60))]))
    with pytest.raises(ShoalError, match="other samples now than when the run in .* was begun") as error:
        shoal.resume(folder, rounds=3)
    assert error.value.kind.name == "other-recipe"
    table.write_text("\n".join(["a,label", *rows]))
    assert len(shoal.resume(folder, rounds=3).history) == 3


def test_a_module_of_ones_own():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    result = shoal.run(data=two_moons(), model=module, **TINY)
    assert tree.is_same_tree(dict(module.state_dict()), before) and not tree.is_same_tree(result.params, before)
    assert isinstance(list(result.module().children())[1], nn.Tanh)


def test_a_model_in_a_file(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self, input_shape, classes):\n"
        "        first = nn.Linear(64, 8)\n"
        "        super().__init__(nn.Flatten(), first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    result = shoal.run("scaffold+fedavgm", model=f"{tmp_path}/net.py:Net", **TINY)
    assert int(result.params["2.num_batches_tracked"]) > 0 and tree.is_tree_finite(result.params)
    with pytest.raises(ShoalError, match="nothing called"):
        shoal.run(model=f"{tmp_path}/net.py:Nest", **TINY)


def test_batch_norm_never_meets_a_single_sample():
    with pytest.raises(ShoalError, match="several samples"):
        shoal.run(model="resnet18-imagenet", **SINGLE)


def test_a_validation_share_replaces_the_test_half():
    judged = shoal.run(validation=0.25, **TINY)
    plain = shoal.run(**TINY)
    assert judged.accuracy is not None and judged.accuracy != plain.accuracy
    assert len(read_digits().targets) == 1437


@pytest.mark.parametrize(
    "split",
    ["shards:2", "dominant:7", "missing:5", "labels:3", "quantity:0.5", "virtual:30", "degree:0.4", "dirichlet:1:10"],
)
def test_every_split_trains(split):
    history = shoal.run(split=split, devices=12, sample=3, rounds=1).history
    assert np.isfinite(history.last("loss"))


def test_a_million_devices_are_an_ordinary_run():
    history = shoal.run(split="virtual:60", devices=1_000_000, sample=20, rounds=2).history
    chosen = {d for devices in history["devices"] for d in devices}
    assert len(chosen) == 40 and max(chosen) > 100_000


def test_server_data_from_some_classes_is_the_servers_alone(tmp_path):
    shoal.run(server_data="per-class:5", out=str(tmp_path / "run"), metrics=("devices",), **TINY)
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    assert split["server"] == [5] * 10 and sum(split["sizes"]) == 1437 - 50
    devices = json.loads((tmp_path / "run" / "devices.json").read_text())
    assert len(devices["accuracy"]) == 4


def test_published_degrees():
    whole = np.full(10, 0.1)
    some = [np.where(np.arange(10) < k, 1 / k, 0.0) for k in (2, 5, 10)]
    assert [round(float(jensen_shannon_divergence(p, whole)), 4) for p in some] == [0.61, 0.3113, 0.0]


def test_words_train_and_are_judged(tmp_path):
    folder = tmp_path / "ptb"
    folder.mkdir()
    text = " the cat sat on the mat \n the dog sat on the cat \n" * 40
    for name in ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"):
        (folder / name).write_text(text)
    (tmp_path / "small.py").write_text(
        "from torch import nn\n\n\ndef small(classes):\n"
        "    return nn.Sequential(nn.Embedding(classes, 8), nn.Linear(8, classes))\n"
    )
    result = shoal.run(
        data="ptb", data_dir=str(tmp_path), model=f"{tmp_path}/small.py:small", metrics=("top3", "perplexity"), **TINY
    )
    row = result.history.rows[-1]
    assert row["perplexity"] > 1 and row["top3"] >= row["accuracy"]


def test_no_file_and_no_network_is_told_with_file_folder_and_address(tmp_path):
    with pytest.raises(ShoalError, match="train-images") as error:
        shoal.run(data="mnist", data_dir=str(tmp_path), **TINY)
    assert str(tmp_path) in str(error.value) and "http" in str(error.value) and error.value.kind.name == "no-data"


def test_a_broken_data_folder_leaves_no_run(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ShoalError):
        shoal.run(data=str(tmp_path / "nowhere.csv"), out=str(out), **TINY)
    assert not Path(out).exists()
