"""Data that a function in a user's Python file gives: `file.py:function`."""

from typing import Any

from shoal.core.errors import ShoalError, describe_error
from shoal.data.user_split import make_data_error
from shoal.storage.python_file import load_named_object


def call_data_function(spec: str) -> Any:
    """What the function returns, in any of the forms that `build_user_dataset` takes."""
    thing = load_named_object(spec)
    if not callable(thing):
        raise make_data_error(f"{spec} is no function.", "Name a function that takes nothing and returns the data.")
    try:
        return thing()
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{spec} raises {describe_error(error)} when it is called without arguments."
        raise make_data_error(problem, "Correct it there.") from error
