"""The data set that a recipe names, and how its samples are divided among devices, the server and validation."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.phases import in_phase
from shoal.core.streams import RandomStreams
from shoal.data import parquet_files
from shoal.data.dataset import DATASETS, HANDED_OVER, Dataset
from shoal.data.hf_data import PREFIX
from shoal.data.local_tests import group_given_tests, hold_out_local_tests, join_halves
from shoal.data.mapped import count_gigabytes, stays_on_disk
from shoal.data.noise import NOISE
from shoal.data.noniid_degree import summarise_population
from shoal.data.parquet_files import count_parquet_bytes, is_parquet, list_parquet_files, load_large_parquet
from shoal.data.population import Population, StoredPopulation
from shoal.data.server_data import draw_server_samples, draw_withheld_samples
from shoal.data.sources import SOURCES, find_data_folder, load_dataset
from shoal.data.splits import parse_split
from shoal.data.table import ColumnRoles
from shoal.data.text_columns import TextReading
from shoal.data.user_data import build_user_dataset, describe_held_out, hold_out_validation, separate_folder
from shoal.data.user_function import call_data_function
from shoal.runs.given_objects import get_column_roles, refuse_missing_objects, refuse_other_roles
from shoal.runs.recipe import Recipe, makes_devices_of_owners
from shoal.runs.recipe_task import build_task
from shoal.runs.recipe_text import TEXT_KEYS, fit_to_vocabulary, make_text_reading
from shoal.runs.recipe_values import bad_value_error
from shoal.runs.task_targets import count_target_classes, derive_labels, fit_targets


def describe_split(recipe: Recipe) -> dict:
    """How the samples of a recipe lie on devices, ready for JSON; nothing else of the run is built."""
    streams = RandomStreams(recipe.seed)
    dataset = load_recipe_dataset(recipe, streams)
    labels, classes = derive_labels(task := build_task(recipe, dataset), fit_targets(dataset, task).targets)
    population, server = split_dataset(recipe, dataset, streams, labels)
    population, _ = hold_out_own_tests(recipe, dataset, population, streams, labels)
    summary = summarise_population(labels, population, server, max(classes, count_target_classes(task, dataset)))
    return summary | {"devices": len(population)}


FILE_SUFFIXES = (".csv", ".parquet", ".npz", ".npy", ".safetensors")
"""How the files that hold data end."""


@in_phase("data")
def load_recipe_dataset(recipe: Recipe, streams: RandomStreams) -> Dataset:
    """The data set by its name, or a user's folder, table or function; a validation share replaces the test set."""
    refuse_missing_objects(recipe)
    read_text = partial(make_text_reading, {key: getattr(recipe, key) for key in TEXT_KEYS})
    path = Path(recipe.data).expanduser()
    if recipe.data in HANDED_OVER:
        dataset = HANDED_OVER[recipe.data]
        refuse_other_roles(recipe)
    elif recipe.data in (built_in := DATASETS | NOISE):
        dataset = built_in[recipe.data]()
    elif ".py:" in recipe.data:
        dataset = build_user_dataset(call_data_function(recipe.data), **get_column_roles(recipe), text=read_text())
    elif recipe.data.startswith(PREFIX):
        dataset = build_user_dataset(recipe.data, **get_column_roles(recipe), text=read_text())
    elif recipe.data not in SOURCES and (path.is_dir() or path.suffix in FILE_SUFFIXES):
        dataset = load_user_path(path, recipe, read_text())
    elif recipe.data.partition(":")[0] not in SOURCES:
        raise make_unknown_data_error(recipe.data)
    else:
        dataset = load_dataset(recipe.data, recipe.data_dir)
    dataset = fit_to_vocabulary(dataset, recipe.model, recipe.task)
    if recipe.local_test_of == "all":
        if not recipe.local_test:
            raise bad_value_error("local_test_of", "all", "train unless local_test is above 0")
        dataset = join_halves(dataset)
    if recipe.local_test_of == "owner":
        if recipe.local_test:
            raise bad_value_error("local_test", recipe.local_test, "0 with local_test_of = owner: the data say it")
        if not makes_devices_of_owners(recipe.split):
            raise bad_value_error("local_test_of", "owner", "train or all with a split other than owner")
    if recipe.has_own_tests and recipe.validation:
        raise bad_value_error("validation", recipe.validation, "0 with local_test: samples are held back once")
    if not recipe.validation:
        return dataset
    seed = streams.derive_seed("validation")
    held = hold_out_validation(dataset, recipe.validation, seed, recipe.stratify_validation)
    return held.keep_test_half(dataset) if recipe.evaluate_test and len(dataset.test_targets) else held


