"""Where prompt vectors can stand in a model: found and tried in passes, refused where that cannot be told."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError, describe_error
from shoal.core.model.inputs import Inputs, describe_inputs
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.prompted_module import (
    PROMPT_KEY,
    TOKEN_FILLERS,
    PromptPlace,
    add_prompt,
    find_token_key,
)

OTHER_MODEL = "Use a model of tokens (lstm, hf:FOLDER, an nn.Embedding of your own), or vit, or lora."
ROOM = "Cut the texts (text_length where shoal makes the tokens), or write a smaller length."
Layers = dict[str, list[tuple[Tensor, Tensor]]]
"""By name, what layers were given and what they put out in each of their calls, in the order of the first ones."""


def insert_prompt(net: Net, place: PromptPlace, prompt: Tensor) -> Net:
    """The net with prompt vectors at a place, as a tensor that is trained: LAYER.prompt."""
    module = copy_module(net)
    add_prompt(module, place, prompt)
    return replace(net, module=module)


def choose_place(net: Net, length: int) -> tuple[PromptPlace, int]:
    """Where so many vectors can stand, and how wide they are; it has been tried that the model computes with them.

    In front where a position sees none after it or has outputs of its own, else after the first one, which many models
    read their output from.
    """
    inputs, text = make_trial_inputs(net)
    if text is None:
        problem = f"prompt cannot tell which inputs of this model are tokens: it takes {describe_inputs(inputs)}."
        raise ShoalError("bad-part", problem, "Give tokens as one tensor, or as input_ids in a dict.")
    (logits, *_), layers = run_recorded(net, inputs)
    is_text = not text.is_floating_point()
    causal = getattr(net.module, "causal", None)
    at = int(not (causal if isinstance(causal, bool) else logits.dim() == 3)) if is_text else 1
    if is_text:
        refuse_long_texts(net, text.shape[1], length)
        layer = find_embedding(net, layers, text)
        token = choose_token(net, layer)
        place, width = PromptPlace(layer, at, length, token), layers[layer][0][1].shape[-1]
        return try_place(net, place, width, inputs), width
    for layer in list_patch_layers(layers):
        place, width = PromptPlace(layer, at, length), layers[layer][0][1].shape[-1]
        try:
            return try_place(net, place, width, inputs), width
        except ShoalError:
            continue  # positions may be added to what this layer makes, and another one adds them
    problem = "prompt puts vectors among positions, and this model calls no nn.Embedding with tokens, nor cuts images."
    raise ShoalError("bad-part", problem, OTHER_MODEL)


def refuse_long_texts(net: Net, text: int, length: int) -> None:
    """Refuse texts that leave no room among the positions that a model says it has."""
    most = getattr(net.module, "text_positions", 0)
    if isinstance(most, int) and 0 < most < text + length:
        problem = f"prompt makes texts of {text} tokens {length} longer, and the model has {most} positions."
        raise ShoalError("bad-part", problem, ROOM)


# what a model does ----------------------------------------------------------------------------------------------------
def make_trial_inputs(net: Net) -> tuple[Inputs, Tensor | None]:
    """Two samples, and of these what has positions; texts are of the tokens 0 and 1, without padding."""
    inputs = net.make_example_inputs(2)
    if isinstance(inputs, Tensor):
        if inputs.is_floating_point():
            return inputs, inputs
        text = alternate_tokens(inputs)
        return text, text if text.dim() == 2 else None
    tokens = find_token_key(inputs) if isinstance(inputs, Mapping) else ""
    if not tokens:
        return inputs, None
    shape = inputs[tokens].shape
    other = next(
        (key for key, value in inputs.items() if key not in (tokens, *TOKEN_FILLERS) and value.shape == shape), ""
    )
    if other:
        problem = f"prompt lengthens texts, and what {other[:40]} has at the new positions nobody knows here."
        raise ShoalError("bad-part", problem, f"Leave {other[:40]} out of the data.")
    fillers = {key: torch.full_like(inputs[key], TOKEN_FILLERS[key]) for key in TOKEN_FILLERS if key in inputs}
    text = alternate_tokens(inputs[tokens])
    return {**inputs, **fillers, tokens: text}, text


def alternate_tokens(like: Tensor) -> Tensor:
    """Tokens 1, 0, 1, 0 ...: neither a text's positions nor all the same."""
    return ((torch.arange(like.numel(), device=like.device) + 1) % 2).view(like.shape).to(like.dtype)


