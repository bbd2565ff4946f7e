"""Verdicts: whether a claim holds, computed from the runs of a ledger by the rule that the list of claims fixed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean

from shoal.reproduce.claims import (
    Claim,
    EarlierRuns,
    find_table_column,
    find_table_row,
    read_claims,
    read_earlier_runs,
)
from shoal.reproduce.figures import find_published
from shoal.reproduce.intervals import compute_interval
from shoal.reproduce.ledger import LEDGER_SUFFIX, LedgerRun, list_ledger_files, read_ledger_file
from shoal.reproduce.measures import CurveReading, LastRoundsReading, Measure, MeasuredValue
from shoal.reproduce.protocol import AUTHORS, FAIR, LEAST_SEEDS, PROTOCOLS
from shoal.reproduce.table import PaperTable
from shoal.reproduce.table_file import read_table

HOLDS, FAILS, OPEN = "holds", "does not hold", "not settled"
ONLY_AUTHORS = "holds only under the authors' rules"
TOLERANCE = 0.1
"""How far from the published figure a measured one may be for the test `near`."""
MARGIN = 1.0
"""Points that count as no loss for the test `no worse`."""

Values = Mapping[int, MeasuredValue]
"""What the runs of one row gave, by seed."""
CellRuns = Mapping[str, Sequence[Sequence[tuple[str, LedgerRun]]]]
"""By row, for each of its settings (one, where there is no list), its runs and the files that they are from."""


@dataclass(frozen=True)
class Judgement:
    """What the runs of one protocol say about a claim."""

    verdict: str = OPEN
    estimate: float | None = None
    """The mean difference (positive where the claim says so), the logarithm of a ratio, or the mean for `near`."""
    interval: float | None = None
    seeds: int = 0
    against: str = ""
    """The row that it is hardest to be better than, where there are several."""
    why: str = ""
    """Why it is not settled."""
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A claim with its judgements under each protocol, and by runs from before these."""

    claim: Claim
    published: Mapping[str, float]
    fair: Judgement
    authors: Judgement
    earlier: Judgement
    differs: str = ""
    page: str = ""

    @property
    def is_by_earlier_runs(self) -> bool:
        """Whether runs from before the protocols decide, because there are no others."""
        return not (self.fair.seeds or self.authors.seeds) and self.earlier.verdict != OPEN

    @property
    def text(self) -> str:
        """The verdict, as the list of claims words it."""
        if self.is_by_earlier_runs:
            return self.earlier.verdict
        if self.fair.verdict == FAILS and self.authors.verdict == HOLDS:
            return ONLY_AUTHORS
        return self.fair.verdict

    @property
    def why(self) -> str:
        """Why a claim waits; "" where it does not."""
        return (self.fair.why if self.fair.seeds else self.earlier.why or self.fair.why) if self.text == OPEN else ""


def judge_claims(folder: Path, table: str = "") -> list[Verdict]:
    """The verdict on every claim of a ledger, or on those about one table."""
    files = {file.name.removesuffix(LEDGER_SUFFIX): read_ledger_file(file) for file in list_ledger_files(folder)}
    earlier = read_earlier_runs(folder)
    claims = [claim for claim in read_claims(folder) if table in ("", claim.table)]
    return [judge_claim(claim, files, earlier) for claim in claims]


def judge_claim(claim: Claim, files: Mapping[str, Sequence[LedgerRun]], earlier: Iterable[EarlierRuns] = ()) -> Verdict:
    """The verdict on one claim, from the runs of a ledger by file."""
    table = read_table(claim.table)
    published = {row: value for row in claim.rows if (value := find_published_value(claim, table, row)) is not None}
    judged = {}
    for protocol in PROTOCOLS:
        if protocol == AUTHORS and table.authors is None:
            judged[protocol] = Judgement(why="the authors' rules are not known")
            continue
        own = table.apply_protocol(protocol)
        judged[protocol] = judge_runs(claim, published, find_cell_runs(claim, own, protocol, files), own, protocol)
    known = [e for e in earlier if claim.table in e.tables and e.column == claim.column and claim.row in e.runs]
    best = max(known, key=lambda e: len(e.runs.keys() & set(claim.rows)), default=None)
    runs = find_earlier_runs(best, files) if best else {}
    told = (best.differs, best.page) if best else ("", "")
    return Verdict(claim, published, judged[FAIR], judged[AUTHORS], judge_runs(claim, published, runs, table), *told)


def pick_reading(table: PaperTable, column: str, row: str, protocol: str) -> CurveReading:
    """How the curves of a cell are read under a protocol; "" for runs from before these."""
    if not protocol:
        return LastRoundsReading()
    return table.make_reading(find_table_column(table, column), find_table_row(table, row))


