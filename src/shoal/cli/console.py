"""The console that every command prints to: texts come out as they are, and styles are those of `rich.text.Text`."""

from typing import Any

from rich.console import Console


def make_console(**settings: Any) -> Console:
    """A console that takes no brackets for markup, and no `:name:` for an emoji: `cosine:100:0.1` is a recipe value."""
    return Console(markup=False, emoji=False, **settings)