def make_unknown_data_error(name: str) -> ShoalError:
    """The error for what is neither a data set nor data of the user: a file of another form, no file, or no name."""
    path = Path(name).expanduser()
    if path.is_file():
        forms = ", ".join(FILE_SUFFIXES)
        return ShoalError("bad-value", f"{name} is no file of data that can be read.", f"Give one of {forms}.")
    if path.suffix or path.name != name:
        return ShoalError("no-data", f"There is no file or folder {name}.", "Correct the name.")
    return unknown_name_error("data set", name, [*DATASETS, *SOURCES])


def describe_validation_samples(recipe: Recipe) -> str:
    """Which training samples a recipe holds back for validation, in words; its data are loaded to see that."""
    dataset = load_recipe_dataset(replace(recipe, validation=0.0), RandomStreams(recipe.seed))
    return describe_held_out(dataset, recipe.stratify_validation)


def load_user_path(path: Path, recipe: Recipe, text: TextReading) -> Dataset:
    """The data set of a user's file or folder; parquet files that are too large for memory are copied to the cache."""
    roles = get_column_roles(recipe)
    train, test = separate_folder(path) if path.is_dir() else (path, None)
    if not is_parquet(train) or count_parquet_bytes(list_parquet_files(train)) <= parquet_files.READ_AS_A_WHOLE:
        return build_user_dataset(path, **roles, text=text)
    return load_large_parquet(train, test, ColumnRoles(**roles), find_data_folder(recipe.data_dir))


@in_phase("data")
def split_dataset(
    recipe: Recipe, dataset: Dataset, streams: RandomStreams, labels: np.ndarray, elsewhere: bool = False
) -> tuple[Population, np.ndarray]:
    """The samples of each device, and the indices of the samples that the server keeps; `labels` are their classes."""
    index = np.arange(len(labels))
    server = np.zeros(0, dtype=np.int64)
    if recipe.server_data:
        server = draw_server_samples(recipe.server_data, labels, streams.make_numpy_generator("server-data"))
        index = np.setdiff1d(
            index, draw_withheld_samples(recipe.server_data, labels, streams.make_numpy_generator("server-data"))
        )
    if elsewhere:
        if not recipe.devices:
            problem = "devices is 0, and the samples lie on real devices."
            raise ShoalError("bad-value", problem, "Give the number of devices.")
        return StoredPopulation(index[:0], np.zeros(recipe.devices, dtype=np.int64)), server
    owners, order = (None if own is None else own[index] for own in (dataset.owners, dataset.order))
    split, devices = parse_split(recipe.split), count_devices(recipe, dataset)
    generator = streams.make_numpy_generator("split")
    return split(labels[index], devices, generator, owners, order).renumber(index), server


def count_devices(recipe: Recipe, dataset: Dataset) -> int:
    """The number of devices of a recipe; where that is 0, as many as the data has owners."""
    if recipe.devices:
        return recipe.devices
    if dataset.owners is None:
        problem = "devices is 0, and this data does not say whose samples are whose."
        raise ShoalError("bad-value", problem, "Name the column of a table with owner = COLUMN, or give devices.")
    return int(dataset.owners.max()) + 1


@in_phase("data")
def hold_out_own_tests(
    recipe: Recipe, dataset: Dataset, population: Population, streams: RandomStreams, labels: np.ndarray
) -> tuple[Population, Population | None]:
    """What devices train on, and what they test on: rows of the training half, or of the test half where the data say.

    None where devices do not test.
    """
    if recipe.local_test_of == "owner":
        return population, group_given_tests(dataset, len(population))
    if not recipe.local_test:
        return population, None
    return hold_out_local_tests(population, recipe.local_test, labels, streams.derive_seed("local-test"))


@in_phase("data")
def convert_dataset(recipe: Recipe, dataset: Dataset, dtype: torch.dtype, place: torch.device) -> Dataset:
    """The data set in another dtype and on another compute device, normalised where the recipe says so.

    What is mapped and large stays on the disk as it is, and pixels become numbers when a batch is taken.
    """
    if stays_on_disk(dataset) and place.type == "cpu" and dtype == torch.float32:
        if recipe.normalises:
            problem = f"normalise would copy {count_gigabytes(dataset.inputs)} of mapped inputs into memory."
            raise ShoalError("bad-value", problem, "Leave it out, and write the arrays normalised.")
        return dataset
    dataset = dataset.to(dtype, place)
    return dataset.normalise(recipe.normalise_by) if recipe.normalises else dataset
