"""What code and values come to, in words that are the same in every process; what cannot be told for certain raises.

Code of shoal, of torch and of harmless modules of Python counts by its name: their versions and sources are known. Code
from elsewhere (a user's part or model) counts by what was loaded: the bytecode of its functions, and everything that
they refer to, which is described alike.
"""

import builtins
import dis
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

KNOWN_PACKAGES = frozenset(
    "shoal torch builtins math functools operator itertools typing dataclasses collections abc enum contextlib".split()
)
UNCERTAIN_NAMES = frozenset(
    "open eval exec compile input __import__ import_module globals locals vars environ getenv argv load read read_text "
    "read_bytes stat time perf_counter now random".split()
)
"""Names in code from elsewhere by which it may depend on more than its own text."""
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
CONTENT_TYPES = (*PLAIN_TYPES, list, tuple, set, frozenset, Mapping)
"""Values that count by what they hold."""
SKIPPED_ATTRIBUTES = frozenset(
    "__module__ __dict__ __weakref__ __doc__ __annotations__ __dataclass_fields__ __dataclass_params__ __match_args__ "
    "__parameters__ __orig_bases__ __abstractmethods__ _abc_impl __static_attributes__ __firstlineno__ __qualname__ "
    "__annotate__ __annotate_func__ __annotations_cache__ __hash__ __slots__".split()
)
"""What Python notes about a class."""
DATACLASS_METHODS = frozenset("__init__ __repr__ __eq__ __lt__ __setattr__ __delattr__ __replace__".split())
"""What `dataclass` makes of the fields, which are described."""
MODULE_INTERNALS = frozenset(vars(nn.Module()))
HOOKS = tuple(name for name in sorted(MODULE_INTERNALS) if name.endswith("_hooks"))


class Indescribable(Exception):
    """Something about which nothing certain can be said."""


class Describer:
    """Describes values one after the other; what was described before is only pointed to."""

    def __init__(self):
        self.lines: list[str] = []
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []
        """What was described, kept alive so that no other object gets its address."""

    def describe(self, value: Any) -> None:
        """Add a value to the description."""
        if isinstance(value, CONTENT_TYPES) and not is_known(type(value).__module__):
            self.describe(type(value))  # which may have methods
        if isinstance(value, PLAIN_TYPES):
            self.lines.append(f"{type(value).__name__} {value!r}")
        elif isinstance(value, (list, tuple, torch.Size)):
            self.describe_all(type(value).__name__, value)
        elif isinstance(value, (set, frozenset)):
            self.describe_all(type(value).__name__, sorted(value, key=repr))
        elif isinstance(value, Mapping):
            self.describe_all(type(value).__name__, (thing for item in value.items() for thing in item))
        elif id(value) in self.seen:
            self.lines.append(f"as {self.seen[id(value)]}")
        else:
            self.seen[id(value)] = len(self.seen)
            self.kept.append(value)
            self.describe_object(value)

    def describe_all(self, what: str, values: Iterable[Any]) -> None:
        self.lines.append(f"{what} of")
        for value in values:
            self.describe(value)
        self.lines.append("end")

    def describe_object(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self.describe_module(value)
        elif isinstance(value, ModuleType):
            self.require_known(value.__name__)
        elif isinstance(value, type):
            self.describe_class(value)
        elif isinstance(value, FunctionType):
            self.describe_function(value)
        elif isinstance(value, MethodType):
            self.describe_all("method", (value.__func__, value.__self__))
        elif isinstance(value, partial):
            self.describe_all("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, BuiltinFunctionType):
            self.require_known(value.__module__ or "builtins")
            self.lines.append(value.__qualname__)
        elif isinstance(value, Enum):
            self.describe_all(f"enum {value.name}", (type(value),))
        elif is_dataclass(value):
            named = [(f.name, getattr(value, f.name)) for f in fields(value)]
            self.describe_all("dataclass", (type(value), *named))
        else:
            raise Indescribable(f"a {type(value).__qualname__}")

    def require_known(self, module: str) -> None:
        if not is_known(module):
            raise Indescribable(f"the module {module}")
        self.lines.append(module)

    def describe_class(self, cls: type) -> None:
        self.lines.append(f"class {cls.__module__ if is_known(cls.__module__) else ''} {cls.__qualname__}")
        if not is_known(type(cls).__module__):
            self.describe(type(cls))
        if is_known(cls.__module__):  # torch makes classes of those of users, as of parametrised layers
            self.describe_all("of", [base for base in cls.__mro__ if not is_known(base.__module__)])
            return
        for name, value in sorted(vars(cls).items()):
            if name in SKIPPED_ATTRIBUTES or (is_dataclass(cls) and comes_of_dataclass(name, value)):
                continue
            functions = find_functions(value)
            self.lines.append(name)
            for thing in functions if functions is not None else [value]:
                self.describe(thing)
        self.describe_all("bases", cls.__bases__)

    def describe_function(self, function: FunctionType) -> None:
        if is_known(function.__module__ or "") and is_known(function.__globals__.get("__name__", "")):
            self.lines.append(f"function {function.__module__} {function.__qualname__}")
            self.describe_all("in", [cell.cell_contents for cell in function.__closure__ or ()])
            return
        self.describe_code(function.__code__, function.__globals__)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        self.describe_all("with", (function.__defaults__, function.__kwdefaults__, vars(function), *cells))

    def describe_code(self, code: CodeType, names: Mapping[str, Any]) -> None:
        """Bytecode, constants, and what its names stand for in the module or among Python's own."""
        uncertain = UNCERTAIN_NAMES.intersection(code.co_names)
        if uncertain:
            raise Indescribable(f"code that uses {min(uncertain)}")
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                self.require_known(str(instruction.argval))
        self.lines.append(f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}")
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.describe_code(constant, names)
            else:
                self.describe(constant)
        for name in code.co_names:
            if name in names:
                self.lines.append(f"{name} is")
                self.describe(names[name])
            elif hasattr(builtins, name):
                self.lines.append(f"{name} of Python")

    def describe_module(self, module: nn.Module) -> None:
        """The layers with their settings, and the names, shapes and types of tensors; their values do not count."""
        for name, layer in module.named_modules():
            self.lines.append(f"layer {name}")
            self.describe(type(layer))
            for attribute, value in sorted(vars(layer).items()):
                if attribute not in MODULE_INTERNALS:
                    self.lines.append(attribute)
                    self.describe(value)
            for hooks in HOOKS:
                for hook in (getattr(layer, hooks) or {}).values():
                    self.describe(getattr(hook, "__module__", None) == "shoal.core.model.module_taps" or hook)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}")


def is_known(module: str) -> bool:
    return module.partition(".")[0] in KNOWN_PACKAGES


def comes_of_dataclass(name: str, value: Any) -> bool:
    """Whether a method is what `dataclass` made of the fields, and not one that was written."""
    code = getattr(value, "__code__", None)
    return name == "__repr__" or (name in DATACLASS_METHODS and (code is None or code.co_filename == "<string>"))


def find_functions(value: Any) -> list[Any] | None:
    """The functions behind what a class holds in place of a method; None for anything else."""
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset, value.fdel) if function]
    if isinstance(value, cached_property):
        return [value.func]
    if inspect.ismemberdescriptor(value) or inspect.isgetsetdescriptor(value):
        return []
    return None


def describe_values(*values: Any) -> str:
    """The description of some values."""
    describer = Describer()
    for value in values:
        describer.describe(value)
    return "\n".join(describer.lines)
