"""A user's own model: a module, or a file and the name of the class or function in it that makes one."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import describe_error
from shoal.core.model.net import Net
from shoal.models.axes_trace import trace_axes
from shoal.models.chain import find_blocks
from shoal.models.user_call import call_model_maker, make_model_error
from shoal.storage.python_file import load_named_object


def load_model_file(spec: str, input_shape: tuple[int, ...], classes: int) -> Net:
    """The model that `path/to/file.py:Name` makes. The file is run: it is the user's own.

    `Name` is a class or a function. It is called with the shape of one input and the number of classes, or with the
    classes alone, or with nothing, whichever it takes; arguments called `input_shape`, `classes` or `num_classes` are
    given by name.
    """
    return load_model_maker(spec)(input_shape, classes)


def load_model_maker(spec: str) -> Callable[[tuple[int, ...], int], Net]:
    """A function that builds the net of `path/to/file.py:Name`, with the file already loaded."""
    thing = load_named_object(spec)

    def make(input_shape: tuple[int, ...], classes: int) -> Net:
        module = thing if isinstance(thing, nn.Module) else call_model_maker(spec, thing, input_shape, classes)
        return build_user_net(module, input_shape, classes, spec)

    return make


def build_user_net(module: Any, input_shape: tuple[int, ...], classes: int, name: str = "The model") -> Net:
    """A copy of a user's module as a net, after one pass of two samples has shown that it is one.

    Its inputs are taken for words where it has an embedding and a sample is a sequence, or where the module says
    `token_inputs = True`. Its axes are found by tracing it, where torch_pruning is installed. An `nn.Sequential` has
    one block for each child with parameters.

    Parameters that need no gradient are frozen, and a tensor that several layers hold is one tensor; see `Net`.
    """
    if isinstance(module, Net):
        check_forward_pass(name, module.module, input_shape, classes, module.token_inputs)
        return module
    if not isinstance(module, nn.Module):
        raise make_model_error(
            name, f"it is {name_type(module)} and no torch.nn.Module", "Give a module or what makes one."
        )
    embeds = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in module.modules())
    tokens = bool(getattr(module, "token_inputs", embeds and len(input_shape) == 1))
    try:
        module = deepcopy(module)
    except Exception as error:
        raise make_model_error(
            name, f"it cannot be copied ({describe_error(error)})", "Keep locks and open files out of it."
        ) from error
    check_forward_pass(name, module, input_shape, classes, tokens)
    if not any(p.requires_grad for p in module.parameters()):
        raise make_model_error(name, "it has no parameters to train", "Give it a layer with weights.")
    return Net(
        module,
        input_shape,
        classes,
        trace_axes(module, input_shape, tokens),
        find_blocks(module) if isinstance(module, nn.Sequential) else (),
        token_inputs=tokens,
    )


def check_forward_pass(name: str, module: nn.Module, input_shape: tuple[int, ...], classes: int, tokens: bool) -> None:
    """Runs two samples of zeros through a module and refuses it where the outputs are not logits."""
    first = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
    kind = {"dtype": torch.long if tokens else first.dtype, "device": first.device}
    try:
        with torch.no_grad():
            logits = module.eval()(torch.zeros(2, *input_shape, **kind))
    except (Exception, SystemExit) as error:
        why = f"it raises {describe_error(error)} on inputs of shape {(2, *input_shape)}"
        raise make_model_error(name, why, "Correct its forward, or choose data of another shape.") from error
    if not isinstance(logits, Tensor):
        raise make_model_error(name, f"it returns {name_type(logits)} and no tensor", "Return the logits alone.")
    shape = tuple(logits.shape)
    if not logits.is_floating_point():
        raise make_model_error(name, "it returns whole numbers", "Return a logit for each class, and not the class.")
    if not (len(shape) in (2, 3) and shape[0] == 2 and shape[-1] == classes):
        why = f"it returns {shape} for 2 samples and {classes} classes"
        raise make_model_error(
            name, why, f"Return logits of shape (batch, {classes}), or (batch, positions, {classes})."
        )


def name_type(thing: object) -> str:
    """The name of an object's type, for messages."""
    return "nothing" if thing is None else f"a {type(thing).__name__}"
