"""Data sets of Hugging Face, as objects and as folders; partitions of flwr-datasets are such objects."""

import numpy as np
import pytest
import torch

import shoal
from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams
from shoal.data.hf_data import load_hf_dataset
from shoal.data.user_data import build_user_dataset
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import load_recipe_dataset


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ShoalError, match=r"pip install 'shoal\[hf-data\]'") as caught:
        load_hf_dataset("hf:anything")
    assert caught.value.kind.name == "missing-extra"


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="the extra hf-data is not installed")


def make_reviews(datasets, count=30):
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "label": datasets.ClassLabel(names=["bad", "good"]),
            "shop": datasets.Value("string"),
        }
    )
    rows = {"input_ids": [[1] * (1 + i % 4) for i in range(count)], "label": [i % 2 for i in range(count)]}
    return datasets.Dataset.from_dict(rows | {"shop": [f"s{i % 3}" for i in range(count)]}, features=features)


def test_sentences_with_named_classes_and_owners(datasets, tmp_path):
    made = make_reviews(datasets)
    own = build_user_dataset(made, owner="shop")
    assert own.class_names == ("bad", "good") and own.classes == 2 and own.inputs["input_ids"].shape == (24, 4)
    assert own.owners is not None and set(own.owners.tolist()) == {0, 1, 2}
    assert own.inputs["attention_mask"].sum().item() == (own.inputs["input_ids"] > 0).sum().item()
    datasets.DatasetDict({"train": made, "test": make_reviews(datasets, 8)}).save_to_disk(str(tmp_path / "saved"))
    recipe = Recipe().with_values(data=f"hf:{tmp_path / 'saved'}", owner="shop")
    both = load_recipe_dataset(recipe, RandomStreams(0))
    assert len(both.targets) == 30 and len(both.test_targets) == 8


def test_rows_that_were_chosen_are_those_that_are_read(datasets):
    made = make_reviews(datasets).select(range(20, 30)).shuffle(seed=0)
    own = build_user_dataset((made, made), owner="shop")
    assert own.targets.tolist() == made["label"][:]


def test_images(datasets):
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((4, 5, 3), i, np.uint8)) for i in range(6)]
    made = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 3})
    made = made.cast_column("image", datasets.Image())
    own = build_user_dataset((made, made))
    assert own.inputs.shape == (6, 3, 4, 5) and own.inputs.dtype == torch.uint8 and own.inputs[3, 0, 0, 0] == 3


def test_partitions_are_devices(datasets):
    partitions = [make_reviews(datasets).shard(3, i).remove_columns("shop") for i in range(3)]
    own = build_user_dataset(partitions, test=make_reviews(datasets))
    assert own.owners is not None and np.bincount(own.owners).tolist() == [10, 10, 10]


def test_what_cannot_be_read(datasets, tmp_path):
    with pytest.raises(ShoalError, match="is a stream"):
        build_user_dataset(make_reviews(datasets).to_iterable_dataset())
    with pytest.raises(ShoalError, match="is no data set of Hugging Face"):
        build_user_dataset(f"hf:{tmp_path}")
    with pytest.raises(ShoalError, match="One must be `train`"):
        build_user_dataset(datasets.DatasetDict({"all": make_reviews(datasets)}))
    untold = datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": [-1, -1]})
    untold = untold.cast_column("label", datasets.ClassLabel(names=["bad", "good"]))
    with pytest.raises(ShoalError, match="classes are not told"):
        build_user_dataset(untold)


def test_a_run(datasets):
    frame = datasets.Dataset.from_dict({"a": np.arange(30.0) / 30, "label": ["u", "v"] * 15})
    assert len(shoal.run(data=frame, rounds=1, devices=3, sample=2, engine="serial").history.rows) == 1
