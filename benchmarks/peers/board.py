"""The tables of the speed benchmark, for the terminal and as Markdown, and what they were taken on."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from peers.jobs import cores
from peers.rivals import Contestant


@dataclass
class Score:
    """What is known of a contestant on one job after some repeats."""

    contestant: Contestant
    seconds: list[float] = field(default_factory=list)
    memory: float = 0.0
    reports: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    def add(self, found: dict[str, Any], memory: float) -> None:
        self.reports.append(found)
        self.seconds += found["seconds"]
        self.memory = max(self.memory, memory)

    @property
    def round(self) -> float:
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Rounds per second; where several runs are played together, those of each count."""
        return self.reports[0].get("runs", 1) / self.round

    def middle(self, key: str) -> float | None:
        found = [report[key] for report in self.reports if key in report]
        return median(found) if found else None


def table(scores: Sequence[Score], compute: str) -> list[list[str]]:
    """The cells, the heading first."""
    best = max((score.rate for score in scores if score.contestant.plain and score.seconds), default=None)
    heading = ["contestant", "rounds/s", "ratio", "s a round", "fastest-slowest", "memory, MiB"]
    rows = [[*heading, *(["GPU, MiB"] if compute != "cpu" else []), "remarks"]]
    for score in scores:
        if score.seconds:
            rows.append([*figures(score, best, compute), remarks(score)])
        else:
            rows.append([score.contestant.title, *("-" for _ in rows[0][2:]), score.problem])
    return rows


def figures(score: Score, best: float | None, compute: str) -> list[str]:
    gpu = score.middle("gpu_mib")
    return [
        score.contestant.title,
        f"{score.rate:.3g}",
        f"{score.rate / best:.2f}" if best else "-",
        f"{score.round:.3f}",
        f"{min(score.seconds):.3f}-{max(score.seconds):.3f}",
        f"{score.memory:.0f}",
        *([f"{gpu:.0f}" if gpu else "-"] if compute != "cpu" else []),
    ]


def remarks(score: Score) -> str:
    """The versions, and what only some contestants tell."""
    told = [score.reports[0].get("version", "")]
    if (engine := score.reports[0].get("engine")) is not None:
        told.append(f"chose {engine}")
    if (share := score.middle("evaluation")) is not None:
        told.append(f"evaluation {100 * share:.1f} % of the time")
    if (runs := score.reports[0].get("runs")) is not None:
        told.append(f"seconds of {runs} seeds together")
    if (between := score.middle("between")) is not None and between > 1.02 * score.round:
        told.append(f"{between:.3f} s from row to row")
    if score.problem:
        told.append(score.problem)
    return "; ".join(filter(None, told))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table for the terminal: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if n in (0, last) else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("--:" for _ in rows[0][2:]), "---"]
    lines = (rows[0], rule, *rows[1:])
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in lines)


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    asked = "import torch; print(torch.__version__); print(*{0})"
    names = "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]"
    told = subprocess.run([sys.executable, "-c", asked.format(names)], check=True, capture_output=True, text=True)
    torch, gpus = told.stdout.split("\n")[:2]
    memory = field_of("/proc/meminfo", "MemTotal").split()[0]
    return {
        "processor": f"{field_of('/proc/cpuinfo', 'model name')}, {cores()} cores",
        "memory": f"{int(memory) / 2**20:.0f} GiB",
        "GPU": gpus or "none",
        "software": f"Python {sys.version.split()[0]}, torch {torch}",
        "date": f"{date.today()}, load before the run {os.getloadavg()[0]:.2f}",
    }


def field_of(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "0 unknown"