@contextmanager
def watch_layers(module: nn.Module, layers: Layers, place: PromptPlace | None = None) -> Iterator[None]:
    """Inside, calls of embeddings and of layers that make positions are noted; too small tables are refused.

    `place` is that of the prompt which the module has: its layer reads tokens. Without one texts have their own length,
    and only the tokens of the trial can be too large.
    """

    def check_table(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = read_first_input(args, kwargs)
        if isinstance(layer, nn.Embedding) and given is not None and given.numel():
            if int(given.max()) >= layer.num_embeddings:  # on a GPU the look-up itself would end the program
                raise explain_small_table(names[layer], layer.num_embeddings, place)

    def note_call(layer: nn.Module, args: tuple, kwargs: dict[str, Any], put_out: Any) -> None:
        given = read_first_input(args, kwargs)
        if given is not None and isinstance(put_out, Tensor) and put_out.dim() == 3:
            if isinstance(layer, nn.Embedding) or given.dim() > 3:
                layers.setdefault(names[layer], []).append((given, put_out))

    names = {layer: name for name, layer in module.named_modules() if name}
    hooks = [layer.register_forward_pre_hook(check_table, with_kwargs=True) for layer in names]
    hooks += [layer.register_forward_hook(note_call, with_kwargs=True) for layer in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def explain_small_table(name: str, rows: int, place: PromptPlace | None) -> ShoalError:
    """The error for a look-up beyond the rows of an embedding, which reads tokens or positions."""
    if place is not None and name != place.layer:
        problem = f"prompt makes texts longer, and {name} has only {rows} rows for positions."
        return ShoalError("bad-part", problem, ROOM)
    what = "tries the model with the tokens 0 and 1"
    if place is not None:
        what = f"gives the model the token {place.token}, which is no padding, at its places"
    problem = f"prompt {what}, and {name} has only {rows} row{'s' * (rows != 1)} for tokens."
    return ShoalError("bad-part", problem, f"Give {name} at least {2 if place is None else place.token + 1} rows.")


def read_first_input(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The first input of a layer, where it is a tensor."""
    given = args[0] if args else next(iter(kwargs.values()), None)
    return given if isinstance(given, Tensor) else None


@torch.no_grad()
def run_recorded(net: Net, inputs: Inputs, place: PromptPlace | None = None) -> tuple[tuple[Tensor, Tensor], Layers]:
    """Logits and features of a pass in evaluation, and what its layers were given and put out, in the order of ends.

    `place` is that of the net's prompt, where it has one.
    """
    layers: Layers = {}
    with watch_layers(net.module, layers, place):
        logits, features, *_ = net.forward(net.initial, inputs)
    net.reset_slots()
    return (logits, features), layers


def find_embedding(net: Net, layers: Layers, text: Tensor) -> str:
    """The layer that reads the tokens: it is given them as they are, or is the only one that is given as many."""
    alike = {name: [g for g, _ in calls] for name, calls in layers.items() if calls[0][0].shape == text.shape}
    found = [name for name, given in alike.items() if torch.equal(given[0], text)] or list(alike)
    if len(found) == 1 and all(torch.equal(given, alike[found[0]][0]) for given in alike[found[0]]):
        return found[0]
    why = "no nn.Embedding is called with the tokens"
    if found:
        why = f"{' and '.join(found[:2])} read the tokens" if found[1:] else f"{found[0]} reads other tokens, too"
    problem = f"prompt puts vectors before embedded tokens, and in this model {why}."
    raise ShoalError("bad-part", problem, OTHER_MODEL)


def choose_token(net: Net, layer: str) -> int:
    """A token for the places of the prompt, which nothing takes for padding: 1 or, where that is padding, 2."""
    padding = {getattr(net.module.get_submodule(layer), "padding_idx", None), getattr(net.module, "padding", None)}
    return 2 if 1 in padding else 1


def list_patch_layers(layers: Layers) -> list[str]:
    """Layers that make positions of what has none, (samples, positions, width), the outermost first."""
    makers = (name for name, [(given, out), *_] in layers.items() if given.dim() > 3 and out.is_floating_point())
    return list(makers)[::-1]


# trying ---------------------------------------------------------------------------------------------------------------
def try_place(net: Net, place: PromptPlace, width: int, inputs: Inputs) -> PromptPlace:
    """The place with what has the prompt's positions in it; an error where the model cannot compute with them."""
    (logits, features), _ = run_recorded(net, inputs)
    rows = torch.linspace(-1, 1, place.length * width, dtype=net.dtype, device=net.place).view(place.length, width)
    try:
        prompted = insert_prompt(net, place, rows)
        (first, own), _ = run_recorded(prompted, inputs, place)
        grown = prompted.initial | {f"{place.layer}.{PROMPT_KEY}": rows.flip(1) + 2}
        with torch.no_grad():
            other, moved, *_ = prompted.forward(grown, inputs)
    except (ShoalError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = f"it raises {describe_error(error)} when it is given {place.length} positions more"
        raise ShoalError("bad-part", f"prompt cannot be used with this model: {why}.", ROOM) from error
    if torch.equal(first, other) and torch.equal(own, moved):
        problem = f"prompt changes nothing here: what {place.layer} puts out is not what the model goes on with."
        raise ShoalError("bad-part", problem, OTHER_MODEL)
    in_outputs = has_grown(logits, first, place.length, "outputs")
    in_features = own.shape != features.shape and has_grown(features, own, place.length, "features")
    return place._replace(in_outputs=in_outputs, in_features=in_features)


def has_grown(before: Tensor, after: Tensor, length: int, what: str) -> bool:
    """Whether what had positions has so many more of them; an error where its shape is another one altogether."""
    longer = (*before.shape[:1], before.shape[1] + length, *before.shape[2:]) if before.dim() > 2 else None
    if after.shape == before.shape or tuple(after.shape) == longer:
        return after.shape != before.shape
    problem = f"prompt makes {what} of shape {tuple(after.shape[1:])} of this model's {tuple(before.shape[1:])}."
    raise ShoalError("bad-part", problem, OTHER_MODEL)
