"""The data set that a recipe names, and how its samples are divided among devices, the server and validation."""

from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import unknown_name_error
from shoal.core.streams import RandomStreams
from shoal.data.dataset import DATASETS, HANDED_OVER, Dataset
from shoal.data.noniid_degree import summarise_population
from shoal.data.population import Population, StoredPopulation
from shoal.data.server_data import draw_server_samples, draw_withheld_samples
from shoal.data.sources import SOURCES, load_dataset
from shoal.data.splits import parse_split
from shoal.data.user_data import build_user_dataset, hold_out_validation
from shoal.runs.given_objects import refuse_missing_objects
from shoal.runs.recipe import Recipe


def describe_split(recipe: Recipe) -> dict:
    """What the split of a recipe looks like; nothing else of the recipe is put together."""
    streams = RandomStreams(recipe.seed)
    dataset = load_recipe_dataset(recipe, streams)
    held, server = split_dataset(recipe, dataset, streams)
    return summarise_population(dataset.targets.numpy(), held, server, dataset.classes)


def load_recipe_dataset(recipe: Recipe, streams: RandomStreams) -> Dataset:
    """The data set by its name, or a user's folder or table; with a validation share in place of the test half."""
    refuse_missing_objects(recipe)
    own = Path(recipe.data).expanduser()
    if recipe.data in HANDED_OVER:
        dataset = HANDED_OVER[recipe.data]
    elif recipe.data in DATASETS:
        dataset = DATASETS[recipe.data]()
    elif recipe.data not in SOURCES and (own.is_dir() or own.suffix == ".csv"):
        dataset = build_user_dataset(own)
    elif recipe.data.partition(":")[0] not in SOURCES:
        raise unknown_name_error("data set", recipe.data, [*DATASETS, *SOURCES])
    else:
        dataset = load_dataset(recipe.data, recipe.data_dir)
    return (
        hold_out_validation(dataset, recipe.validation, streams.derive_seed("validation"))
        if recipe.validation
        else dataset
    )


def split_dataset(
    recipe: Recipe, dataset: Dataset, streams: RandomStreams, elsewhere: bool = False
) -> tuple[Population, np.ndarray]:
    """The samples of each device and of the server."""
    labels = dataset.targets.numpy()
    left = np.arange(len(labels))
    server = np.zeros(0, dtype=np.int64)
    if recipe.server_data:
        server = draw_server_samples(recipe.server_data, labels, streams.make_numpy_generator("server-data"))
        left = np.setdiff1d(
            left, draw_withheld_samples(recipe.server_data, labels, streams.make_numpy_generator("server-data"))
        )
    if elsewhere:
        return StoredPopulation(left[:0], np.zeros(recipe.devices, dtype=np.int64)), server
    owners = None if dataset.owners is None else dataset.owners[left]
    split = parse_split(recipe.split)
    return split(labels[left], recipe.devices, streams.make_numpy_generator("split"), owners).renumber(left), server


def convert_dataset(dataset: Dataset, normalise: bool, dtype: torch.dtype, place: torch.device) -> Dataset:
    dataset = dataset.to(dtype, place)
    return dataset.normalise() if normalise else dataset
