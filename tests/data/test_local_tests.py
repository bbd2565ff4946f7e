"""Samples that devices test on: disjoint from what they train on, of every class alike, and never all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ShoalError
from shoal.data.local_tests import hold_out_local_tests, store_rows
from shoal.data.population import VirtualPopulation

devices = st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(devices, st.floats(0.05, 0.9), st.integers(0, 5))
def test_every_device_keeps_its_share_of_every_class(labels_by_device, share, seed):
    labels = np.array([label for own in labels_by_device for label in own], dtype=int)
    ends = np.cumsum([0, *map(len, labels_by_device)])
    population = store_rows([np.arange(a, b) for a, b in zip(ends, ends[1:])])
    try:
        trained, tested = hold_out_local_tests(population, share, labels, seed)
    except ShoalError:
        assert all(min(round(share * len(own)), len(own) - 1) <= 0 for own in labels_by_device)
        return
    for device, own in enumerate(labels_by_device):
        together = np.concatenate([trained[device], tested[device]])
        assert sorted(together) == list(population[device])
        assert len(tested[device]) == max(0, min(round(share * len(own)), len(own) - 1))
        for label in set(own):
            held = int((labels[tested[device]] == label).sum())
            assert abs(held - len(tested[device]) * own.count(label) / len(own)) <= 1
    again = hold_out_local_tests(population, share, labels, seed)[1]
    assert all(np.array_equal(a, b) for a, b in zip(tested, again))


def test_small_devices_together_test_on_every_class_alike():
    """Where a device holds back less than a sample of each class, which class that is must not follow from its number.

    Of 1,000 devices with one sample of each of 10 classes, 200 or so test on each: Binomial(1000, 0.2).
    """
    labels = np.tile(np.arange(10), 1000)
    population = store_rows(list(np.arange(10_000).reshape(1000, 10)))
    _, tested = hold_out_local_tests(population, 0.2, labels, 0)
    counts = np.bincount(labels[tested.order], minlength=10)
    assert counts.sum() == 2000
    assert abs(counts - 200).max() < 5 * (1000 * 0.2 * 0.8) ** 0.5


def test_devices_that_share_samples_cannot_hold_some_back():
    shared = VirtualPopulation(np.arange(10), 4, 3, 0)
    with pytest.raises(ShoalError, match="share samples"):
        hold_out_local_tests(shared, 0.25, np.zeros(10, dtype=int), 0)


def test_samples_with_several_labels_are_held_back_at_random():
    population = store_rows([np.arange(10), np.arange(10, 30)])
    trained, tested = hold_out_local_tests(population, 0.2, np.tile([0, -1, 2], (30, 1)), 0)
    assert [len(own) for own in tested] == [2, 4]
    for device in range(2):
        assert sorted(np.concatenate([trained[device], tested[device]])) == list(population[device])
