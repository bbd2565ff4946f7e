"""The last section of a method's page: what the runs in results/ say of it, as a curve and a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import mean

from ledger import FOLDER, format_command, format_interval, read_runs
from markers import ROOT, format_table, list_sections
from svg_files import plt, save_svg

from shoal.display.curve_style import COLOURS
from shoal.plugins.load import load_method
from shoal.reproduce.ledger import LEDGER_SUFFIX, LedgerRun, list_ledger_files, make_run_key, read_ledger

METHOD_PAGES = ROOT / "docs/methods"
METHOD_PICTURES = ROOT / "docs/pictures/methods"
SECTION = "results of"
WINDOW = 20
"""Rounds of the running mean that is drawn and told."""
CORNERS = 100
"""Points of a curve; more cannot be seen."""


@dataclass(frozen=True)
class Experiment:
    """The runs of a method in one setting of one file of the ledger, and FedAvg's there."""

    file: str
    method: str
    runs: Sequence[LedgerRun]
    base: Sequence[LedgerRun]

    @cached_property
    def setting(self) -> str:
        return describe_setting(self.runs[0]) + (", again" if self.file.endswith("-again") else "")

    @cached_property
    def until(self) -> int:
        """The last round that all runs have."""
        return min(len(run.rows) for run in (*self.runs, *self.base))


@cache
def find_experiments() -> dict[str, list[Experiment]]:
    """By method page, what there is to tell: a run belongs to the page of its method, or of each of two parts."""
    found: dict[str, list[Experiment]] = {}
    for file in list_ledger_files(FOLDER):
        name = file.name.removesuffix(LEDGER_SUFFIX)
        groups: dict[str, dict[str, list[LedgerRun]]] = {}
        judged = [run for run in read_runs(name) if has_curve(run)]
        for run in sorted(judged, key=lambda run: run.seed):
            groups.setdefault(describe_setting(run), {}).setdefault(run.method, []).append(run)
        for methods in groups.values():
            for method, runs in methods.items():
                for page in list_pages(method):
                    base = methods.get("fedavg") or find_base_elsewhere(runs)
                    found.setdefault(page, []).append(Experiment(name, method, runs, base))
    return {page: experiments for page, experiments in found.items() if page != "fedavg"}


def has_curve(run: LedgerRun) -> bool:
    """Whether a run was looked at more than once, and on the test half; a tuning looks at validation samples."""
    looks = sum(row.get("accuracy") is not None for row in run.rows)
    return looks > 1 and not run.parsed_recipe.validation


def find_base_elsewhere(runs: Sequence[LedgerRun]) -> list[LedgerRun]:
    """FedAvg with the same recipes, seeds and protocol in another file, for as long; none where one is missing."""
    found = []
    for run in runs:
        key = make_run_key(run.parsed_recipe.with_values(method="fedavg"))
        found += [b for b in find_runs_by_key().get((key, run.protocol), ())[:1] if len(b.rows) >= len(run.rows)]
    return found if len(found) == len(runs) else []


@cache
def find_runs_by_key() -> dict[tuple[str, str], list[LedgerRun]]:
    """By key and protocol, the runs of all files; of several the longest first."""
    by_key: dict[tuple[str, str], list[LedgerRun]] = {}
    for run in read_ledger(FOLDER):
        by_key.setdefault((run.key, run.protocol), []).append(run)
    return {key: sorted(runs, key=lambda run: -len(run.rows)) for key, runs in by_key.items()}


def list_pages(method: str) -> list[str]:
    """The pages of methods that a run belongs to."""
    if (METHOD_PAGES / f"{method}.md").exists():
        return [method]
    names = [part.name() for part in load_method(method, ()).parts]
    return names if len(names) <= 2 else []


def describe_setting(run: LedgerRun) -> str:
    recipe = run.parsed_recipe
    rules = f", protocol {run.protocol}" if run.protocol else ""
    return f"{recipe.data}, {recipe.model}, {recipe.split}, {recipe.sample} of {recipe.devices} devices{rules}"


# pages ----------------------------------------------------------------------------------------------------------------
def add_sections(pages: Mapping[Path, str]) -> dict[Path, str]:
    """The pages; those of methods that have runs and no section for them get one at their end."""
    added = dict(pages)
    for name in find_experiments():
        place = METHOD_PAGES / f"{name}.md"
        if f"{SECTION} {name}" not in list_sections(pages[place]):
            added[place] += f"\n## Runs in the ledger\n\n<!-- generated: {SECTION} {name} -->\n<!-- end -->\n"
    return added


