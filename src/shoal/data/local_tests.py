"""Samples that devices keep to test on: a share of each device's own, of both halves of a data set, or those given."""

from dataclasses import replace

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.model.inputs import concat_inputs, take_rows
from shoal.data.dataset import Dataset
from shoal.data.holding_out import spread_evenly
from shoal.data.population import Population, StoredPopulation


def join_halves(dataset: Dataset) -> Dataset:
    """The data set whose training half holds all samples, so that both halves are spread over devices."""
    if dataset.owners is not None or dataset.order is not None:
        what = "whose they are" if dataset.owners is not None else "when they were taken"
        problem = f"local_test_of is all, and {dataset.name} says of its training samples alone {what}."
        raise ShoalError("bad-value", problem, "Use local_test_of = train.")
    if dataset.mapped:
        problem = f"local_test_of is all, and the halves of {dataset.name} are files that cannot be joined."
        raise ShoalError("bad-value", problem, "Use local_test_of = train.")
    return replace(
        dataset,
        inputs=concat_inputs([dataset.inputs, dataset.test_inputs]),
        targets=torch.cat([dataset.targets, dataset.test_targets]),
    )


def group_given_tests(dataset: Dataset, devices: int) -> StoredPopulation:
    """The rows of the test half that the data say are each device's own."""
    if dataset.test_owners is None:
        problem = f"local_test_of is owner, and {dataset.name} does not say whose its test samples are."
        raise ShoalError("bad-value", problem, "Give local_test, a share of each device's own samples.")
    rows = [np.flatnonzero(dataset.test_owners == device) for device in range(devices)]
    if not any(map(len, rows)):
        raise ShoalError("no-data", f"No test sample of {dataset.name} is a device's own.", "Give local_test instead.")
    return store_rows(rows)


def replace_test_half(dataset: Dataset, rows: np.ndarray) -> Dataset:
    """The data set that is tested on some rows of its training half; they must not be trained on."""
    index = torch.from_numpy(rows).to(dataset.targets.device)
    return replace(dataset, test_inputs=take_rows(dataset.inputs, index), test_targets=dataset.targets[index])


def hold_out_local_tests(
    population: Population, share: float, labels: np.ndarray, seed: int
) -> tuple[StoredPopulation, StoredPopulation]:
    """What devices train on, and what they test on: a share of each device's samples, of every class alike.

    Samples with several labels each are drawn without a look at them. A device keeps at least one sample to train on,
    and one that has a single sample does not test.
    """
    if not isinstance(population, StoredPopulation):
        problem = "local_test is given with a split in which devices share samples: one would train on another's test."
        raise ShoalError("bad-value", problem, "Use a split other than virtual.")
    trained, tested = [], []
    for device, rows in enumerate(population):
        train, test = hold_out_rows(rows, labels, share, seed, device)
        trained.append(train)
        tested.append(test)
    if not any(map(len, tested)):
        problem = f"local_test is {share:g}, and no device has enough samples to test on one of them."
        raise ShoalError("no-data", problem, "Give a larger share, or fewer devices.")
    return store_rows(trained), store_rows(tested)


def hold_out_rows(
    rows: np.ndarray, labels: np.ndarray, share: float, seed: int, device: int
) -> tuple[np.ndarray, np.ndarray]:
    """What one device trains on, and what it tests on, of the samples `rows` that it has."""
    held = min(round(share * len(rows)), len(rows) - 1) if len(rows) else 0
    if held <= 0:
        return rows, rows[:0]
    generator = np.random.default_rng([seed, device])
    order, start = generator.permutation(rows), 0
    if labels.ndim == 1:  # else a sample has several labels, and is drawn at random
        order = order[np.argsort(labels[order], kind="stable")]
        start = int(generator.integers(len(order)))  # else small devices would all test on their last class
    rows = spread_evenly(order, held, start)
    return np.sort(rows[: len(rows) - held]), np.sort(rows[len(rows) - held :])


def store_rows(rows: list[np.ndarray]) -> StoredPopulation:
    """The population whose devices hold these samples."""
    return StoredPopulation(np.concatenate(rows), np.cumsum([len(own) for own in rows]))
