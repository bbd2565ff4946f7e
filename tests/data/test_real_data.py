"""Facts about the real files, where they are in the data folder (SHOAL_DATA, or ~/.cache/shoal/data)."""

import numpy as np
import pytest
import torch

from shoal.data import word_corpora
from shoal.data.dataset import Dataset
from shoal.data.sources import find_data_folder, has_all_files, load_dataset


def real(name: str) -> Dataset:
    if not has_all_files(name):
        pytest.skip(f"the files of {name} are not in {find_data_folder()}")
    return load_dataset(name)


def figures(x: torch.Tensor) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel, of pixels from 0 to 1."""
    counts = [torch.bincount(x[:, c].flatten().int(), minlength=256).double() for c in range(x.shape[1])]
    values = torch.arange(256).double() / 255
    means = [float((n * values).sum() / n.sum()) for n in counts]
    return means, [float(((n * (values - m) ** 2).sum() / n.sum()).sqrt()) for n, m in zip(counts, means, strict=True)]


@pytest.mark.parametrize("name, mean, deviation", [("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.2860, 0.3530)])
def test_mnist_and_fashion_mnist(name, mean, deviation):
    data = real(name)
    assert data.inputs.shape == (60_000, 1, 28, 28) and data.test_inputs.shape == (10_000, 1, 28, 28)
    means, deviations = figures(data.inputs)
    assert means[0] == pytest.approx(mean, abs=5e-5) and deviations[0] == pytest.approx(deviation, abs=6e-5)
    counts = data.targets.bincount().tolist()
    assert len(counts) == data.classes == 10 and (name == "mnist" or counts == [6_000] * 10)


@pytest.mark.parametrize(
    "name, classes, means",
    [("cifar10", 10, [0.4914, 0.4822, 0.4465]), ("cifar100", 100, [0.5071, 0.4865, 0.4409])],
)
def test_cifar(name, classes, means):
    data = real(name)
    assert data.inputs.shape == (50_000, 3, 32, 32) and data.test_inputs.shape == (10_000, 3, 32, 32)
    assert figures(data.inputs)[0] == pytest.approx(means, abs=6e-5)
    assert data.targets.bincount().tolist() == [50_000 // classes] * classes
    assert data.test_targets.bincount().tolist() == [10_000 // classes] * classes
    assert name != "cifar10" or data.targets[:5].tolist() == [6, 9, 9, 4, 1]


def tokens(folder: str, pattern: str, lower: bool = False) -> list[list[str]]:
    paths = [find_data_folder() / folder / pattern.format(half) for half in ("train", "valid", "test")]
    if not all(path.is_file() for path in paths):
        pytest.skip(f"{paths[0].name} and its like are not in {paths[0].parent}")
    return [word_corpora.split_tokens(path.read_bytes(), path, lower) for path in paths]


def test_ptb():
    data = real("ptb")
    assert data.classes == 10_000 and len(data.inputs) == 929_588 // 35 and len(data.test_inputs) == 82_429 // 35
    texts = tokens("ptb", "ptb.{}.txt")
    assert [len(text) for text in texts] == [929_589, 73_760, 82_430] and len(set(texts[0])) == 10_000


def test_wikitext_2():
    data = real("wikitext-2")
    assert data.classes == 28_914 and len(data.inputs) == 2_088_627 // 35 and len(data.test_inputs) == 245_568 // 35
    texts = tokens("wikitext-2", "{}.txt")
    assert [len(text) for text in texts] == [2_088_628, 217_646, 245_569] and len(set(texts[0])) == 33_278
    assert len({word.lower() for word in texts[0]} - {"<eos>"}) == 28_911


def test_shakespeare():
    data = real("shakespeare")
    assert data.classes == 65 and data.inputs.shape == data.targets.shape and data.inputs.shape[1] == 80
    assert torch.equal(data.inputs[:, 1:], data.targets[:, :-1])
    assert data.owners is not None and len(data.owners) == len(data.inputs)
    devices = np.bincount(data.owners)
    assert len(devices) == 256 and devices.min() >= 1
    assert len(data.test_inputs) / (len(data.inputs) + len(data.test_inputs)) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    "name, sizes, classes", [("svhn", (73_257, 26_032), 10), ("tiny-imagenet-32", (100_000, 10_000), 200)]
)
def test_svhn_and_tiny_imagenet(name, sizes, classes):
    data = real(name)
    assert (len(data.inputs), len(data.test_inputs)) == sizes and data.classes == classes
    assert data.inputs.shape[1:] == (3, 32, 32)


def test_what_was_read_before_is_mapped():
    first, again = real("mnist"), real("mnist")
    assert torch.equal(first.inputs, again.inputs) and first.inputs.data_ptr() != again.inputs.data_ptr()
