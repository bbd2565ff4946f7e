"""Data, models, parts and other objects that a program gave, packed for the worker processes of a comparison."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shoal.core.errors import ShoalError, describe_error
from shoal.data.cache import read_stored_dataset, store_dataset
from shoal.data.dataset import HANDED_OVER
from shoal.runs.given_code import CODE_KINDS
from shoal.runs.given_objects import get_given_objects, is_handed_over, list_object_names
from shoal.runs.recipe import Recipe

PICKLED_KEYS = ("model", "task", "loss", *CODE_KINDS)
"""Recipe keys of objects that other processes get as pickles."""


class TransferredObjects(NamedTuple):
    """Objects by name for another process: data as arrays on disk, which it maps into memory, others as pickles."""

    data: dict[str, Path]
    others: dict[str, dict[str, bytes]]
    """By recipe key."""


def pack_objects(recipes: Iterable[Recipe], folder: Path) -> TransferredObjects:
    """All objects that these recipes name; data are written to folders below `folder`."""
    objects = TransferredObjects({}, {key: {} for key in PICKLED_KEYS})
    recipes = list(recipes)
    for data in {recipe.data for recipe in recipes}:
        if is_handed_over(data) and data not in objects.data:
            objects.data[data] = folder / data
            try:
                store_dataset(HANDED_OVER[data], folder / data)
            except (OSError, TypeError, RuntimeError) as error:
                raise not_transferable_error("data", error) from error
    for recipe in recipes:
        for key, pickled in pickle_objects(recipe).items():
            objects.others[key] |= pickled
    return objects


def pickle_objects(recipe: Recipe) -> dict[str, dict[str, bytes]]:
    """All of a recipe but its data by key and name, as far as they are objects of this program."""
    found: dict[str, dict[str, bytes]] = {key: {} for key in PICKLED_KEYS}
    for key in PICKLED_KEYS:
        for name in list_object_names(recipe, key):
            try:
                found[key][name] = pickle.dumps(get_given_objects(key)[name])
            except Exception as error:
                raise not_transferable_error(key, error) from error
    return found


def unpack_objects(objects: TransferredObjects) -> None:
    """Register the objects in this process under the same names."""
    for name, folder in objects.data.items():
        dataset = read_stored_dataset(folder)
        if dataset is None:
            raise not_transferable_error("data", OSError(f"{folder} cannot be read"))
        HANDED_OVER[name] = dataset
    for key, named in objects.others.items():
        for name, pickled in named.items():
            try:
                get_given_objects(key)[name] = pickle.loads(pickled)
            except Exception as error:
                raise not_transferable_error(key, error) from error


def not_transferable_error(what: str, error: Exception) -> ShoalError:
    problem = f"The {what} cannot be given to other processes ({describe_error(error)})."
    advice = "Name files" if what == "data" else "Define its classes and functions in a file that can be imported"
    return ShoalError("bad-value", problem, f"{advice}, or leave `workers` at 1.")
