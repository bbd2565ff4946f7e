"""A user's own model: a module, or a file and the name of the class or function in it that makes one."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.core.errors import describe_error
from shoal.core.model.inputs import Inputs, InputShape, describe_inputs, repeat_example
from shoal.core.model.module_call import call_module, find_call_form
from shoal.core.model.module_in_use import is_in_use
from shoal.core.model.net import Net
from shoal.core.model.outputs import read_logits
from shoal.models.axes_trace import trace_axes
from shoal.models.chain import find_blocks
from shoal.models.transformers_model import TransformersModel, find_mask_difference, find_mask_fault, takes_token_dict
from shoal.models.user_call import call_model_maker, make_model_error
from shoal.storage.python_file import load_named_object


def load_model_file(spec: str, input_shape: InputShape, classes: int) -> Net:
    """The model that `path/to/file.py:Name` makes. The file is run: it is the user's own.

    `Name` is a class or a function. It is called with the shape of one input and the number of classes, or with the
    classes alone, or with nothing, whichever it takes; arguments called `input_shape`, `classes` or `num_classes` are
    given by name. Where inputs are a dict or tuple of tensors, the shape is a dict or tuple of shapes.
    """
    return load_model_maker(spec)(input_shape, classes)


def load_model_maker(spec: str) -> Callable[..., Net]:
    """A function that builds the net of `path/to/file.py:Name`, with the file already loaded."""
    thing = load_named_object(spec)

    def make(input_shape: InputShape, classes: int, example: Inputs | None = None) -> Net:
        module = thing if isinstance(thing, nn.Module) else call_model_maker(spec, thing, input_shape, classes)
        return build_user_net(module, input_shape, classes, spec, example)

    return make


def build_user_net(
    module: Any, input_shape: InputShape, classes: int, name: str = "The model", example: Inputs | None = None
) -> Net:
    """A copy of a user's module as a net, after one pass of two samples has shown that it is one.

    Its inputs are taken for words where it has an embedding and a sample is a sequence, or where the module says
    `token_inputs = True`. A model of transformers that reads text is made into a `TransformersModel`. Axes are found by
    tracing it, where torch_pruning is installed and inputs are one tensor. An `nn.Sequential` has one block for each
    child with parameters. `example` is one sample where inputs are a dict or tuple of tensors.

    Parameters that need no gradient are frozen, and a tensor that several layers hold is one tensor; see `Net`.
    """
    if isinstance(module, Net):
        check_forward_pass(name, module.module, input_shape, classes, module.token_inputs, example)
        return module if example is None else replace(module, input_shape=input_shape, example=example)
    if not isinstance(module, nn.Module):
        raise make_model_error(
            name, f"it is {name_type(module)} and no torch.nn.Module", "Give a module or what makes one."
        )
    if is_in_use(module):
        why = "a run or a net has it in use, and puts its own tensors in place of the parameters"
        raise make_model_error(name, why, "Give result.module() for the trained model, or a module of your own.")
    try:
        module = deepcopy(module)
    except Exception as error:
        raise make_model_error(
            name, f"it cannot be copied ({describe_error(error)})", "Keep locks and open files out of it."
        ) from error
    if isinstance(example, dict) and takes_token_dict(module):
        module = TransformersModel(module)
    embeds = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in module.modules())
    tokens = bool(getattr(module, "token_inputs", embeds and example is None and len(input_shape) == 1))
    check_forward_pass(name, module, input_shape, classes, tokens, example)
    if not any(p.requires_grad for p in module.parameters()):
        raise make_model_error(name, "it has no parameters to train", "Give it a layer with weights.")
    return Net(
        module,
        input_shape,
        classes,
        trace_axes(module, input_shape, tokens) if example is None else (),
        find_blocks(module) if isinstance(module, nn.Sequential) else (),
        token_inputs=tokens,
        example=example,
    )


def check_forward_pass(
    name: str, module: nn.Module, input_shape: InputShape, classes: int, tokens: bool, example: Inputs | None = None
) -> None:
    """Runs two samples of zeros through a module and refuses it where the outputs are not logits."""
    first = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
    if example is None:
        kind = {"dtype": torch.long if tokens else first.dtype, "device": first.device}
        inputs, form = torch.zeros(2, *input_shape, **kind), f"of shape {(2, *input_shape)}"
    else:
        inputs, form = repeat_example(example, 2, first.dtype, first.device), f"that are {describe_inputs(example)}"
    try:
        with torch.no_grad():
            returned = call_module(module.eval(), inputs, find_call_form(module, example))
    except (Exception, SystemExit) as error:
        with torch.no_grad():
            if fault := find_mask_fault(module, inputs):
                raise make_model_error(name, fault, "Give a model of another kind, such as BERT or GPT-2.") from error
        why = f"it raises {describe_error(error)} on inputs {form}"
        advice = "Correct its forward, or choose data of another shape."
        if isinstance(example, dict):
            advice = f"Let its forward take one dict, or arguments called {', '.join(example)}."
        raise make_model_error(name, why, advice) from error
    if fault := find_mask_difference(module, inputs):
        raise make_model_error(name, fault, "Give a model of another kind, such as BERT or GPT-2.")
    try:
        logits = read_logits(returned)
    except TypeError as error:
        raise make_model_error(name, str(error), "Return the logits alone, or in a dict under `logits`.") from error
    shape = tuple(logits.shape)
    if not logits.is_floating_point():
        raise make_model_error(name, "it returns whole numbers", "Return a logit for each class, and not the class.")
    if classes == 1 and shape == (2,):
        return
    if not (len(shape) in (2, 3) and shape[0] == 2 and shape[-1] == classes):
        why = f"it returns {shape} for 2 samples and {classes} {'class' if classes == 1 else 'classes'}"
        raise make_model_error(
            name, why, f"Return logits of shape (batch, {classes}), or (batch, positions, {classes})."
        )


def name_type(thing: object) -> str:
    """The name of an object's type, for messages."""
    return "nothing" if thing is None else f"a {type(thing).__name__}"
