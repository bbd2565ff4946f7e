"""The words of a command that says a recipe."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields

from shoal.runs.recipe import Recipe, is_unset


def format_recipe_flags(recipe: Recipe, always: Sequence[str] = (), never: Sequence[str] = ()) -> list[str]:
    """A flag with its value for every key that is not at its default, or that is `always` said."""
    words = []
    for f in fields(Recipe):
        value, flag = getattr(recipe, f.name), f"--{f.name.replace('_', '-')}"
        if f.name in never or (is_unset(f, value) and f.name not in always):
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            words.append(f"{flag} {quote_word(text)}")
    return words


def quote_word(text: str) -> str:
    """A word as a shell reads it: in double quotes where it needs some, since expressions have single ones inside."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    return f'"{text}"' if not set(text) & set('"$`\\!') else shlex.quote(text)
