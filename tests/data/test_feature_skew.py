"""Feature skew and splits by time and domain: what devices hold, and that no sample is lost."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams
from shoal.data.dataset import Dataset, read_digits
from shoal.data.feature_skew import rotate_images, skew_features
from shoal.data.splits import parse_split

TINY: dict[str, Any] = dict(devices=4, sample=4, rounds=2, steps="2", batch=4)


def skew(text: str, x: torch.Tensor, devices: int, seed: int = 0) -> tuple[Dataset, list[list[int]]]:
    split = parse_split(text)
    labels = np.arange(len(x)) % 3
    population = split(labels, devices, np.random.default_rng(seed))
    y = torch.from_numpy(labels)
    dataset = Dataset("x", x, y, x.clone(), y, 3)
    return skew_features(dataset, population, split.skews, RandomStreams(seed)), [rows.tolist() for rows in population]


def test_noise_grows_from_device_to_device():
    x = torch.zeros(4000, 5)
    own, held = skew("iid+noise:2", x, 5)
    levels = [float(own.inputs[rows].std()) for rows in held]
    assert levels[0] == 0 and levels == pytest.approx([0, 0.5, 1, 1.5, 2], rel=0.05)
    assert torch.equal(own.test_inputs, x) and not x.any()


def test_images_are_turned_by_the_angle_of_their_device():
    x = torch.randn(40, 2, 6, 6)
    own, held = skew("iid+rotation:4", x, 6)
    for device, rows in enumerate(held):
        assert torch.equal(own.inputs[rows], torch.rot90(x[rows], device % 4, (2, 3)))
    assert torch.equal(own.test_inputs[3::4], torch.rot90(x[3::4], 3, (2, 3)))


@pytest.mark.parametrize("shape", [(20, 20), (20, 12)])
def test_angles_between_turn_the_same_way_as_right_ones(shape):
    x = torch.zeros(1, 1, *shape)
    x[0, 0, shape[0] // 2 - 4 : shape[0] // 2, shape[1] // 2 + 2 : shape[1] // 2 + 4] = 1
    nearly = rotate_images(x, 89.99)
    if shape[0] == shape[1]:
        assert torch.allclose(nearly, torch.rot90(x, 1, (2, 3)), atol=0.02)
    assert float(nearly.sum()) == pytest.approx(8, abs=0.1)  # nothing is stretched


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["iid", "dirichlet:0.5", "shards:1", "quantity:0.5"]),
    st.sampled_from(["noise:0.5", "rotation:3", "rotation:4+noise:0.1"]),
    st.integers(1, 8),
    st.integers(0, 2**32),
)
def test_a_skew_follows_from_the_seed_and_leaves_samples_targets_and_the_given_tensors_alone(rule, text, devices, seed):
    x = torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    (one, held), (two, again) = (skew(f"{rule}+{text}", x, devices, seed) for _ in range(2))
    assert torch.equal(one.inputs, two.inputs) and held == again == skew(rule, x, devices, seed)[1]
    assert torch.equal(x, before) and one.inputs.shape == x.shape and sorted(sum(held, [])) == list(range(24))


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_run_with_a_skew(engine):
    plain = shoal.run(split="iid", engine=engine, **TINY).history.rows
    noisy = shoal.run(split="iid+noise:1", engine=engine, **TINY).history.rows
    assert plain[-1]["loss"] != noisy[-1]["loss"]
    assert shoal.run(split="iid+noise:0", engine=engine, **TINY).history.rows[-1]["loss"] == plain[-1]["loss"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("noise:0.5", "no split by itself"),
        ("iid+nois:0.5", "no feature skew called 'nois'"),
        ("iid+noise:-1", "cannot be read"),
        ("iid+rotation:0.5", "cannot be read"),
        ("iid+rotation", "cannot be read"),
        ("virtual:5+noise:1", "share samples"),
    ],
)
def test_what_cannot_be_skewed(text, words):
    with pytest.raises(ShoalError, match=words):
        shoal.run(split=text, **TINY)


def test_inputs_that_cannot_be_skewed():
    y = torch.arange(20) % 2
    with pytest.raises(ShoalError, match="turns images"):
        shoal.run(data=(torch.randn(20, 3), y), split="iid+rotation:4", **TINY)
    with pytest.raises(ShoalError, match="inputs of one tensor"):
        shoal.run(data=({"a": torch.randn(20, 3), "b": torch.randn(20, 2)}, y), split="iid+noise:1", **TINY)
    with pytest.raises(ShoalError, match="whole numbers"):
        shoal.run(
            data=(torch.arange(80).reshape(20, 4), torch.arange(80).reshape(20, 4)),
            model="lstm",
            split="iid+noise:1",
            **TINY,
        )


def test_time_gives_each_device_a_period():
    order = np.random.default_rng(0).permutation(11)
    split = parse_split("time")(np.zeros(11), 3, np.random.default_rng(0), None, order)
    assert [sorted(order[rows].tolist()) for rows in split] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 30))
def test_domains_are_not_mixed_and_their_devices_are_even(domains, devices):
    owners = np.unique(domains, return_inverse=True)[1]
    if devices < owners.max() + 1:
        with pytest.raises(ShoalError, match="domains for"):
            parse_split("domains")(owners, devices, np.random.default_rng(0), owners)
        return
    split = parse_split("domains")(owners, devices, np.random.default_rng(0), owners)
    by_domain: dict[int, list[int]] = {}
    for rows in split:
        found = set(owners[rows].tolist())
        assert len(found) <= 1
        for domain in found:
            by_domain.setdefault(domain, []).append(len(rows))
    assert all(max(sizes) - min(sizes) <= 1 for sizes in by_domain.values()) and len(by_domain) == owners.max() + 1


def test_digits_are_left_alone():
    before = read_digits().inputs
    shoal.run(split="iid+rotation:4", engine="serial", **TINY)
    assert torch.equal(read_digits().inputs, before)
