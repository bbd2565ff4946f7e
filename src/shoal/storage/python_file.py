"""Loads the user's Python files (parts, models, metrics) as modules. Their code is run: only the user names them."""

import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from shoal.core.errors import ShoalError, describe_error
from shoal.storage.files import explain_disk_errors


def load_python_file(path: Path) -> ModuleType:
    """The module of a Python file; a file with the same path and content is run once."""
    if not path.is_file():
        raise ShoalError("bad-part", f"There is no file {path}.", "Give the path of a Python file.")
    with explain_disk_errors(path):
        content = str(path.resolve()).encode() + path.read_bytes()
    name = "shoal_file_" + blake2b(content, digest_size=6).hexdigest()
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ShoalError("bad-part", f"{path} is not a Python file.", "Its name must end in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            problem = f"{path} cannot be loaded{describe_place(error, spec.origin)} ({describe_error(error)})."
            raise ShoalError("bad-part", problem, "Correct the file.") from error
    return sys.modules[name]


def describe_place(error: BaseException, file: str | None) -> str:
    """The line of a file that could not be read as Python, or in which it raised; "" where no line is known."""
    own = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
    return f" in line {line}" if line else ""


def load_named_object(text: str) -> Any:
    """The object that `file.py:name` names."""
    file, _, name = text.rpartition(":")
    module = load_python_file(Path(file))
    if not hasattr(module, name):
        defined = [k for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise ShoalError(
            "bad-part", f"{file} has nothing called {name!r}.", f"It has {', '.join(defined) or 'nothing at all'}."
        )
    return getattr(module, name)
