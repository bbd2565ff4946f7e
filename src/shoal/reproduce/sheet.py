"""The sheet: figures of a table side by side, as text, Markdown, JSON and CSV."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.reproduce.figures import DEVIATION, ROUNDS, Figure
from shoal.reproduce.metric_readers import (
    BEST_OWN_TESTS,
    EQUAL,
    MEAN_OF_LIST,
    MINUS_FEDAVG,
    OWN_TESTS,
    READERS,
    TIME,
    Value,
    find_reader,
)
from shoal.reproduce.protocol import FAIR
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
COUNTED_ROUNDS = (
    "Published rounds follow from published seconds, which are a constant times rounds for methods "
    "that neither drop nor prune."
)
CHOSEN = (
    "Where the authors took the best of a list by test data, so does the figure here, "
    "and `mean of list` is the mean accuracy of the whole list."
)
ON_OWN_TESTS, TO_TARGET, AT_EQUAL_COST = ", on devices' own tests", ", to the target", ", at equal cost"
"""Behind the name of a column, where it has further sections."""
INTERVAL = "± is half of a 95 % interval of the mean over seeds."
PUBLISHED_SPREAD = "Beside a published figure, ± is the deviation over seeds that the paper gives, and no interval."
EQUAL_COST = (
    "At equal cost every method is read where the cheapest one with its seed ends; "
    "minus FedAvg is the mean of the differences seed by seed."
)
GAP = "A gap is measured minus published. A dash: not measured, or not published. never: the target was not reached."
OWN = (
    "Own tests are those of devices on samples that they keep to test on, with the models that they would use: "
    "over all samples of all devices, the mean over devices, and the mean of the worst tenth of them."
)
SIZES = "Upload is the mean over devices and rounds, in decimal units; its gap is in per cent of what was published."


@dataclass(frozen=True)
class Sheet:
    """What is known of a table so far."""

    table: PaperTable
    scale: str
    seeds: int
    figures: tuple[Figure, ...] = ()

    @property
    def protocol_words(self) -> list[str]:
        """Which protocol it is, what that means, and what the other one is."""
        protocol, other = self.table.protocol, self.table.other_protocol
        names = f"The other one is {other}: --protocol {other}." if other else "It has no protocol of its authors."
        return [f"Protocol: {protocol.name}. {names}", *protocol.words, *self.tuning_words]

    @property
    def tuning_words(self) -> list[str]:
        """Under `fair`, which methods have values that were tuned on validation data."""
        if self.table.protocol.name != FAIR:
            return []
        shown = dict.fromkeys(f.method for f in self.figures if f.seeds)
        tuned = [method for method in shown if method in self.table.tuned]
        others = [method for method in shown if method not in self.table.tuned]
        known = [f"Tuned on validation data: {', '.join(tuned)}."] if tuned else []
        if not others:
            return known
        return [*known, f"Not tuned: {', '.join(others)}." if tuned else "Not tuned: methods have the table's values."]

    @property
    def remarks(self) -> list[str]:
        """Sentences that must stand beside the figures."""
        timed = [f for f in self.figures if f.metric.startswith(TIME) or f.metric == "time_s_local"]
        known = any(f.published is not None for f in self.figures)
        clock = [SECONDS if any(f.published is not None for f in timed) else SIMULATED] if timed else []
        clock = [COUNTED_ROUNDS] if timed and self.table.protocol.clock else clock
        sizes = [SIZES] if any(f.metric == "upload_size" for f in self.figures) else []
        own_tests = [OWN] if any(f.metric in OWN_TESTS for f in self.figures) else []
        chosen = [f"{f.column}, {f.method}: {f.note}." for f in self.figures if f.metric == MEAN_OF_LIST]
        lists = [CHOSEN, *chosen] if chosen else []
        spread = [INTERVAL] if any(f.interval is not None for f in self.figures) else []
        deviations = (f for f in self.figures if f.metric.endswith(DEVIATION) and isinstance(f.published, float))
        spread += [PUBLISHED_SPREAD] if any(deviations) else []
        equal = [EQUAL_COST] if any(is_side_by_side(f.metric) for f in self.figures) else []
        seeds = f"Means over {self.seeds} seeds." if self.seeds > 1 else "One seed."
        own = [MEANINGLESS] if self.scale == "smoke" else []
        missing = [f"{row.method} was not run: {row.missing}" for row in self.missing_rows]
        gap = [GAP] if known else []
        words = [*self.protocol_words, seeds, *spread, *gap, *own_tests, *clock, *sizes, *lists, *equal]
        return [*own, *words, *self.table.notes, *missing]

    @property
    def missing_rows(self) -> list[Any]:
        shown = {f.method for f in self.figures}
        return [row for row in self.table.rows if row.missing and row.method in shown]

    def make_sections(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """For every column: its name, the heads, and one line of texts per method.

        What is too wide for one section has its own: what devices get on their own tests, targets in rounds and in the
        authors' seconds, equal costs.
        """
        for column in self.table.columns:
            sections: dict[str, list[Figure]] = {"": [], ON_OWN_TESTS: [], TO_TARGET: [], AT_EQUAL_COST: []}
            for figure in self.figures:
                if figure.column == column.name:
                    sections[self.pick_section(figure.metric)].append(figure)
            for suffix, figures in sections.items():
                if figures:
                    yield column.name + suffix, *self.make_section(figures)

    def pick_section(self, metric: str) -> str:
        if is_side_by_side(metric):
            return AT_EQUAL_COST
        if metric.removesuffix(DEVIATION) in (*OWN_TESTS, BEST_OWN_TESTS):
            return ON_OWN_TESTS
        return TO_TARGET if self.table.protocol.clock and metric.startswith((TIME, ROUNDS)) else ""

    def make_section(self, figures: list[Figure]) -> tuple[list[str], list[list[str]]]:
        """The heads of these figures, and one line of texts per method."""
        metrics = [m for m in dict.fromkeys(f.metric for f in figures) if not m.endswith(DEVIATION)]
        metrics.sort(key=rank_metric)
        by = {(f.method, f.metric): f for f in figures}
        told = {f.metric for f in figures if f.published is not None}
        shown = {m: count_shown_cells(m, m in told, self.table.protocol.clock is not None) for m in metrics}
        heads = ["method"]
        for metric in metrics:
            heads += [format_head(metric), "paper", "gap"][: shown[metric]]
        lines = []
        for method in dict.fromkeys(f.method for f in figures):
            both = ((k, by.get((method, k)), by.get((method, k + DEVIATION))) for k in metrics)
            parts = (format_figure(main, deviation)[: shown[k]] for k, main, deviation in both)
            lines.append([method, *(text for part in parts for text in part)])
        return heads, lines

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
        about |= {"protocol": self.table.protocol.name, "other_protocol": self.table.other_protocol}
        return about | {"remarks": self.remarks, "figures": [asdict(f) | {"gap": f.gap} for f in self.figures]}

    def to_csv(self) -> str:
        text = io.StringIO()
        heads = ["column", "method", "metric", "published", "measured", "gap", "spread", "interval"]
        heads += ["seeds", "reached", "note"]
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


def is_side_by_side(metric: str) -> bool:
    """Whether a metric compares the methods of a column."""
    return metric == MINUS_FEDAVG or metric.startswith(EQUAL)


def count_shown_cells(metric: str, told: bool, one_clock: bool = False) -> int:
    """How many of measured, published and gap are shown; seconds of two clocks have no gap worth showing."""
    return 1 if not told else 3 if find_reader(metric)[0].gap or one_clock else 2


def format_figure(figure: Figure | None, deviation: Figure | None = None) -> list[str]:
    """Measured, published and gap; a published deviation has a figure of its own."""
    if figure is None:
        return ["-", "-", "-"]
    reader, _ = find_reader(figure.metric)
    largest = max((abs(v) for v in (figure.measured, figure.published) if isinstance(v, float)), default=0.0)
    measured = format_value(figure.measured, figure.metric, reader.sign, largest)
    published = format_value(figure.published, figure.metric, "", largest)
    width = figure.spread if figure.interval is None else figure.interval
    if reader.spread and width is not None:
        measured += f" ± {reader.show(width, '', largest)}"
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
        if not figure.published:
            return "-"
        return f"{round(100 * figure.gap / figure.published, 1) + 0.0:+.1f} %"
    return format_value(figure.gap, figure.metric, "+")


def format_value(value: Value, metric: str, sign: str = "", largest: float = 0.0) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return find_reader(metric)[0].show(value, sign, max(largest, abs(value)))


def escape_markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
