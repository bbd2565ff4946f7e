"""The sheet: figures of a table side by side, as text, Markdown, JSON and CSV."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.files import write_bytes
from shoal.tables.figures import TIME, Figure, Value
from shoal.tables.table import Table

MEANINGLESS = (
    "This is the scale smoke: two rounds or so, on noise where the data would have to be downloaded. "
    "It shows that every cell runs; its figures mean nothing."
)
SECONDS = (
    "Published seconds are real ones on the authors' machines, measured ones are simulated: "
    "compare them within a column, method by method, never with each other."
)
SIMULATED = "Seconds are simulated."
GAP = "A gap is measured minus published. A dash: not measured, or not published. never: the target was not reached."
HEADS = {"acc": "accuracy", "mflops": "M MACs"}


@dataclass(frozen=True)
class Sheet:
    """What is known of a table so far."""

    table: Table
    scale: str
    seeds: int
    figures: tuple[Figure, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """Sentences that must stand beside the figures."""
        timed = [f for f in self.figures if f.metric.startswith(TIME)]
        known = any(f.published is not None for f in self.figures)
        clock = [SECONDS if known else SIMULATED] if timed else []
        seeds = f"Means over {self.seeds} seeds." if self.seeds > 1 else "One seed."
        own = [MEANINGLESS] if self.scale == "smoke" else []
        missing = [f"{row.method} was not run: {row.missing}" for row in self.missing]
        return [*own, seeds, *([GAP] if known else []), *clock, *self.table.notes, *missing]

    @property
    def missing(self) -> list[Any]:
        shown = {f.method for f in self.figures}
        return [row for row in self.table.rows if row.missing and row.method in shown]

    def sections(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """For every column: its name, the heads, and one line of texts per method."""
        for column in self.table.columns:
            own = [f for f in self.figures if f.column == column.name]
            metrics = dict.fromkeys(f.metric for f in sorted(own, key=lambda f: order(f.metric)))
            by = {(f.method, f.metric): f for f in own}
            told = {f.metric for f in own if f.published is not None}
            heads = ["method"]
            for metric in metrics:
                heads += [head_of(metric), "paper", "gap"][: cells(metric, metric in told)]
            methods = dict.fromkeys(f.method for f in own)
            lines = [[m, *(t for k in metrics for t in texts(by.get((m, k)))[: cells(k, k in told)])] for m in methods]
            if lines:
                yield column.name, heads, lines

    def markdown(self) -> str:
        parts = [f"# {escaped(self.table.heading)}", "\n".join(f"- {escaped(remark)}" for remark in self.remarks)]
        for name, heads, lines in self.sections():
            rule = ["---", *["---:"] * (len(heads) - 1)]
            rows = ["| " + " | ".join(map(escaped, cells)) + " |" for cells in (heads, *lines)]
            parts += [f"## {escaped(name)}", "\n".join([rows[0], "|" + "|".join(rule) + "|", *rows[1:]])]
        return "\n\n".join(parts) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        about = {"table": self.table.name, "title": self.table.heading, "scale": self.scale, "seeds": self.seeds}
        return about | {"remarks": self.remarks, "figures": [asdict(f) | {"gap": f.gap} for f in self.figures]}

    def csv(self) -> str:
        text = io.StringIO()
        heads = ["column", "method", "metric", "published", "measured", "gap", "spread", "seeds", "reached", "note"]
        writer = csv.DictWriter(text, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.to_dict()["figures"])
        return text.getvalue()

    def write(self, folder: Path) -> None:
        write_bytes(folder / "table.md", self.markdown().encode())
        write_bytes(folder / "table.csv", self.csv().encode())
        write_bytes(folder / "table.json", json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())


def order(metric: str) -> int:
    """Accuracy, then seconds, then operations, then the rest."""
    return 0 if metric == "acc" else 1 if metric.startswith(TIME) else 2 if metric == "mflops" else 3


def head_of(metric: str) -> str:
    return f"s to {metric.removeprefix(TIME)}" if metric.startswith(TIME) else HEADS.get(metric, metric)


def cells(metric: str, told: bool) -> int:
    """How many of measured, published and gap are shown; seconds of two clocks have no gap worth showing."""
    return 1 if not told else 2 if metric.startswith(TIME) else 3


def texts(figure: Figure | None) -> list[str]:
    """Measured, published and gap."""
    if figure is None:
        return ["-", "-", "-"]
    metric, own = figure.metric, shown(figure.measured, figure.metric)
    if metric == "acc" and figure.spread is not None:
        own += f" ± {figure.spread:.3f}"
    if metric.startswith(TIME) and 0 < figure.reached < figure.seeds:
        own += f" ({figure.reached}/{figure.seeds})"
    return [own, shown(figure.published, metric), shown(figure.gap, metric, "+")]


def shown(value: Value, metric: str, sign: str = "") -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    digits = 0 if metric.startswith(TIME) and abs(value) >= 100 else 3
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
