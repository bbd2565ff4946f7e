"""The sheet: figures of a table side by side, as text, Markdown, JSON and CSV."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.reproduce.figures import DEVIATION, Figure
from shoal.reproduce.metric_readers import READERS, Value, find_reader
from shoal.reproduce.table import PaperTable
from shoal.storage.files import write_bytes

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
SIZES = "Upload is the mean over devices and rounds, in decimal units; its gap is in per cent of what was published."


@dataclass(frozen=True)
class Sheet:
    """What is known of a table so far."""

    table: PaperTable
    scale: str
    seeds: int
    figures: tuple[Figure, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """Sentences that must stand beside the figures."""
        timed = [f for f in self.figures if not find_reader(f.metric)[0].gap]
        known = any(f.published is not None for f in self.figures)
        clock = [SECONDS if any(f.published is not None for f in timed) else SIMULATED] if timed else []
        sizes = [SIZES] if any(f.metric == "upload_size" for f in self.figures) else []
        seeds = f"Means over {self.seeds} seeds." if self.seeds > 1 else "One seed."
        own = [MEANINGLESS] if self.scale == "smoke" else []
        missing = [f"{row.method} was not run: {row.missing}" for row in self.missing_rows]
        return [*own, seeds, *([GAP] if known else []), *clock, *sizes, *self.table.notes, *missing]

    @property
    def missing_rows(self) -> list[Any]:
        shown = {f.method for f in self.figures}
        return [row for row in self.table.rows if row.missing and row.method in shown]

    def make_sections(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """For every column: its name, the heads, and one line of texts per method."""
        for column in self.table.columns:
            own = [f for f in self.figures if f.column == column.name]
            metrics = [m for m in dict.fromkeys(f.metric for f in own) if not m.endswith(DEVIATION)]
            metrics.sort(key=rank_metric)
            by = {(f.method, f.metric): f for f in own}
            told = {f.metric for f in own if f.published is not None}
            heads = ["method"]
            for metric in metrics:
                heads += [format_head(metric), "paper", "gap"][: count_shown_cells(metric, metric in told)]
            methods = dict.fromkeys(f.method for f in own)
            lines = []
            for method in methods:
                both = ((k, by.get((method, k)), by.get((method, k + DEVIATION))) for k in metrics)
                parts = (
                    format_figure(main, deviation)[: count_shown_cells(k, k in told)] for k, main, deviation in both
                )
                lines.append([method, *(text for part in parts for text in part)])
            if lines:
                yield column.name, heads, lines

    def to_markdown(self) -> str:
        parts = [
            f"# {escape_markdown(self.table.heading)}",
            "\n".join(f"- {escape_markdown(remark)}" for remark in self.remarks),
        ]
        for name, heads, lines in self.make_sections():
            rule = ["---", *["---:"] * (len(heads) - 1)]
            rows = ["| " + " | ".join(map(escape_markdown, cells)) + " |" for cells in (heads, *lines)]
            parts += [f"## {escape_markdown(name)}", "\n".join([rows[0], "|" + "|".join(rule) + "|", *rows[1:]])]
        return "\n\n".join(parts) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        about = {"table": self.table.name, "title": self.table.heading, "scale": self.scale, "seeds": self.seeds}
        return about | {"remarks": self.remarks, "figures": [asdict(f) | {"gap": f.gap} for f in self.figures]}

    def to_csv(self) -> str:
        text = io.StringIO()
        heads = ["column", "method", "metric", "published", "measured", "gap", "spread", "seeds", "reached", "note"]
        writer = csv.DictWriter(text, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.to_dict()["figures"])
        return text.getvalue()

    def write(self, folder: Path) -> None:
        write_bytes(folder / "table.md", self.to_markdown().encode())
        write_bytes(folder / "table.csv", self.to_csv().encode())
        write_bytes(folder / "table.json", json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())


def rank_metric(metric: str) -> int:
    """As the readers are listed, then the rest."""
    return next((at for at, reader in enumerate(READERS.values()) if reader is find_reader(metric)[0]), len(READERS))


def format_head(metric: str) -> str:
    """A target is of the accuracy that stands beside it, so it need not say of which."""
    reader, rest = find_reader(metric)
    return reader.head.replace("{}", rest.removeprefix("top3_"))


def count_shown_cells(metric: str, told: bool) -> int:
    """How many of measured, published and gap are shown; seconds of two clocks have no gap worth showing."""
    return 1 if not told else 3 if find_reader(metric)[0].gap else 2


def format_figure(figure: Figure | None, deviation: Figure | None = None) -> list[str]:
    """Measured, published and gap; a published deviation has a figure of its own."""
    if figure is None:
        return ["-", "-", "-"]
    reader, _ = find_reader(figure.metric)
    largest = max((abs(v) for v in (figure.measured, figure.published) if isinstance(v, float)), default=0.0)
    measured, published = (
        format_value(value, figure.metric, "", largest) for value in (figure.measured, figure.published)
    )
    if reader.spread and figure.spread is not None:
        measured += f" ± {reader.show(figure.spread, '', largest)}"
    if deviation is not None and isinstance(deviation.published, float):
        published += f" ± {reader.show(deviation.published, '', largest)}"
    if reader.has_target and 0 < figure.reached < figure.seeds:
        measured += f" ({figure.reached}/{figure.seeds})"
    return [measured, published, format_gap(figure)]


def format_gap(figure: Figure) -> str:
    """The gap in the metric's own unit, or in per cent of what was published."""
    if (
        figure.gap is not None
        and isinstance(figure.published, float)
        and find_reader(figure.metric)[0].gap == "per cent"
    ):
        return f"{100 * figure.gap / figure.published:+.1f} %" if figure.published else "-"
    return format_value(figure.gap, figure.metric, "+")


def format_value(value: Value, metric: str, sign: str = "", largest: float = 0.0) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return find_reader(metric)[0].show(value, sign, max(largest, abs(value)))


def escape_markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
