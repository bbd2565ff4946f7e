"""Progress of runs in a notebook: a bar per run in the output of the cell, as plain HTML."""

from collections.abc import Sequence
from html import escape
from time import perf_counter
from typing import TYPE_CHECKING, Any

from shoal.display.quantities import format_seconds, format_size

if TYPE_CHECKING:
    from shoal.core.ledger import Row
    from shoal.runs.history import History
    from shoal.runs.recipe import Recipe

MAX_BARS = 12
"""Bars that are shown; runs that are over make room for others."""
PAUSE = 0.1
"""Least seconds between two pictures: a browser draws no faster, and short rounds would wait for it."""


def find_notebook() -> Any:
    """The shell of the notebook that this program runs in; None in a terminal or a script."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if hasattr(shell, "kernel") else None


def describe_status(history: "History") -> str:
    """How far a run is: its headline, simulated time and bytes."""
    value, name = history.last(history.headline), "acc" if history.headline == "accuracy" else history.headline
    status = f"{name} {value:.3f}  " if value is not None else ""
    sent = format_size(history.total("bytes_down", "bytes_up"))
    return f"{status}{format_seconds(history.total('sim_seconds'))} simulated  {sent}"


class NotebookProgress:
    """A bar per run with its status and the time left, drawn anew in place; `show` puts HTML there."""

    def __init__(self, show: Any = None, with_seeds: bool = False, varied: Sequence[str] = ()):
        self.show, self.with_seeds, self.varied = show or make_display(), with_seeds, varied
        self.runs: dict[str, tuple[str, int, int, str]] = {}
        """By fingerprint of the recipe: label, rounds that are over, all rounds, status."""
        self.begun: dict[str, tuple[float, int]] = {}
        self.drawn_at = 0.0

    def show_row(self, recipe: "Recipe", row: "Row", history: "History") -> None:
        """Bring the bar of a run up to a round that is over."""
        key, now = recipe.fingerprint(), perf_counter()
        start, rounds = self.begun.setdefault(key, (now, len(history)))
        played = len(history) - rounds
        left = (recipe.rounds - len(history)) * (now - start) / played if played else None
        values = [f"{name}={getattr(recipe, name)}" for name in self.varied]
        label = ", ".join([recipe.method, *values]) + (f" seed {recipe.seed}" if self.with_seeds else "")
        status = describe_status(history) + (f"  {format_seconds(left)} left" if left else "")
        total = len(history) if row.get("stopped") else recipe.rounds
        self.runs[key] = label, len(history), total, status + ("  stopped" if row.get("stopped") else "")
        if now - self.drawn_at > PAUSE:
            self.draw()

    def draw(self) -> None:
        self.drawn_at = perf_counter()
        self.show(self.render())

    def render(self) -> str:
        going = [run for run in self.runs.values() if run[1] < run[2]]
        over = [run for run in self.runs.values() if run[1] >= run[2]]
        shown = (over[max(0, len(over) + len(going) - MAX_BARS) :] + going)[-MAX_BARS:]
        lines = ["<table><tbody>"]
        for label, rounds, total, status in shown:
            bar = f'<progress value="{rounds}" max="{total}"></progress> {rounds}/{total}'
            lines.append(
                f"<tr><td>{escape(label)}</td><td>{bar}</td><td>{escape(status).replace('  ', ', ')}</td></tr>"
            )
        hidden = len(self.runs) - len(shown)
        lines.append("</tbody></table>" + (f"<p>and {hidden} more, {len(over)} are over</p>" if hidden else ""))
        return "\n".join(lines)

    def close(self) -> None:
        """Show how far the runs came."""
        if self.runs:
            self.draw()


def make_display() -> Any:
    """A function that shows HTML in the cell that runs, and later HTML in place of the former."""
    from IPython.display import HTML, display

    handles: list[Any] = []

    def show(html: str) -> None:
        if handles:
            handles[0].update(HTML(html))
        else:
            handles.append(display(HTML(html), display_id=True))

    return show
