"""Data, models, tasks and losses that a program gives as objects: recipes name them by a fingerprint of them."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from shoal import models
from shoal.core.errors import ShoalError
from shoal.core.learning_task import LearningTask
from shoal.core.model.frozen import find_frozen_names
from shoal.core.model.inputs import Inputs, InputShape
from shoal.core.model.net import Net
from shoal.data import dataset as datasets
from shoal.data.user_data import build_user_dataset
from shoal.models.user_model import build_user_net
from shoal.runs.fingerprint import (
    fingerprint_architecture,
    fingerprint_dataset,
    fingerprint_function,
    fingerprint_task,
    fingerprint_weights,
)
from shoal.runs.given_code import CODE_KINDS, express_method, hand_over_code_again, name_given_code, name_parts
from shoal.runs.owner_split import split_by_known_owners
from shoal.runs.recipe import DEFAULTS, Recipe
from shoal.runs.recipe_files import COMPARISON_FILE, TUNING_FILE, read_recipe_file
from shoal.runs.recipe_task import GIVEN_LOSSES, GIVEN_TASKS
from shoal.runs.recipe_text import TEXT_KEYS, make_text_reading
from shoal.runs.recipe_values import fit_value
from shoal.storage.files import explain_disk_errors, write_bytes

log = logging.getLogger("shoal")
NUMBERED = r"own-\d{1,9}"
"""Names of objects in folders of former versions, which had no fingerprints."""
ROLE_KEYS = ("label", "owner", "order", "missing")
"""Recipe keys that say how a table is read."""
HANDED_OVER_ROLES: dict[str, dict[str, str]] = {}
"""With which values of these keys data that are objects were read."""
OWN = rf"{NUMBERED}|own-[0-9a-f]{{16}}(:\w+)?|own-[0-9a-f]{{8}}-[0-9a-f]{{8}}"
FIRST_WEIGHTS = "first_weights.safetensors"
"""The file in a run's folder with the first weights of a model that was given as an object."""


@dataclass(frozen=True, eq=False)
class HandedOverModel:
    """A user's module as a model that nets are built from."""

    module: nn.Module

    def __call__(self, input_shape: InputShape, classes: int, example: Inputs | None = None) -> Net:
        return build_user_net(self.module, input_shape, classes, example=example)


def hand_over_objects(recipe: dict[str, Any], varied: Collection[str] = ()) -> dict[str, Any]:
    """The recipe values with names in place of objects; the objects are registered as long as the program lives.

    Data that say whose each sample is are split by owner unless the values say how, or split or devices are `varied`.
    """
    values = name_given_code(recipe)
    if not isinstance(values.get("data", ""), (str, Path)):
        roles = {key: fit_value(key, values[key], DEFAULTS[key]) for key in ROLE_KEYS if key in values}
        text = {key: values[key] for key in TEXT_KEYS if key in values}
        values["data"] = hand_over_data(values["data"], roles, text)
    if isinstance(model := values.get("model"), type):
        problem = f"model is the class {model.__name__}, and no module that was made of it."
        raise ShoalError("bad-value", problem, f"Give {model.__name__}(...), or FILE.py:{model.__name__} as text.")
    if callable(model) and not isinstance(model, nn.Module | type):
        problem = f"model is the function {getattr(model, '__name__', model)}, and no module that it makes."
        raise ShoalError("bad-value", problem, "Call it and give what comes out, or FILE.py:NAME as text.")
    if isinstance(values.get("model"), nn.Module):
        values["model"] = hand_over_model(values["model"])
    if isinstance(values.get("task"), LearningTask):
        values["task"] = hand_over_task(values["task"])
    if callable(values.get("loss")):
        values["loss"] = hand_over_loss(values["loss"])
    return split_by_known_owners(values, varied)


def hand_over_methods(
    methods: Iterable[Any], recipe: dict[str, Any], varied: Collection[str] = ()
) -> tuple[list[str], Recipe]:
    """The expressions of several methods, and the recipe that they share, with the parts that the program gave."""
    expressed = [express_method(method) for method in methods]
    values = hand_over_objects(recipe, varied)
    own = [name for _, names in expressed for name in names]
    if own:
        values["parts"] = tuple(dict.fromkeys((*name_parts(values.get("parts", ())), *own)))
    return [expression for expression, _ in expressed], Recipe().with_values(**values)