def find_published_value(claim: Claim, table: PaperTable, row: str) -> float | None:
    """The published figure of one row of a claim."""
    figures = find_published(table, find_table_column(table, claim.column), find_table_row(table, row))
    return claim.measure.find_published(figures)


def find_cell_runs(
    claim: Claim, table: PaperTable, protocol: str, files: Mapping[str, Sequence[LedgerRun]]
) -> CellRuns:
    """By row, the runs of a protocol that are those of the claim's cells, with their files; a list for each setting.

    Runs that were broken off are among them where they show what is measured, or where there are no others.
    """
    column, found, pairs = find_table_column(table, claim.column), {}, list_runs(files, protocol)
    for name in claim.rows:
        row, settings = find_table_row(table, name), []
        for number, _ in enumerate(row.list_choices(column)):
            recipe = table.make_recipe(column, row, "full", {}, number)
            own = [(file, run) for file, run in pairs if run.is_of(recipe.with_values(seed=run.seed))]
            useful = [(file, run) for file, run in own if is_readable(claim.measure, run, recipe.rounds)]
            settings.append([(file, run.keep_metrics(recipe.metrics)) for file, run in useful or own])
        if settings and all(settings):
            found[name] = settings
    return found


def list_runs(files: Mapping[str, Sequence[LedgerRun]], protocol: str) -> list[tuple[str, LedgerRun]]:
    """The runs of a protocol with the files that they are from."""
    return [(file, run) for file, known in files.items() for run in known if run.protocol == protocol]


def is_readable(measure: Measure, run: LedgerRun, rounds: int) -> bool:
    """Whether a run shows what is measured, of which whole runs have so many rounds."""
    return len(run.rows) >= rounds or (measure.is_known_early is not None and measure.is_known_early(run))


def find_earlier_runs(earlier: EarlierRuns, files: Mapping[str, Sequence[LedgerRun]]) -> CellRuns:
    """By row, the runs from before the protocols that stand for it, with their files."""
    return {
        row: [[(file, run) for run in files[file] if run.method == method]]
        for row, (file, method) in earlier.runs.items()
    }


def judge_runs(
    claim: Claim,
    published: Mapping[str, float],
    runs: CellRuns,
    table: PaperTable,
    protocol: str = "",
) -> Judgement:
    """What some runs say about a claim; all of them are read up to the last round that every one has."""
    absent = [row for row in claim.rows if row not in runs]
    if claim.row in absent or len(absent) == len(claim.than) > 0:
        return Judgement(why=describe_absent(absent))
    recipe = table.make_recipe(find_table_column(table, claim.column), find_table_row(table, claim.row), "full", {})
    everything = [pair for row in claim.rows for setting in runs.get(row, ()) for pair in setting]
    shortest = min(len(run.rows) for _, run in everything)
    is_cut = not all(is_readable(claim.measure, run, recipe.rounds) for _, run in everything)
    rounds = min(shortest, recipe.rounds) if claim.measure.is_known_early is None else None
    values: dict[str, dict[int, MeasuredValue]] = {}
    for row in claim.rows:
        reading = pick_reading(table, claim.column, row, protocol)
        settings = []
        for setting in runs.get(row, ()):
            read = {run.seed: claim.measure.read(run.cut(rounds), recipe.target, reading) for _, run in setting}
            settings.append({seed: value for seed, value in read.items() if value is not None})
        values[row] = pick_best_setting(settings, claim.test)
    files = tuple(dict.fromkeys(file for file, _ in everything))
    judged = replace(judge_values(claim, values, published), files=files)
    if is_cut and judged.seeds:
        return replace(judged, verdict=OPEN, why=f"{shortest} of {recipe.rounds} rounds")
    untold = [row for row in claim.than if row in runs and not values[row]]
    if (absent or untold) and judged.verdict == HOLDS:
        why = describe_absent(absent) if absent else f"the runs of {untold[0]} do not have this figure"
        return replace(judged, verdict=OPEN, why=why)
    return judged


def pick_best_setting(settings: Sequence[dict[int, MeasuredValue]], test: str) -> dict[int, MeasuredValue]:
    """Of a list of settings the one with the best mean, as authors chose who looked at test data."""
    measured = [values for values in settings if values]
    sign = -1 if test == "lower" else 1
    return max(measured, key=lambda values: sign * mean(v.value for v in values.values()), default={})


