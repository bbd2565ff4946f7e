"""Splits: every sample has one owner, and devices with little or nothing are no trouble."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.data.dataset import read_digits
from shoal.data.population import Population
from shoal.data.server_data import draw_server_samples
from shoal.data.splits import parse_split
from shoal.runs.build import assemble_run

LABELS = read_digits().targets.numpy()

labels = st.lists(st.integers(0, 5), min_size=1, max_size=60).map(np.array)
betas = st.floats(-6, 6).map(lambda power: 10.0**power)
texts = st.just("iid") | betas.map(lambda beta: f"dirichlet:{beta}")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def spread(text: str, devices: int = 10, seed: int = 0) -> Population:
    return parse_split(text)(LABELS, devices, rng(seed))


@settings(deadline=None, max_examples=300)
@given(texts, labels, st.integers(1, 40), st.integers(0, 2**32))
def test_every_sample_has_exactly_one_owner(text, labels, devices, seed):
    split = parse_split(text)(labels, devices, rng(seed))
    assert len(split) == devices
    assert sorted(np.concatenate(split).tolist()) == list(range(len(labels)))


@settings(deadline=None)
@given(labels, st.integers(1, 40))
def test_iid_is_even(labels, devices):
    sizes = [len(rows) for rows in parse_split("iid")(labels, devices, rng())]
    assert max(sizes) - min(sizes) <= 1


def purity(text: str) -> float:
    """The share of a device's own largest class, over all samples and a few seeds."""
    splits = [rows for seed in range(5) for rows in spread(text, seed=seed)]
    return sum(int(np.bincount(LABELS[rows]).max()) for rows in splits if len(rows)) / (5 * len(LABELS))


def test_a_smaller_beta_is_more_uneven():
    texts = ("dirichlet:0.01", "dirichlet:0.1", "dirichlet:1", "dirichlet:100")
    found = [purity(text) for text in texts]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.6 and found[-1] < 0.15


def test_a_huge_beta_is_nearly_iid():
    assert all(abs(len(rows) - len(LABELS) / 10) < 10 for rows in spread("dirichlet:1e6"))


def test_a_tiny_beta_gives_each_class_to_one_device():
    owners = [{i for i, rows in enumerate(spread("dirichlet:1e-6")) if label in LABELS[rows]} for label in range(10)]
    assert all(len(devices) == 1 for devices in owners)


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.3"])
def test_a_split_follows_from_its_seed(text):
    first, again, other = spread(text, seed=1), spread(text, seed=1), spread(text, seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize(
    "text",
    "dirichlet dirichlet: dirichlet:x dirichlet:0 dirichlet:-1 dirichlet:nan dirichlet:inf dirichlet:1e7 "
    "dirichlet:1: dirichlet:1:0 dirichlet:1:x dirichlet:1:2.5 dirichlet:1:2:3 iid: iid:1".split(),
)
def test_a_text_that_is_no_split(text):
    with pytest.raises(shoal.ShoalError, match="cannot be read") as error:
        parse_split(text)
    assert error.value.kind.name == "bad-value" and text.split(":")[0] in error.value.advice


@pytest.mark.parametrize("text", ["", "IID!", ":", "dirichle:1", "\x00"])
def test_a_name_that_is_no_split(text):
    with pytest.raises(shoal.ShoalError) as error:
        parse_split(text)
    assert error.value.kind.name == "unknown-name"


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_split_or_refused(text):
    try:
        parse_split(text)
    except shoal.ShoalError as error:
        assert error.kind.name in ("unknown-name", "bad-value")


def test_the_server_keeps_its_share_and_devices_never_see_it():
    assembly = assemble_run(shoal.Recipe(server_data="share:0.05", devices=10))
    kept, server = draw_server_samples("share:0.05", LABELS, rng()), assembly.loop.server
    assert len(kept) == round(0.05 * len(LABELS)) and server is not None
    assert len(server) == len(kept) and assembly.loop.sizes.sum() == len(LABELS) - len(kept)


@pytest.mark.parametrize("text", ["share:0", "share:1", "share:-1", "share:nan", "share:", "all", "0.5"])
def test_a_share_that_cannot_be(text):
    with pytest.raises(shoal.ShoalError, match="cannot be read"):
        draw_server_samples(text, LABELS, rng())


# in a run -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "weighted", "uniform(share=1.0)"])
def test_a_device_without_data_is_never_selected(method):
    recipe = {"devices": 40, "sample": 12, "split": "dirichlet:0.01", "rounds": 6, "steps": "1"}
    sizes = assemble_run(shoal.Recipe(**recipe)).loop.sizes
    assert (sizes == 0).sum() > 5
    seen = {d for devices in shoal.run(method, **recipe).history["devices"] for d in devices}
    assert seen and all(sizes[d] > 0 for d in seen)


def test_a_round_is_smaller_when_too_few_devices_have_data():
    result = shoal.run(devices=40, sample=40, split="dirichlet:0.000001", rounds=2, steps="1")
    assert all(1 <= len(devices) <= 10 for devices in result.history["devices"])


def test_devices_with_one_sample_train():
    result = shoal.run("scaffold", devices=1437, sample=30, split="iid", rounds=3, epochs="2")
    assert assemble_run(result.recipe).loop.sizes.tolist() == [1] * 1437
    assert "dropped" not in result.history.to_dict()
    assert result.history["loss"][-1] < result.history["loss"][0]


def test_devices_with_one_class_train():
    result = shoal.run("feddyn", devices=10, sample=5, split="dirichlet:0.000001", rounds=3)
    assert "dropped" not in result.history.to_dict()
    assert all(torch.isfinite(p).all() for p in result.params.values())


def test_more_devices_than_samples():
    result = shoal.run(devices=3000, sample=5, split="iid", rounds=2)
    assert all(len(devices) == 5 for devices in result.history["devices"])


def test_the_same_seed_gives_the_same_devices_the_same_samples():
    one, two = (assemble_run(shoal.Recipe(method=m, seed=3)).loop.sizes for m in ("fedavg", "scaffold"))
    assert one.tolist() == two.tolist()
    assert one.tolist() != assemble_run(shoal.Recipe(seed=4)).loop.sizes.tolist()
