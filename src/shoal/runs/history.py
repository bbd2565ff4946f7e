"""The history of a run: one row per round, totals, costs to a target, and the file that stores it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.ledger import Row
from shoal.core.metric import COLUMNS, METRICS, Metric
from shoal.display.curve_style import make_axes
from shoal.display.data_frame import make_data_frame
from shoal.runs.headline import is_at_least, pick_best
from shoal.runs.history_rows import parse_row
from shoal.storage.files import damaged_file_error, explain_disk_errors


class History:
    """The rows of a run in the order of rounds; `history[column]` is the list of a column's values.

    `metrics` says what the columns are, `headline` which of them targets and budgets are about.
    """

    def __init__(self, rows: Sequence[Row] = (), metrics: Mapping[str, Metric] = METRICS, headline: str = "accuracy"):
        self.rows: list[Row] = []
        self.metrics, self.headline = metrics, headline
        self._sums: dict[str, float] = {name: 0 for name, metric in metrics.items() if metric.total == "sum"}
        self._said: set[tuple[str, str]] = set()
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        self.rows.append(row)
        for column in self._sums:
            self._sums[column] += row.get(column) or 0
        self._said.update((part, text) for part, text in row.get("log") or ())

    def drop_repeated_words(self, row: Row) -> Row:
        """A new row without the texts of its `log` that earlier rows have."""
        new = [[part, text] for part, text in row.get("log", ()) if (part, text) not in self._said]
        return {k: v for k, v in row.items() if k != "log"} | ({"log": new} if new else {})

    def cut(self, rounds: int) -> "History":
        """The first so many rounds."""
        return History(self.rows[:rounds], self.metrics, self.headline)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        """The values of a column, None in rounds that have none; a name that no metric and no row has is refused."""
        values = [row.get(column) for row in self.rows]
        if all(value is None for value in values) and column not in (known := self.list_known_columns()):
            raise unknown_name_error("column", str(column), known)
        return values

    def list_known_columns(self) -> list[str]:
        """What may be asked for: the columns of the rows, those of metrics, and others that a row may have."""
        own = (key for row in self.rows for key in row)
        return [*dict.fromkeys((*own, *self.metrics, self.headline, *METRICS, *COLUMNS))]

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns by name; None where a round has no value."""
        names = dict.fromkeys(key for row in self.rows for key in row)
        return {name: self[name] for name in names}

    def to_pandas(self) -> Any:
        """The same as a DataFrame."""
        return make_data_frame(self.to_dict())

    def plot(self, column: str = "", x: str = "rounds", ax: Any = None) -> Any:
        """Draw a column (the headline unless one is named) over rounds, seconds, bytes or macs; the axes."""
        from shoal.runs.curves import draw_histories

        return draw_histories(ax or make_axes(), {self.headline: [self]}, x, column)

    def __repr__(self) -> str:
        from shoal.runs.run_summary import describe_history

        return f"History({describe_history(self)})"

    def _repr_html_(self) -> str:
        from shoal.runs.run_summary import render_history

        return render_history(self)

    def last(self, column: str) -> Any:
        """The newest value of a column that is not None."""
        return next((row[column] for row in reversed(self.rows) if row.get(column) is not None), None)

    @property
    def end(self) -> float | None:
        """The headline at the end; None where the model had diverged at the last evaluation, so that it has none."""
        evaluated = next((row for row in reversed(self.rows) if row.get("accuracy") is not None), None)
        if evaluated is not None and evaluated.get("loss") is None and evaluated.get(self.headline) is None:
            return None
        return self.last(self.headline)

    @property
    def best(self) -> float | None:
        """The best headline (accuracy, unless the recipe says otherwise) of any round."""
        return pick_best(self[self.headline], self.better)

    def find_best_round(self) -> int | None:
        """The first round, counted from 0, with the best headline; None where no round has any."""
        best = self.best
        return None if best is None else self[self.headline].index(best)

    @property
    def better(self) -> str:
        """Whether the headline is better "up" or "down"."""
        return self.metrics[self.headline].better if self.headline in self.metrics else "up"

    @property
    def stop_reason(self) -> str:
        """Why the run was stopped before its end, by a callback or for want of improvement; "" where it was not."""
        return self.rows[-1].get("stopped", "") if self.rows else ""

    def total(self, *columns: str) -> float:
        """The sum of these columns over all rounds; of what the registry does not know, as it stands in the rows."""
        for column in columns:
            if column in self.metrics and column not in self._sums:
                problem = f"{column} is no amount that adds up over rounds."
                raise ShoalError("bad-value", problem, f"Take history.last({column!r}), or the mean of some rounds.")
        return sum(self._sums[c] if c in self._sums else sum(v or 0 for v in self[c]) for c in columns)

    def is_reached(self, target: float) -> bool:
        """Whether the headline of the newest round is as good as a target."""
        value = self.rows[-1].get(self.headline) if self.rows else None
        return value is not None and is_at_least(value, target, self.better)

    def cost_to_target(self, target: float) -> dict[str, float] | None:
        """Rounds, simulated seconds, bytes and MACs until the headline first reached a target; None if it never did."""
        for number, value in enumerate(self[self.headline]):
            if value is not None and is_at_least(value, target, self.better):
                spent = self.cut(number + 1)
                return {
                    "rounds": number + 1,
                    "sim_seconds": spent.total("sim_seconds"),
                    "bytes": spent.total("bytes_down", "bytes_up"),
                    "macs": spent.total("macs_work"),
                }
        return None

    def accuracy_at_budget(self, budget: float, *columns: str) -> float | None:
        """The headline of the last evaluated round until which these columns add up to no more than the budget."""
        newest, spent = None, dict.fromkeys(columns, 0)
        for row in self.rows:
            spent = {c: before + (row.get(c) or 0) for c, before in spent.items()}
            if sum(spent.values()) > budget:
                break
            newest = newest if row.get(self.headline) is None else row[self.headline]
        return newest

    def equals_except_wall_time(self, other: "History") -> bool:
        """Whether two histories agree in every column but wall time."""
        return [drop_wall_time(r) for r in self.rows] == [drop_wall_time(r) for r in other.rows]


