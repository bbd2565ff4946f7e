"""The command `tune`, and what it prints: what was tried, which settings won, and the commands that run them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shoal.cli.common_flags import Json, Log, Quiet, Sets, Workers
from shoal.cli.comparison_tables import make_comparison_table
from shoal.cli.console import make_console
from shoal.cli.progress import Progress, combine_watchers, hide_finished_bars
from shoal.cli.recipe_flags import resolve_recipe
from shoal.core.errors import ShoalError
from shoal.display.quantities import format_number

if TYPE_CHECKING:
    from shoal.compare.tuning import Tuning


def tune_command(
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help="Methods, in quotes where they have brackets.")
    ],
    over: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUES", help="What is tried: lr=log:0.001:1, momentum=uniform:0:0.9, fedprox.mu=0.01,0.1."
        ),
    ],
    tries: Annotated[
        int, typer.Option(help="Tries of each method; 0: a whole grid, or 8 draws from ranges.", min=0, max=10_000)
    ] = 0,
    seeds: Annotated[int, typer.Option(help="Seeds per try.", min=1, max=1000)] = 1,
    sampler: Annotated[
        str, typer.Option(help="Who proposes tries: random, grid, or, by results, tpe or gp of shoal\\[tune].")
    ] = "random",
    pruner: Annotated[
        str, typer.Option(help="Give hopeless tries up early: none, median, or halving, which is fair by rounds.")
    ] = "none",
    side_by_side: Annotated[
        int, typer.Option(metavar="N", help="Tries that tpe and gp propose at a time.", min=1, max=1000)
    ] = 4,
    final_seeds: Annotated[
        int, typer.Option(metavar="N", help="Run winners on the test half, with N fresh seeds.", min=0, max=1000)
    ] = 0,
    workers: Workers = 0,
    file: Annotated[Path | None, typer.Option("--recipe", help="A recipe; flags go over it.")] = None,
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    log: Log = None,
    *,
    given: dict[str, Any],
) -> None:
    """Find good values for methods, each with the same number of tries, on validation data alone."""
    if "method" in given:
        raise ShoalError("bad-value", "tune has no --method.", "List the methods: shoal tune fedavg fedprox.")
    from shoal.compare.tuning import run_tuning
    from shoal.compare.tuning_spec import TuningSpec

    recipe = resolve_recipe(file, sets, given, [text.partition("=")[0].strip() for text in over])
    spec = TuningSpec(
        tuple(methods), recipe, tuple(over), tries, seeds, sampler, pruner, side_by_side, final_seeds
    )  # fmt: skip
    varied = [key for key in spec.space if "." not in key]
    with Progress(quiet or as_json, False, runs=2, varied=varied, quiet=quiet) as progress:
        watch = combine_watchers(progress, log) if log or as_json or quiet else hide_finished_bars(progress)
        tuning = run_tuning(spec, watch, workers)
    print_tuning(tuning, quiet, as_json)


def resume_tuning_folder(folder: Path, changes: dict[str, Any], workers: int, quiet: bool, as_json: bool) -> None:
    """Go on with the tuning of a folder, and print what came of it."""
    from shoal.compare.tuning import resume_tuning

    with Progress(quiet or as_json, False, runs=2, quiet=quiet) as progress:
        watch = progress.show_row if as_json or quiet else hide_finished_bars(progress)
        tuning = resume_tuning(folder, watch, changes, workers)
    print_tuning(tuning, quiet, as_json)


def print_tuning(tuning: "Tuning", quiet: bool, as_json: bool) -> None:
    """Print the tries of every method, the best first, and the command that runs the winner."""
    from shoal.compare.tuning import LAST_EVALUATIONS
    from shoal.runs.recipe_data import describe_validation_samples

    if as_json:
        return typer.echo(json.dumps(tuning.to_dict()))
    if quiet:
        return
    console, spec = make_console(), tuning.spec
    for method in tuning.tries:
        console.print(make_tuning_table(tuning, method))
    chosen = describe_validation_samples(spec.recipe)
    share, seeds = f"{100 * spec.recipe.validation:g} %", f"{spec.seeds} seed{'s' if spec.seeds > 1 else ''}"
    console.print(
        f"Mean {tuning.headline} of the last {LAST_EVALUATIONS} evaluations on {share} of the training samples, "
        f"{chosen}; {spec.tries} tries of each method, {seeds}. The test half was not looked at"
        + (" to choose them." if tuning.final else "."),
        highlight=False,
        soft_wrap=True,
    )
    for method in tuning.tries:
        if tuning.find_best(method) is None:
            console.print(f"{method}: every try diverged.", highlight=False)
            continue
        for key in tuning.list_edges(method):
            note = f"{method}: the best {key} is at the edge of what was tried; a better one may lie beyond."
            console.print(note, highlight=False, soft_wrap=True)
        console.print(tuning.format_command(method), highlight=False, soft_wrap=True)
    if spec.pruner != "none":
        rounds = ", ".join(f"{method} {tuning.count_rounds(method)}" for method in tuning.tries)
        console.print(f"Rounds played to choose: {rounds}.", highlight=False, soft_wrap=True)
    if tuning.final:
        last = spec.recipe.seed + spec.seeds
        console.print(make_comparison_table(tuning.final))
        text = f"The winners on the test half, all training samples, seeds {last} to {last + spec.final_seeds - 1}."
        console.print(text, highlight=False, soft_wrap=True)


def make_tuning_table(tuning: "Tuning", method: str) -> Table:
    """The tries of one method, the best first; the winner is bold."""
    table = Table(title=Text(method), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    keys = list(tuning.spec.spaces[method])
    for head in ("try", *keys, f"validation {tuning.headline}"):
        table.add_column(head, justify="right", no_wrap=True)
    best, sign = tuning.find_best(method), -1 if tuning.better == "up" else 1
    ranked = sorted(
        enumerate(tuning.tries[method]),
        key=lambda pair: (pair[1].score is None, -pair[1].rounds, sign * (pair[1].score or 0.0)),
    )
    for number, tried in ranked:
        spread = f" ± {tried.spread:.3f}" if tried.spread is not None else ""
        score = "diverged" if tried.score is None else format_number(tried.score, 3) + spread
        score += f", given up after {tried.rounds}" if tried.is_stopped else ""
        settings = tried.told_settings
        cells = [str(number), *(str(settings[key]) for key in keys), score]
        table.add_row(*(Text(cell, style="bold" if tried is best else "") for cell in cells))
    return table