def write_section(page: str) -> str:
    """The curve, a line for each experiment, and the commands."""
    rows = []
    for experiment in find_experiments()[page]:
        until = experiment.until
        cells = [experiment.setting, f"`{experiment.method}`", str(until)]
        cells += [format_accuracy(runs, until) for runs in (experiment.runs, experiment.base)]
        sent, work = (measure(experiment.runs, until) for measure in (mean_bytes, mean_work))
        cells.append(f"{sent / 1e9:.2f}" if sent >= 1e9 else f"{sent / 1e9:.3f}")
        if experiment.base:
            cells += [
                f"{sent / mean_bytes(experiment.base, until):.2f}",
                f"{work / mean_work(experiment.base, until):.2f}",
            ]
        rows.append([*cells, *[""] * (8 - len(cells))])
    head = ["setting", "method", "round", "accuracy", "FedAvg's", "GB", "times FedAvg's", "work, times FedAvg's"]
    picture = f"![Accuracy by rounds and by bytes](../pictures/methods/{page}.svg)\n"
    untuned = any(map(is_of_all_methods, find_experiments()[page]))
    told = (
        f"Accuracy in per cent: the mean of the last {WINDOW} rounds, over seeds, with its 95 % interval. GB are of "
        "all devices, both ways; work is that of devices. "
        + ("On digits every method has its defaults: that says what it costs, not how good it is. " * untuned)
        + "The commands, for the files in `results/`:\n"
    )
    methods: dict[str, set[str]] = {}
    for experiment in find_experiments()[page]:
        methods.setdefault(experiment.file, {"fedavg"}).add(experiment.method)
    commands = "\n".join(
        format_command(file, methods=methods[file]).replace("```sh\n", f"```sh\n# {file}\n") for file in sorted(methods)
    )
    return f"{picture}\n{format_table(head, rows, numbers_from=2)}\n{told}\n{commands}"


def format_accuracy(runs: Sequence[LedgerRun], until: int) -> str:
    values = [run.mean_accuracy(until, WINDOW) for run in runs]
    return format_interval(values) if len(values) > 1 else "".join(f"{value:.2f}" for value in values)


def mean_bytes(runs: Sequence[LedgerRun], until: int) -> float:
    return mean(run.total_bytes(until) for run in runs)


def mean_work(runs: Sequence[LedgerRun], until: int) -> float:
    return mean(sum(row["macs_work"] for row in run.rows[:until]) for run in runs)


def is_of_all_methods(experiment: Experiment) -> bool:
    """Whether the runs are of `record_all_methods.py`, in which every method has its defaults."""
    return experiment.file.startswith("all-methods")


# pictures -------------------------------------------------------------------------------------------------------------
def draw_page(page: str) -> str:
    """The longest runs of a method beside FedAvg's, by rounds and by bytes, as the text of an SVG file.

    Runs of all methods on digits are drawn where there are no others.
    """
    shown = max(find_experiments()[page], key=lambda one: (bool(one.base), not is_of_all_methods(one), one.until))
    is_large = max(run.total_bytes() for run in (*shown.base, *shown.runs)) >= 1e9
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained", sharey=True)
    for axis, by_bytes in zip(axes, (False, True)):
        for colour, label, runs in zip(COLOURS, ("fedavg", shown.method), (shown.base, shown.runs)):
            if runs:
                draw_curve(axis, runs, label, colour, (1e9 if is_large else 1e6) * by_bytes)
        axis.set_xlabel(f"{'GB' if is_large else 'MB'}, both ways" if by_bytes else "rounds")
        axis.legend(frameon=False, loc="lower right")
    axes[0].set_ylabel("accuracy in per cent")
    figure.suptitle(shown.setting, fontsize=9)
    return save_svg(figure)


def draw_curve(axis, runs: Sequence[LedgerRun], label: str, colour: str, unit: float) -> None:
    """The running mean of the accuracy: the mean of the runs, between the lowest and the highest of them.

    It is drawn over so many bytes as the unit has, or over rounds where the unit is 0.
    """
    last = min(len(run.rows) for run in runs)
    first = min(WINDOW, last)
    rounds = sorted({first + (last - first) * i // CORNERS for i in range(CORNERS + 1)})
    curves = [[run.mean_accuracy(n, WINDOW) for n in rounds] for run in runs]
    x = [mean(run.total_bytes(n) for run in runs) / unit for n in rounds] if unit else rounds
    axis.plot(x, [mean(values) for values in zip(*curves)], color=colour, label=label)
    if len(runs) > 1:
        low, high = ([pick(values) for values in zip(*curves)] for pick in (min, max))
        axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
