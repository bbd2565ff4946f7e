"""Fingerprints of code that a program gives: parts, metrics, fleets, by their source and by what it refers to."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from shoal.runs.fingerprint import (
    describe_setting,
    fingerprint_architecture,
    fingerprint_weights,
    read_source_code,
)

NOTES_OF_PYTHON = frozenset(
    "__module__ __dict__ __weakref__ __doc__ __annotations__ __dataclass_fields__ __dataclass_params__ __match_args__ "
    "__abstractmethods__ _abc_impl __static_attributes__ __firstlineno__ __qualname__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __hash__ __parameters__ __orig_bases__ __slots__ __slotnames__".split()
)
"""What Python notes about a class, which is no code of its author."""


def fingerprint_code(thing: Any) -> str:
    """16 digits for a function, a class or an object: its settings, its source, and that of what it calls.

    What is called counts as far as it is written in the same module, a program or a notebook; the same code in another
    file has the same fingerprint. Libraries count by their names.
    """
    lines = list(describe_code_of(thing, set()))
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def describe_code_of(thing: Any, seen: set[int]) -> Iterator[str]:
    """Lines that are the same in every process; what was described before is not described again."""
    function = getattr(thing, "__func__", thing)
    if isinstance(thing, partial):
        yield f"partial {describe_setting(list(thing.args))} {describe_setting(thing.keywords)}"
        yield from describe_code_of(thing.func, seen)
    elif isinstance(thing, nn.Module):
        yield f"module {fingerprint_architecture(thing)} {fingerprint_weights(thing)}"
    elif isinstance(function, FunctionType):
        yield from describe_function(function, seen)
        if function is not thing:
            yield from describe_code_of(thing.__self__, seen)
    elif isinstance(thing, type):
        yield from describe_class(thing, seen)
    elif is_dataclass(thing):
        yield from describe_class(type(thing), seen)
        for field in fields(thing):
            yield f"{field.name} ="
            yield from describe_code_of(getattr(thing, field.name), seen)
    elif isinstance(thing, (list, tuple)):
        yield f"{type(thing).__name__} of {len(thing)}"
        for value in thing:
            yield from describe_code_of(value, seen)
    elif is_plain(thing) or is_in_library(type(thing).__module__):
        yield describe_setting(thing)
    elif id(thing) not in seen:
        seen.add(id(thing))
        yield from describe_class(type(thing), seen)
        for name, value in sorted(vars(thing).items()) if hasattr(thing, "__dict__") else ():
            yield f"{name} ="
            yield from describe_code_of(value, seen)


def describe_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    """The source of a function, its defaults, and what the names in it stand for in its module or around it."""
    if is_in_library(function.__module__ or ""):
        yield f"{function.__module__}.{function.__qualname__}"
        return
    if id(function) in seen:
        return
    seen.add(id(function))
    yield read_source_code(function)
    yield describe_setting(function.__defaults__) + describe_setting(function.__kwdefaults__)
    for name in sorted(list_names(function.__code__)):
        if name in function.__globals__:
            yield f"{name} is"
            yield from describe_referred(function.__globals__[name], seen)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield f"{name} is"
        yield from describe_referred(cell.cell_contents, seen)


def describe_referred(value: Any, seen: set[int]) -> Iterator[str]:
    """What a name in code stands for: code of the user by its source, a plain value as it is, all else by its type."""
    if inspect.ismodule(value):
        yield value.__name__
    elif isinstance(value, (FunctionType, type, partial)):
        yield from describe_code_of(value, seen)
    else:
        yield describe_setting(value)


def describe_class(cls: type, seen: set[int]) -> Iterator[str]:
    """The name of a class, its fields and its attributes with the source of its methods, and the same of its bases."""
    if is_in_library(cls.__module__):
        yield f"{cls.__module__}.{cls.__qualname__}"
        return
    if id(cls) in seen:
        return
    seen.add(id(cls))
    yield f"class {cls.__name__}"
    for field in fields(cls) if is_dataclass(cls) else ():
        yield f"{field.name}: {field.type} = {describe_setting(field.default)}"
    for name, value in sorted(vars(cls).items()):
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if name in NOTES_OF_PYTHON or is_made_by_dataclass(cls, function):
            continue
        yield f"{name}:"
        yield from describe_referred(function, seen)
    for base in cls.__bases__:
        yield from describe_class(base, seen)


def is_made_by_dataclass(cls: type, function: Any) -> bool:
    """Whether a method is what `dataclass` makes of the fields, which are described."""
    is_special = isinstance(function, FunctionType) and function.__name__.startswith("__")
    return is_dataclass(cls) and is_special and inspect.unwrap(function).__code__.co_filename == "<string>"


def is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, dict, set, frozenset))


def is_in_library(module: str) -> bool:
    """Whether a module belongs to Python or is installed; its version is not the user's code."""
    name = module.partition(".")[0]
    if name in ("builtins", "shoal", "torch") or name in sys.stdlib_module_names:
        return name != "__main__"
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def list_names(code: CodeType) -> set[str]:
    """The names that code refers to outside itself, with those of functions and comprehensions inside it."""
    inner = [list_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
