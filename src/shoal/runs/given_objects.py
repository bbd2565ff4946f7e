"""Data and models that a program gives as objects: recipes name them by a fingerprint of their contents."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from shoal import models
from shoal.core.errors import ShoalError
from shoal.core.model.frozen import find_frozen_names
from shoal.core.model.inputs import Inputs, InputShape
from shoal.core.model.net import Net
from shoal.data import dataset as datasets
from shoal.data.user_data import build_user_dataset
from shoal.models.user_model import build_user_net
from shoal.runs.fingerprint import fingerprint_architecture, fingerprint_dataset, fingerprint_weights
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import COMPARISON_FILE, read_recipe_file
from shoal.storage.files import explain_disk_errors, write_bytes

log = logging.getLogger("shoal")
NUMBERED = r"own-\d{1,9}"
"""Names of objects in folders of former versions, which had no fingerprints."""
OWN = rf"{NUMBERED}|own-[0-9a-f]{{16}}|own-[0-9a-f]{{8}}-[0-9a-f]{{8}}"
FIRST_WEIGHTS = "first_weights.safetensors"
"""The file in a run's folder with the first weights of a model that was given as an object."""


@dataclass(frozen=True, eq=False)
class HandedOverModel:
    """A user's module as a model that nets are built from."""

    module: nn.Module

    def __call__(self, input_shape: InputShape, classes: int, example: Inputs | None = None) -> Net:
        return build_user_net(self.module, input_shape, classes, example=example)


