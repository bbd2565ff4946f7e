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
from shoal.data.user_function import call_data_function
from shoal.runs.given_objects import refuse_missing_objects
from shoal.runs.recipe import Recipe


def describe_split(recipe: Recipe) -> dict:
    """How the samples of a recipe lie on devices, ready for JSON; nothing else of the run is built."""
    streams = RandomStreams(recipe.seed)
    dataset = load_recipe_dataset(recipe, streams)
    population, server = split_dataset(recipe, dataset, streams)
    return summarise_population(dataset.targets.numpy(), population, server, dataset.classes)


def load_recipe_dataset(recipe: Recipe, streams: RandomStreams) -> Dataset:
    """The data set by its name, or a user's folder, table or function; a validation share replaces the test set."""
    refuse_missing_objects(recipe)
    path = Path(recipe.data).expanduser()
    if recipe.data in HANDED_OVER:
        dataset = HANDED_OVER[recipe.data]
    elif recipe.data in DATASETS:
        dataset = DATASETS[recipe.data]()
    elif ".py:" in recipe.data:
        dataset = build_user_dataset(call_data_function(recipe.data))
    elif recipe.data not in SOURCES and (path.is_dir() or path.suffix == ".csv"):
        dataset = build_user_dataset(path)
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
    """The samples of each device, and the indices of the samples that the server keeps."""
    labels = dataset.targets.numpy()
    index = np.arange(len(labels))
    server = np.zeros(0, dtype=np.int64)
    if recipe.server_data:
        server = draw_server_samples(recipe.server_data, labels, streams.make_numpy_generator("server-data"))
        index = np.setdiff1d(
            index, draw_withheld_samples(recipe.server_data, labels, streams.make_numpy_generator("server-data"))
        )
    if elsewhere:
        return StoredPopulation(index[:0], np.zeros(recipe.devices, dtype=np.int64)), server
    owners = None if dataset.owners is None else dataset.owners[index]
    split = parse_split(recipe.split)
    return split(labels[index], recipe.devices, streams.make_numpy_generator("split"), owners).renumber(index), server


def convert_dataset(dataset: Dataset, normalise: bool, dtype: torch.dtype, place: torch.device) -> Dataset:
    """The data set in another dtype and on another compute device, normalised where asked."""
    dataset = dataset.to(dtype, place)
    return dataset.normalise() if normalise else dataset