def hand_over_data(data: Any, roles: Mapping[str, str] | None = None, text: Mapping[str, Any] | None = None) -> str:
    """Register data for recipes of this program, read with the recipe's roles of columns; the name that they get.

    `text` are the recipe's values of `TEXT_KEYS`, by which texts are read.
    """
    named: dict[str, Any] = {key: str(value) for key, value in (roles or {}).items()}
    dataset = build_user_dataset(data, **named, text=make_text_reading(text or {}))
    name = f"own-{fingerprint_dataset(dataset)}"
    datasets.HANDED_OVER[name] = dataset
    HANDED_OVER_ROLES.setdefault(name, dict(roles or {}))
    return name


def get_column_roles(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of the columns of a table."""
    return {key: getattr(recipe, key) for key in ROLE_KEYS}


def refuse_other_roles(recipe: Recipe) -> None:
    """Refuse other roles of columns than those with which data that are an object were read: it is too late."""
    roles = HANDED_OVER_ROLES.get(recipe.data)
    for key, value in get_column_roles(recipe).items():
        if roles is not None and value != roles.get(key, DEFAULTS[key]):
            raise ShoalError(
                "bad-value",
                f"{key} is {value!r}, and the data were read with {roles.get(key, DEFAULTS[key])!r}.",
                "Data that are an object are read once: name a file or FILE.py:FUNCTION to vary it.",
            )


def hand_over_model(model: Any) -> str:
    """Register a model for recipes of this program; the name that stands for it."""
    module = model.module if isinstance(model, HandedOverModel) else model
    if not isinstance(module, nn.Module):
        raise ShoalError("bad-value", f"A {type(module).__name__} is no model.", "Give a torch.nn.Module.")
    name = f"own-{fingerprint_architecture(module)}-{fingerprint_weights(module)}"
    models.HANDED_OVER[name] = HandedOverModel(module)
    return name


def hand_over_task(task: Any) -> str:
    """Register a learning task for recipes of this program; the name that stands for it."""
    if not isinstance(task, LearningTask):
        raise ShoalError("bad-value", f"A {type(task).__name__} is no task.", "Give a shoal.LearningTask.")
    name = f"own-{fingerprint_task(task)}"
    GIVEN_TASKS[name] = task
    return name


def hand_over_loss(loss: Callable[..., Any]) -> str:
    """Register a loss for recipes of this program; the name that stands for it."""
    if not callable(loss):
        raise ShoalError("bad-value", f"A {type(loss).__name__} is no loss.", "Give a function of (outputs, targets).")
    name = f"own-{fingerprint_function(loss)}"
    GIVEN_LOSSES[name] = loss
    return name


def is_handed_over(name: str) -> bool:
    """Whether a name in a recipe stands for an object of a program."""
    return bool(re.fullmatch(OWN, name))


def list_handed_over_keys(recipe: Recipe) -> list[str]:
    """Those of the keys of a recipe that name objects."""
    return [key for key in (*OBJECTS, *CODE_KINDS) if list_object_names(recipe, key)]


def list_object_names(recipe: Recipe, key: str) -> list[str]:
    """The names of objects under a key of a recipe."""
    value = getattr(recipe, key)
    return [name for name in ([value] if isinstance(value, str) else value) if is_handed_over(name)]


def get_given_objects(key: str) -> dict[str, Any]:
    """The objects of this program by name, that recipes may name under a key."""
    return (OBJECTS.get(key) or CODE_KINDS[key])[0]


def describe_way_to_resume(path: Path, recipe: Recipe | None = None) -> str:
    """How a run or a comparison is resumed: by a command, or by a call in the program that has its objects."""
    try:
        keys = list_handed_over_keys(recipe or read_folder_recipe(path))
    except ShoalError:
        keys = []
    arguments = "".join(f", {key}=..." for key in keys)
    return f"shoal.resume({str(path)!r}{arguments}) in the program" if arguments else f"`shoal resume {path}`"


def read_folder_recipe(path: Path) -> Recipe:
    """The recipe of a run folder, or the one that the runs of a comparison or of a tuning share."""
    shared = next((path / name for name in (COMPARISON_FILE, TUNING_FILE) if (path / name).is_file()), None)
    if shared is None:
        return Recipe().with_values(**read_recipe_file(path / "recipe.toml"))
    known = Recipe().__dataclass_fields__
    return Recipe().with_values(**{key: value for key, value in read_recipe_file(shared).items() if key in known})


def refuse_missing_objects(recipe: Recipe, path: Path | None = None, call: str = "shoal.resume({}{})") -> None:
    """Refuse a recipe whose objects this program does not have; the advice is the call that gives them again."""
    keys = list_handed_over_keys(recipe)
    missing = [key for key in keys if not get_given_objects(key).keys() >= set(list_object_names(recipe, key))]
    if not missing:
        return
    objects = " and ".join(key if key in ("data", "parts", "metrics") else f"a {key}" for key in missing)
    if path is None:
        problem = f"The recipe names {objects} that a Python program had made, and that went with the program."
        raise ShoalError("no-data", problem, f"Hand over {' and '.join(missing)} again: shoal.run({missing[0]}=...).")
    problem = f"{path} used {objects} that a Python program had made, and that went with the program."
    repeated_call = call.format(repr(str(path)), "".join(f", {key}=..." for key in missing))
    raise ShoalError("no-data", problem, f"Call {repeated_call} in a program that makes the same.")


@contextmanager
def hand_over_again(
    path: Path, data: Any = None, model: Any = None, task: Any = None, loss: Any = None, **code: Any
) -> Iterator[None]:
    """Inside, the objects of a run or a comparison are registered: those given now, or those this program still has.

    Objects that differ from the recorded ones are refused; for a folder without fingerprints a warning is logged.
    `code` may be method, parts, metrics and fleet.
    """
    with explain_disk_errors(path):
        has_run = any((path / name).is_file() for name in ("recipe.toml", COMPARISON_FILE, TUNING_FILE))
    if not has_run:
        yield  # whoever opens the folder says that it holds no run
        return
    recipe = read_folder_recipe(path)
    hand_over_method_again(path, recipe, **code)
    given = {"data": data, "model": model, "task": task, "loss": loss}
    with ExitStack() as cleanup:
        for key, (handed_over, hand_over) in OBJECTS.items():
            value = given[key]
            recorded, is_name = getattr(recipe, key), isinstance(value, (str, Path))
            if is_name and str(value) != recorded:
                raise ShoalError("bad-value", f"{key} of a run cannot be changed.", f"Leave out `{key}`.")
            if not (is_name or value is None or is_handed_over(recorded)):
                problem = f"{path} was begun with the {key} {recorded}, and not with an object."
                raise ShoalError("other-recipe", problem, f"Leave out `{key}`.")
            if is_name or not is_handed_over(recorded) or (value is None and recorded not in handed_over):
                continue
            text = {name: getattr(recipe, name) for name in TEXT_KEYS}
            roles = {"roles": get_column_roles(recipe), "text": text} if key == "data" else {}
            name = hand_over(handed_over[recorded] if value is None else value, **roles)
            if re.fullmatch(NUMBERED, recorded):
                log.warning("%s keeps no fingerprint of its %s: nobody can tell whether it is the same.", path, key)
                handed_over[recorded] = handed_over[name]
                cleanup.callback(handed_over.pop, recorded)
            elif name != recorded:
                raise other_model_error(path, recorded, name) if key == "model" else other_object_error(path, key)
        yield


OBJECTS: dict[str, tuple[dict[str, Any], Callable[..., str]]] = {
    "data": (datasets.HANDED_OVER, hand_over_data),
    "model": (models.HANDED_OVER, hand_over_model),
    "task": (GIVEN_TASKS, hand_over_task),
    "loss": (GIVEN_LOSSES, hand_over_loss),
}
"""By recipe key, where objects of the program are registered, and what registers one."""


def hand_over_method_again(
    path: Path, recipe: Recipe, method: Any = None, parts: Any = (), metrics: Any = (), fleet: Any = None
) -> None:
    """Register the code of a method (of a comparison, the list of its methods) and what else is given with it."""
    shared = next((path / name for name in (COMPARISON_FILE, TUNING_FILE) if (path / name).is_file()), None)
    begun = read_recipe_file(shared).get("methods") if shared else [recipe.method]
    if method is not None:
        given = [express_method(m) for m in (method if shared else [method])]
        if [expression for expression, _ in given] != begun:
            problem = f"{path} was begun with {' and '.join(map(str, begun or ()))}, and a method cannot be changed."
            raise ShoalError("bad-value", problem, "Leave out `method`, or give the same.")
        classes = [CODE_KINDS["parts"][0][name] for _, names in given for name in names]
        parts = [*(parts if isinstance(parts, (list, tuple)) else [parts]), *classes]
    recorded = {key: list_object_names(recipe, key) for key in CODE_KINDS}
    hand_over_code_again(path, recorded, {"parts": parts, "metrics": metrics, "fleet": fleet})


def other_object_error(path: Path, key: str) -> ShoalError:
    if key == "data":
        problem = f"The data are not those that {path} was begun with: their contents, shapes or types differ."
    else:
        problem = f"The {key} is not the one that {path} was begun with: its code or its settings differ."
    return ShoalError("other-recipe", problem, f"Give the same {key} as then, or start anew with another `out`.")


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
