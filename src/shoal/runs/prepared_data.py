"""The data of a run as it trains on them: targets of its task, samples of each device, numbers of its precision."""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from shoal.core.learning_task import LearningTask
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER
from shoal.data.dataset import Dataset
from shoal.data.device_samples import DeviceSamples
from shoal.data.feature_skew import skew_features
from shoal.data.local_tests import replace_test_half
from shoal.data.noniid_degree import summarise_population
from shoal.data.population import Population
from shoal.data.splits import parse_split
from shoal.models.hf_folder import is_hf_model
from shoal.runs.given_objects import get_column_roles
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import convert_dataset, count_devices, hold_out_own_tests, split_dataset
from shoal.runs.task_targets import count_target_classes, derive_labels, fit_targets

log = logging.getLogger("shoal")
DatasetCache = dict[tuple, Dataset]
"""Data sets as they are trained on, shared by the runs of a comparison; the key is all that they depend on."""


@dataclass(frozen=True, eq=False)
class PreparedData:
    """A data set that is divided among devices."""

    dataset: Dataset
    labels: np.ndarray
    """What each training sample counts as where samples are divided by label."""
    label_count: int
    classes: int
    """Classes that targets are told apart by; 0 where they are no classes."""
    population: Population
    server_index: np.ndarray
    """The training samples that the server keeps."""
    own_tests: Population | None
    """The samples that devices test on, where they do."""

    def make_device_samples(self) -> DeviceSamples:
        """The function that gives the samples of a device or of the server."""

        def find_rows(device: int) -> np.ndarray:
            return self.server_index if device == SERVER else self.population[device]

        return DeviceSamples(self.dataset.inputs, self.dataset.targets, find_rows)

    def summarise_split(self) -> dict:
        """How samples lie on devices, ready for JSON."""
        return summarise_population(self.labels, self.population, self.server_index, self.label_count)


def prepare_data(
    recipe: Recipe,
    dataset: Dataset,
    task: LearningTask,
    streams: RandomStreams,
    dtype: torch.dtype,
    place: torch.device,
    dataset_cache: DatasetCache,
    elsewhere: bool,
) -> PreparedData:
    """Divide a loaded data set among devices and convert it; with `elsewhere` the samples lie on real devices."""
    dataset = fit_targets(dataset, task)
    labels, label_count = derive_labels(task, dataset.targets)
    classes = count_target_classes(task, dataset)
    devices = count_devices(recipe, dataset)
    if not (recipe.devices or recipe.owner):
        told = (
            "split: %s, since the data say whose each sample is: %d devices; --split and --devices choose another one"
        )
        log.info(told, recipe.split, devices)
    population, server_index = split_dataset(recipe, dataset, streams, labels, elsewhere)
    whole_population, own_tests = population, None
    if not elsewhere:
        population, own_tests = hold_out_own_tests(recipe, dataset, population, streams, labels)
    key = make_cache_key(recipe, task, dtype, place)
    if key not in dataset_cache:
        dataset_cache[key] = convert_dataset(recipe, dataset, dtype, place)
    dataset = dataset_cache[key]
    if not elsewhere:
        dataset = skew_features(dataset, whole_population, parse_split(recipe.split).skews, streams)
    if own_tests is not None and recipe.local_test_of == "all":
        dataset = replace_test_half(dataset, np.concatenate(list(own_tests)))
    return PreparedData(dataset, labels, max(label_count, classes), classes, population, server_index, own_tests)


def make_cache_key(recipe: Recipe, task: LearningTask, dtype: torch.dtype, place: torch.device) -> tuple:
    """All that a converted data set depends on."""
    source = (recipe.data, recipe.data_dir, *get_column_roles(recipe).values())
    held_back = recipe.validation and (recipe.validation, recipe.stratify_validation, recipe.seed, recipe.evaluate_test)
    key = (*source, recipe.normalise, recipe.normalise_by, dtype, place, held_back, recipe.local_test_of, task.name)
    return (*key, recipe.model, recipe.text_length) if is_hf_model(recipe.model) else key
