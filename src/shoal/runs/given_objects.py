"""Data and models that a program hands over as objects: named after their contents, so no others pass for them."""

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
from shoal.core.model.net import Net
from shoal.data import dataset as datasets
from shoal.data.user_data import build_user_dataset
from shoal.models.user_model import build_user_net
from shoal.runs.fingerprint import fingerprint_architecture, fingerprint_dataset, fingerprint_weights
from shoal.runs.recipe import COMPARISON_FILE, Recipe, read_recipe_file
from shoal.storage.files import explain_disk_errors, write_bytes

log = logging.getLogger("shoal")
NUMBERED = r"own-\d{1,9}"
"""What objects were called before they had fingerprints."""
OWN = rf"{NUMBERED}|own-[0-9a-f]{{16}}|own-[0-9a-f]{{8}}-[0-9a-f]{{8}}"
FIRST_WEIGHTS = "first_weights.safetensors"
"""What a handed-over model began with, in the folder of a run."""


@dataclass(frozen=True, eq=False)
class HandedOverModel:
    """Makes nets from a program's own module."""

    module: nn.Module

    def __call__(self, input_shape: tuple[int, ...], classes: int) -> Net:
        return build_user_net(self.module, input_shape, classes)


def hand_over_objects(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe in which data and models that are objects have got names; they live as long as the program."""
    given = dict(recipe)
    if not isinstance(given.get("data", ""), (str, Path)):
        given["data"] = hand_over_data(given["data"])
    if isinstance(given.get("model"), nn.Module):
        given["model"] = hand_over_model(given["model"])
    return given


def hand_over_data(data: Any) -> str:
    dataset = build_user_dataset(data)
    name = f"own-{fingerprint_dataset(dataset)}"
    datasets.HANDED_OVER[name] = dataset
    return name


def hand_over_model(model: Any) -> str:
    module = model.module if isinstance(model, HandedOverModel) else model
    if not isinstance(module, nn.Module):
        raise ShoalError("bad-value", f"A {type(module).__name__} is no model.", "Give a torch.nn.Module.")
    name = f"own-{fingerprint_architecture(module)}-{fingerprint_weights(module)}"
    models.HANDED_OVER[name] = HandedOverModel(module)
    return name


def is_handed_over(name: str) -> bool:
    """Whether a recipe's data or model stands for an object of some program."""
    return bool(re.fullmatch(OWN, name))


def list_handed_over_keys(recipe: Recipe) -> list[str]:
    """Which of `data` and `model` are objects in a recipe."""
    return [key for key in ("data", "model") if is_handed_over(getattr(recipe, key))]


def describe_way_to_resume(path: Path, recipe: Recipe | None = None) -> str:
    """How a run or a comparison is taken up again: by a command, or by the program that has what it works on."""
    try:
        keys = list_handed_over_keys(recipe or read_folder_recipe(path))
    except ShoalError:
        keys = []
    given = "".join(f", {key}=..." for key in keys)
    return f"shoal.resume({str(path)!r}{given}) in the program" if given else f"`shoal resume {path}`"


def read_folder_recipe(path: Path) -> Recipe:
    """What the folder of a run says, or that of a comparison says of all its runs."""
    if not (path / COMPARISON_FILE).is_file():
        return Recipe().with_values(**read_recipe_file(path / "recipe.toml"))
    known = Recipe().__dataclass_fields__
    return Recipe().with_values(
        **{key: value for key, value in read_recipe_file(path / COMPARISON_FILE).items() if key in known}
    )


def refuse_missing_objects(recipe: Recipe, path: Path | None = None, call: str = "shoal.resume({}{})") -> None:
    """Objects that a program handed over are gone when it ends; only a program can give them again, in such a call."""
    there = {"data": datasets.HANDED_OVER, "model": models.HANDED_OVER}
    lost = [key for key in list_handed_over_keys(recipe) if getattr(recipe, key) not in there[key]]
    if not lost:
        return
    what = " and ".join({"data": "data", "model": "a model"}[key] for key in lost)
    if path is None:
        problem = f"The recipe names {what} that a Python program had made, and that went with the program."
        raise ShoalError("no-data", problem, f"Hand over {' and '.join(lost)} again: shoal.run({lost[0]}=...).")
    problem = f"{path} used {what} that a Python program had made, and that went with the program."
    again = call.format(repr(str(path)), "".join(f", {key}=..." for key in lost))
    raise ShoalError("no-data", problem, f"Call {again} in a program that makes the same.")


@contextmanager
def hand_over_again(path: Path, data: Any = None, model: Any = None) -> Iterator[None]:
    """Inside, what a run or a comparison was begun with is there: given now, or kept by this program since then.

    What differs from then is refused. A folder without fingerprints takes what it is given, and that is said.
    """
    with explain_disk_errors(path):
        begun = any((path / name).is_file() for name in ("recipe.toml", COMPARISON_FILE))
    if not begun:
        yield  # whoever opens the folder says that it holds no run
        return
    recipe = read_folder_recipe(path)
    given: list[tuple[str, Any, dict[str, Any], Callable[[Any], str]]] = [
        ("data", data, datasets.HANDED_OVER, hand_over_data),
        ("model", model, models.HANDED_OVER, hand_over_model),
    ]
    with ExitStack() as lent:
        for key, thing, there, hand_over in given:
            asked, named = getattr(recipe, key), isinstance(thing, (str, Path))
            if named and str(thing) != asked:
                raise ShoalError("bad-value", f"{key} of a run cannot be changed.", f"Leave out `{key}`.")
            if not (named or thing is None or is_handed_over(asked)):
                problem = f"{path} was begun with the {key} {asked}, and not with an object."
                raise ShoalError("other-recipe", problem, f"Leave out `{key}`.")
            if named or not is_handed_over(asked) or (thing is None and asked not in there):
                continue
            name = hand_over(there[asked] if thing is None else thing)
            if re.fullmatch(NUMBERED, asked):
                log.warning("%s keeps no fingerprint of its %s: nobody can tell whether it is the same.", path, key)
                there[asked] = there[name]
                lent.callback(there.pop, asked)
            elif name != asked:
                raise other_data_error(path) if key == "data" else other_model_error(path, asked, name)
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
    load = f"model.load_state_dict(safetensors.torch.load_file({str(kept)!r}))"
    advice = f"Give it those: {load}." if kept else "Make it as then: torch.manual_seed goes before it."
    return ShoalError("other-recipe", problem, advice)


def save_first_weights(recipe: Recipe, path: Path) -> None:
    """Beside the recipe, what a handed-over model begins with: whoever made it without a seed can make it again."""
    model = models.HANDED_OVER.get(recipe.model)
    if isinstance(model, HandedOverModel):
        tensors = {k: v for k, v in model.module.state_dict().items() if isinstance(v, Tensor)}
        write_bytes(path / FIRST_WEIGHTS, save({k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}))