def drop_wall_time(row: Row) -> Row:
    """A row without the column that differs between two runs of the same recipe."""
    return {k: v for k, v in row.items() if k != "wall_seconds"}


def encode_row(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def clear_nonfinite_values(row: Row) -> Row:
    """A row as JSON can hold it: None in place of numbers that are not finite."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in row.items()}


def read_history(
    path: Path,
    rounds: int | None = None,
    more_lines: bytes = b"",
    metrics: Mapping[str, Metric] = METRICS,
    headline: str = "accuracy",
) -> History:
    """The first `rounds` rows of a file, or all; an unfinished last line, which a kill leaves, is ignored.

    Where the file has fewer rows, those that follow are taken from `more_lines`, which a checkpoint keeps.
    """
    if not path.exists():
        lines: list[bytes] = []
    else:
        with explain_disk_errors(path):
            lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    if rounds is not None and len(lines) < rounds:
        lines += more_lines.splitlines(keepends=True)[len(lines) :]
    rows = []
    for number, text in enumerate(lines if rounds is None else lines[:rounds]):
        try:
            rows.append(parse_row(text, number, metrics))
        except (ValueError, RecursionError) as error:
            raise damaged_file_error(path, f"line {number + 1}: {error}") from error
    if rounds is not None and len(rows) < rounds:
        raise damaged_file_error(path, f"it has {len(rows)} rows, the checkpoint is of round {rounds}")
    return History(rows, metrics, headline)


def encode_rows(rows: Iterable[Row]) -> bytes:
    """All rows as the lines of a file."""
    return b"".join(map(encode_row, rows))
