"""Fingerprints of data sets, modules, tasks and functions: hashes of their contents, made without pickle."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from hashlib import sha256
from textwrap import dedent
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.core.learning_task import LearningTask
from shoal.core.model.tensor_digest import hash_tensor
from shoal.data.dataset import Dataset

NOT_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has, which say nothing about its settings."""


def fingerprint_dataset(dataset: Dataset) -> str:
    """16 digits for the contents, shapes and types of training and test set, the owners and the number of classes."""
    digest = sha256(f"{dataset.classes} classes".encode())
    for name in ("inputs", "targets", "test_inputs", "test_targets"):
        inputs = getattr(dataset, name)
        if isinstance(inputs, Tensor):
            hash_tensor(digest, name, inputs)
            continue
        named = inputs if isinstance(inputs, dict) else dict(enumerate(inputs))
        digest.update(f"{name} is a {type(inputs).__name__}\n".encode())
        for key, value in named.items():
            hash_tensor(digest, f"{name} {key}", value)
    if dataset.owners is not None:
        hash_tensor(digest, "owners", torch.from_numpy(np.asarray(dataset.owners, dtype=np.int64)))
    if dataset.order is not None:
        hash_tensor(digest, "order", torch.from_numpy(np.asarray(dataset.order, dtype=np.float64)))
    if dataset.task or dataset.class_names:
        digest.update(f"{dataset.task} {dataset.class_names}".encode())
    return digest.hexdigest()[:16]


def fingerprint_architecture(module: nn.Module) -> str:
    """8 digits for the layers with their settings and code, and the names, shapes and types of all tensors.

    Modules that torch itself defines count by their name. Where a class is defined does not matter: a program that
    imports it makes the same model as the one that holds it.
    """
    lines = [f"{name}: {line}" for name, layer in module.named_modules() for line in describe_layer(layer)]
    for name, tensor in iterate_tensors(module):
        shape = "not known yet" if is_lazy(tensor) else tuple(tensor.shape)
        lines.append(f"{name}: {tensor.dtype} {shape} {tensor.requires_grad}")
    return sha256("\n".join(lines).encode()).hexdigest()[:8]


def fingerprint_weights(module: nn.Module) -> str:
    """8 digits for the values of all parameters and buffers."""
    digest = sha256()
    for name, tensor in iterate_tensors(module):
        if not is_lazy(tensor):
            hash_tensor(digest, name, tensor)
    return digest.hexdigest()[:8]


def fingerprint_function(function: Any) -> str:
    """16 digits for the code of a function, or of an object that is called, and what is bound to it."""
    return sha256(describe_callable(function).encode()).hexdigest()[:16]


def fingerprint_task(task: LearningTask) -> str:
    """16 digits for the settings of a learning task, and the code of its functions and metrics."""
    lines = [f"{f.name} = {describe_callable(getattr(task, f.name))}" for f in fields(task) if f.name != "metrics"]
    for metric in task.metrics:
        made = describe_callable(metric.judge), describe_callable(metric.make)
        lines.append(f"{metric.name} {metric.better} {metric.asked} {made}")
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def describe_callable(value: Any) -> str:
    """A setting, or a function or class by its code; of `functools.partial` also what is bound."""
    if isinstance(value, partial):
        bound = describe_setting(list(value.args)), describe_setting(value.keywords)
        return f"{describe_callable(value.func)} {bound}"
    if isinstance(value, nn.Module):
        return f"{fingerprint_architecture(value)} {fingerprint_weights(value)} {value}"
    if isinstance(value, type) and not is_from_torch(value):
        return read_source_code(value)
    if callable(value) and not inspect.isfunction(value) and not is_from_torch(type(value)):
        return f"{describe_callable(type(value))} {describe_setting(getattr(value, '__dict__', {}))}"
    return describe_setting(value)


def iterate_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def describe_layer(layer: nn.Module) -> Iterator[str]:
    """The class, settings and code of a layer, in lines that are the same in every process.

    What transformers notes on its classes when a model is first used (`..._cached_value`) is none of them.
    """
    yield type(layer).__qualname__
    yield layer.extra_repr()
    for name, value in sorted(vars(layer).items()):
        if name not in NOT_OWN and not (name.startswith("_") and is_from_torch(type(layer))):
            yield f"{name} = {describe_setting(value)}"
    for cls in type(layer).__mro__:
        if not is_from_torch(cls):
            for name, value in sorted(vars(cls).items()):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if inspect.isfunction(function) or not (name.startswith("__") or name.endswith("_cached_value")):
                    yield f"{name}: {describe_setting(function)}"


def describe_setting(value: Any) -> str:
    """A plain value as it is, a function by its code, anything else by its type: its address says nothing."""
    match value:
        case bool() | int() | float() | complex() | str() | bytes() | None | torch.dtype() | torch.device():
            return repr(value)
        case tuple() | list():
            return f"{type(value).__name__}({', '.join(map(describe_setting, value))})"
        case set() | frozenset():
            return f"{type(value).__name__}({', '.join(sorted(map(describe_setting, value)))})"
        case dict():
            return f"dict({', '.join(f'{describe_setting(k)}: {describe_setting(v)}' for k, v in value.items())})"
        case np.ndarray() if value.dtype.kind in "biuf":
            return describe_setting(torch.from_numpy(value.astype(value.dtype.newbyteorder("="))))
        case nn.Parameter():
            return "Parameter"  # its values are weights
        case Tensor() if value.layout == torch.strided and not value.is_quantized and not is_lazy(value):
            hash_tensor(digest := sha256(), "tensor", value)
            return digest.hexdigest()
    function = getattr(value, "__func__", value)
    if inspect.isfunction(function):
        return function.__qualname__ if is_from_torch(function) else read_source_code(function)
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def is_from_torch(thing: Any) -> bool:
    return thing.__module__.partition(".")[0] in ("torch", "builtins")


def read_source_code(function: Any) -> str:
    """A function's source without comments and line breaks, or what it was compiled to where there is no source."""
    try:
        return ast.unparse(ast.parse(dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return describe_bytecode(function.__code__) if hasattr(function, "__code__") else function.__qualname__


def describe_bytecode(code: CodeType) -> str:
    constants = [describe_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