def judge_values(claim: Claim, values: Mapping[str, Values], published: Mapping[str, float]) -> Judgement:
    """The verdict by the values of every row: beside the published figure, or beside each of the other rows."""
    own = values[claim.row]
    if claim.test == "near":
        return judge_nearness([v.value for v in own.values() if v.complete], published.get(claim.row))
    judged = []
    for other in claim.than:
        if values.get(other):
            gap = find_published_gap(claim.measure, claim.test, published.get(claim.row), published.get(other))
            judged.append(judge_difference(claim, own, values[other], gap, other))
    if not judged:
        return Judgement(why="the runs do not have this figure")
    worst = min(judged, key=lambda j: (j.estimate is None, j.estimate))
    verdicts = {j.verdict for j in judged}
    if FAILS in verdicts:
        return next(j for j in sorted(judged, key=lambda j: j.estimate or 0.0) if j.verdict == FAILS)
    return worst if verdicts == {HOLDS} else next(j for j in judged if j.verdict == OPEN)


def judge_nearness(values: Sequence[float], published: float | None) -> Judgement:
    """Whether the mean lies within a tenth of the published figure."""
    if not values or published is None:
        return Judgement(why="the runs do not have this figure" if not values else "nothing legible was published")
    estimate, interval = mean(values), compute_interval(values)
    if len(values) < LEAST_SEEDS:
        return Judgement(OPEN, estimate, interval, len(values), why=describe_seeds(len(values)))
    is_near = abs(estimate - published) <= TOLERANCE * published
    return Judgement(HOLDS if is_near else FAILS, estimate, interval, len(values))


def judge_difference(claim: Claim, own: Values, other: Values, gap: float | None, name: str) -> Judgement:
    """Whether one row is better than another by the seeds that both have; `gap` is the published advantage."""
    pairs = [(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())]
    decided = [(a, b) for a, b in pairs if a.complete or b.complete]
    gains = [find_pair_advantage(claim, a, b) for a, b in decided]
    if not gains:
        return Judgement(seeds=len(pairs), against=name, why="no run reached the target" if pairs else "no common seed")
    estimate, interval = mean(gains), compute_interval(gains)
    if len(gains) < LEAST_SEEDS or interval is None:
        why = describe_seeds(len(gains)) if len(gains) == len(pairs) else "the target was reached too seldom"
        return Judgement(OPEN, estimate, interval, len(gains), name, why)
    low, high = estimate - interval, estimate + interval
    if claim.test == "no worse":
        verdict = HOLDS if low > -MARGIN else FAILS if high < -MARGIN else OPEN
        why = "" if verdict != OPEN else "the interval holds a loss of a point"
    else:
        verdict = HOLDS if low > 0 else FAILS if high < (0 if gap is None else gap) else OPEN
        both = "the interval holds 0" if gap is None else "the interval holds both 0 and what was published"
        why = "" if verdict != OPEN else both
    return Judgement(verdict, estimate, interval, len(gains), name, why)


def find_pair_advantage(claim: Claim, own: MeasuredValue, other: MeasuredValue) -> float:
    """The advantage with one seed; a run that never reached its target has none over one that did."""
    gain = find_advantage(claim.measure, claim.test, own.value, other.value)
    return gain if own.complete else min(gain, 0.0)


def find_advantage(measure: Measure, test: str, own: float, other: float) -> float:
    """By how much a value is better than another: a difference, or the logarithm of a ratio."""
    sign = -1 if test == "lower" else 1
    if measure.is_ratio:
        return sign * (log(own) - log(other))
    return sign * (own - other)


def find_published_gap(measure: Measure, test: str, own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else find_advantage(measure, test, own, other)


def describe_absent(rows: Sequence[str]) -> str:
    return f"no runs of {', '.join(rows) if len(rows) <= 3 else f'{len(rows)} methods'}"


def describe_seeds(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def format_advantage(claim: Claim, estimate: float, interval: float | None = None) -> str:
    """An advantage as the claim has it: points with their sign, or how many times as much."""
    if claim.test == "near":
        text = claim.measure.format_value(estimate)
        return text if interval is None else f"{text} ± {claim.measure.format_value(interval)}"
    sign = -1 if claim.test == "lower" else 1
    if claim.measure.is_ratio:
        ends = sorted(exp(sign * (estimate + side * (interval or 0.0))) for side in (-1, 1))
        return f"x {exp(sign * estimate):.2f}" + ("" if interval is None else f" ({ends[0]:.2f} to {ends[1]:.2f})")
    text = claim.measure.format_value(sign * estimate, "+")
    return text if interval is None else f"{text} ± {claim.measure.format_value(interval)}"