def hand_over_objects(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe values with names in place of objects; the objects are registered as long as the program lives."""
    values = dict(recipe)
    if not isinstance(values.get("data", ""), (str, Path)):
        values["data"] = hand_over_data(values["data"])
    if isinstance(values.get("model"), nn.Module):
        values["model"] = hand_over_model(values["model"])
    return values


def hand_over_data(data: Any) -> str:
    """Register data for recipes of this program; the name that stands for them."""
    dataset = build_user_dataset(data)
    name = f"own-{fingerprint_dataset(dataset)}"
    datasets.HANDED_OVER[name] = dataset
    return name


def hand_over_model(model: Any) -> str:
    """Register a model for recipes of this program; the name that stands for it."""
    module = model.module if isinstance(model, HandedOverModel) else model
    if not isinstance(module, nn.Module):
        raise ShoalError("bad-value", f"A {type(module).__name__} is no model.", "Give a torch.nn.Module.")
    name = f"own-{fingerprint_architecture(module)}-{fingerprint_weights(module)}"
    models.HANDED_OVER[name] = HandedOverModel(module)
    return name


def is_handed_over(name: str) -> bool:
    """Whether the name of data or model in a recipe stands for an object of a program."""
    return bool(re.fullmatch(OWN, name))


def list_handed_over_keys(recipe: Recipe) -> list[str]:
    """Those of the keys `data` and `model` that name objects in a recipe."""
    return [key for key in ("data", "model") if is_handed_over(getattr(recipe, key))]


def describe_way_to_resume(path: Path, recipe: Recipe | None = None) -> str:
    """How a run or a comparison is resumed: by a command, or by a call in the program that has its objects."""
    try:
        keys = list_handed_over_keys(recipe or read_folder_recipe(path))
    except ShoalError:
        keys = []
    arguments = "".join(f", {key}=..." for key in keys)
    return f"shoal.resume({str(path)!r}{arguments}) in the program" if arguments else f"`shoal resume {path}`"


def read_folder_recipe(path: Path) -> Recipe:
    """The recipe of a run folder, or the one that the runs of a comparison share."""
    if not (path / COMPARISON_FILE).is_file():
        return Recipe().with_values(**read_recipe_file(path / "recipe.toml"))
    known = Recipe().__dataclass_fields__
    return Recipe().with_values(
        **{key: value for key, value in read_recipe_file(path / COMPARISON_FILE).items() if key in known}
    )


def refuse_missing_objects(recipe: Recipe, path: Path | None = None, call: str = "shoal.resume({}{})") -> None:
    """Refuse a recipe whose objects this program does not have; the advice is the call that gives them again."""
    handed_over = {"data": datasets.HANDED_OVER, "model": models.HANDED_OVER}
    missing = [key for key in list_handed_over_keys(recipe) if getattr(recipe, key) not in handed_over[key]]
    if not missing:
        return
    objects = " and ".join({"data": "data", "model": "a model"}[key] for key in missing)
    if path is None:
        problem = f"The recipe names {objects} that a Python program had made, and that went with the program."
        raise ShoalError("no-data", problem, f"Hand over {' and '.join(missing)} again: shoal.run({missing[0]}=...).")
    problem = f"{path} used {objects} that a Python program had made, and that went with the program."
    repeated_call = call.format(repr(str(path)), "".join(f", {key}=..." for key in missing))
    raise ShoalError("no-data", problem, f"Call {repeated_call} in a program that makes the same.")


@contextmanager
def hand_over_again(path: Path, data: Any = None, model: Any = None) -> Iterator[None]:
    """Inside, the objects of a run or a comparison are registered: those given now, or those this program still has.

    Objects that differ from the recorded ones are refused; for a folder without fingerprints a warning is logged.
    """
    with explain_disk_errors(path):
        has_run = any((path / name).is_file() for name in ("recipe.toml", COMPARISON_FILE))
    if not has_run:
        yield  # whoever opens the folder says that it holds no run
        return
    recipe = read_folder_recipe(path)
    kinds: list[tuple[str, Any, dict[str, Any], Callable[[Any], str]]] = [
        ("data", data, datasets.HANDED_OVER, hand_over_data),
        ("model", model, models.HANDED_OVER, hand_over_model),
    ]
    with ExitStack() as cleanup:
        for key, value, handed_over, hand_over in kinds:
            recorded, is_name = getattr(recipe, key), isinstance(value, (str, Path))
            if is_name and str(value) != recorded:
                raise ShoalError("bad-value", f"{key} of a run cannot be changed.", f"Leave out `{key}`.")
            if not (is_name or value is None or is_handed_over(recorded)):
                problem = f"{path} was begun with the {key} {recorded}, and not with an object."
                raise ShoalError("other-recipe", problem, f"Leave out `{key}`.")
            if is_name or not is_handed_over(recorded) or (value is None and recorded not in handed_over):
                continue
            name = hand_over(handed_over[recorded] if value is None else value)
            if re.fullmatch(NUMBERED, recorded):
                log.warning("%s keeps no fingerprint of its %s: nobody can tell whether it is the same.", path, key)
                handed_over[recorded] = handed_over[name]
                cleanup.callback(handed_over.pop, recorded)
            elif name != recorded:
                raise other_data_error(path) if key == "data" else other_model_error(path, recorded, name)
        yield


def other_data_error(path: Path) -> ShoalError:
    problem = f"The data are not those that {path} was begun with: their contents, shapes or types differ."
    return ShoalError("other-recipe", problem, "Give the same data as then, or start anew with another `out`.")


def other_model_error(path: Path, then: str, now: str) -> ShoalError:
    if then.rpartition("-")[0] != now.rpartition("-")[0]:
        problem = f"The model is not the one that {path} was begun with: its layers, their settings or its code differ."
        return ShoalError("other-recipe", problem, "Give the same model as then, or start anew with another `out`.")
    kept = next(path.rglob(FIRST_WEIGHTS), None)
    problem = f"The model has other weights than the one that {path} was begun with."
    load = f"model.load_state_dict(safetensors.torch.load_file({str(kept)!r}), strict=False)"
    advice = f"Give it those: {load}." if kept else "Make it as then: torch.manual_seed goes before it."
    return ShoalError("other-recipe", problem, advice)


def save_first_weights(recipe: Recipe, path: Path) -> None:
    """Write the first weights of a model that was given as an object, so that it can be made again without a seed.

    Parameters that need no gradient are left out: nothing of a run holds what is frozen.
    """
    model = models.HANDED_OVER.get(recipe.model)
    if isinstance(model, HandedOverModel):
        frozen = find_frozen_names(model.module, {})
        state = model.module.state_dict()
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor) and k not in frozen}
        write_bytes(path / FIRST_WEIGHTS, save({k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}))
