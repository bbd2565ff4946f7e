"""Data and models that a program gave as objects, packed for the worker processes of a comparison."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shoal import models
from shoal.core.errors import ShoalError, describe_error
from shoal.data.cache import read_stored_dataset, store_dataset
from shoal.data.dataset import HANDED_OVER
from shoal.runs.given_objects import HandedOverModel, is_handed_over
from shoal.runs.recipe import Recipe


class TransferredObjects(NamedTuple):
    """Objects by name for another process: data as arrays on disk, which it maps into memory, models as pickles."""

    data: dict[str, Path]
    models: dict[str, bytes]


def pack_objects(recipes: Iterable[Recipe], folder: Path) -> TransferredObjects:
    """All objects that these recipes name; data are written to folders below `folder`."""
    objects = TransferredObjects({}, {})
    for data, model in {(recipe.data, recipe.model) for recipe in recipes}:
        if is_handed_over(data) and data not in objects.data:
            objects.data[data] = folder / data
            try:
                store_dataset(HANDED_OVER[data], folder / data)
            except (OSError, TypeError, RuntimeError) as error:
                raise not_transferable_error("data", error) from error
        if is_handed_over(model) and model not in objects.models:
            objects.models[model] = pickle_model(model)
    return objects


def pickle_model(name: str) -> bytes:
    try:
        return pickle.dumps(models.HANDED_OVER[name])
    except Exception as error:
        raise not_transferable_error("model", error) from error


def unpack_objects(objects: TransferredObjects) -> None:
    """Register the objects in this process under the same names."""
    for name, folder in objects.data.items():
        dataset = read_stored_dataset(folder)
        if dataset is None:
            raise not_transferable_error("data", OSError(f"{folder} cannot be read"))
        HANDED_OVER[name] = dataset
    for name, pickled in objects.models.items():
        try:
            model = pickle.loads(pickled)
        except Exception as error:
            raise not_transferable_error("model", error) from error
        assert isinstance(model, HandedOverModel)
        models.HANDED_OVER[name] = model


def not_transferable_error(what: str, error: Exception) -> ShoalError:
    problem = f"The {what} cannot be given to other processes ({describe_error(error)})."
    advice = "Define its classes in a file that can be imported" if what == "model" else "Name files"
    return ShoalError("bad-value", problem, f"{advice}, or leave `workers` at 1.")
