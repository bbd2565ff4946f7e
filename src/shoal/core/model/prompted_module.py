"""Modules with prompt vectors among their positions: classes that are mixed into those of a model and of one layer.

Names of layers and tensors stay; the layer has one tensor more, `prompt`, with a row for each vector.
"""

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.model.outputs import read_logits

PROMPT_KEY = "prompt"
TOKEN_FILLERS = {"attention_mask": 1, "token_type_ids": 0}
"""What further tensors of a text have at the positions of a prompt, by their names."""


class PromptPlace(NamedTuple):
    """Where the vectors stand among the positions of a model, and what has their positions in it."""

    layer: str
    """The layer whose output they are put into."""
    at: int
    """How many positions come before them."""
    length: int
    token: int = -1
    """The token that holds their places in what the model is given; -1: it is given no tokens."""
    in_outputs: bool = False
    in_features: bool = False


class PromptedLayer(nn.Module):
    """Mixed into a layer with outputs (samples, positions, width): a prompt in place of some, or among all of them."""

    prompt: Tensor
    prompt_place: PromptPlace

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, at = super().forward(*args, **kwargs), self.prompt_place.at
        rows = self.prompt.to(x.dtype).expand(x.shape[0], -1, -1)
        held = self.prompt_place.length if self.prompt_place.token >= 0 else 0
        return torch.cat((x[:, :at], rows, x[:, at + held :]), 1)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return reduce_mixed(self, PromptedLayer)


class PromptedModel(nn.Module):
    """Mixed into a whole model: it is given longer texts, and its outputs are without the positions of the prompt."""

    prompt_place: PromptPlace

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place = self.prompt_place
        if place.token >= 0:
            args, kwargs = tuple(lengthen_text(value, place) for value in args), lengthen_text(kwargs, place)
        returned = super().forward(*args, **kwargs)
        return drop_output_positions(self, returned) if place.in_outputs else returned

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return reduce_mixed(self, PromptedModel)


def reduce_mixed(module: nn.Module, mixed: type[nn.Module]) -> tuple:
    """How copies and pickles of a module are made whose class has no place in any file."""
    return rebuild_module, (mixed, type(module).__bases__[1]), object.__reduce_ex__(module, 2)[2]


def rebuild_module(mixed: type[nn.Module], base: type[nn.Module]) -> nn.Module:
    """A module of the mixed class without anything in it yet."""
    made = mix_class(mixed, base)
    return made.__new__(made)


@cache
def mix_class(mixed: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """The class `base` with the forward of `mixed` around its own; it has the name and the arguments of `base`."""

    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mixed.forward(self, *args, **kwargs)

    return type(base.__name__, (mixed, base), {"forward": forward, "__module__": base.__module__})


def add_prompt(module: nn.Module, place: PromptPlace, prompt: Tensor) -> None:
    """Change the classes of a model and of its layer, and give the layer its prompt."""
    layer: Any = module.get_submodule(place.layer)
    layer.__class__ = mix_class(PromptedLayer, type(layer))
    layer.prompt_place, layer.prompt = place, nn.Parameter(prompt)
    whole: Any = module
    whole.__class__ = mix_class(PromptedModel, type(module))
    whole.prompt_place = place


def find_prompt_name(module: nn.Module) -> str:
    """The name of a model's prompt; empty where it has none."""
    names = (name for name, layer in module.named_modules() if isinstance(layer, PromptedLayer))
    return next((f"{name}.{PROMPT_KEY}" for name in names), "")


# positions ------------------------------------------------------------------------------------------------------------
def lengthen_text(given: Any, place: PromptPlace) -> Any:
    """Token numbers, or a dict of them and of what goes with them, with the places that the prompt takes."""

    def insert_filler(x: Tensor, value: int) -> Tensor:
        filler = x.new_full((x.shape[0], place.length), value)
        return torch.cat((x[:, : place.at], filler, x[:, place.at :]), 1)

    if isinstance(given, Tensor):
        return insert_filler(given, place.token)
    if not isinstance(given, Mapping):
        return given
    tokens = find_token_key(given)
    fillers = TOKEN_FILLERS | ({tokens: place.token} if tokens else {})
    longer = {key: insert_filler(given[key], fillers[key]) for key in fillers if isinstance(given.get(key), Tensor)}
    return {**given, **longer}


def find_token_key(given: Mapping[str, Any]) -> str:
    """The name of the token numbers in a dict of inputs, whole numbers (samples, positions); empty unless it is one."""
    keys = [
        key
        for key, value in given.items()
        if isinstance(value, Tensor)
        and value.dim() == 2
        and not (value.is_floating_point() or value.dtype == torch.bool)
        and key not in TOKEN_FILLERS
    ]
    return keys[0] if len(keys) == 1 else ""


def drop_positions(x: Tensor, place: PromptPlace) -> Tensor:
    """What is left of (samples, positions, ...) without the positions of the prompt."""
    return torch.cat((x[:, : place.at], x[:, place.at + place.length :]), 1) if place.at else x[:, place.length :]


def drop_output_positions(module: nn.Module, returned: Any) -> Any:
    """A model's outputs without the positions of its prompt, where they have them."""
    place = getattr(module, "prompt_place", None)
    if not isinstance(place, PromptPlace) or not place.in_outputs:
        return returned
    return drop_positions(read_logits(returned), place)


def make_feature_trimmer(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What takes the positions of the prompt out of a model's features, where they have them."""
    place = getattr(module, "prompt_place", None)
    if isinstance(place, PromptPlace) and place.in_features:
        return lambda x: drop_positions(x, place)
    return lambda x: x
