"""Data that a user's Python file holds, or that a function in it gives: `file.py:name`."""

from typing import Any

from shoal.core.errors import ShoalError, describe_error
from shoal.data.user_split import make_data_error
from shoal.storage.python_file import load_named_object


def call_data_function(spec: str) -> Any:
    """The object of that name, or what it returns where it is a function, in any form for `build_user_dataset`."""
    thing = load_named_object(spec)
    if not callable(thing):
        return thing
    try:
        return thing()
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{spec} raises {describe_error(error)} when it is called without arguments."
        raise make_data_error(problem, "Correct it there.") from error
