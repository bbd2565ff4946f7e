"""The command line `shoal`: run, compare, reproduce, resume and export, and how errors become exit codes."""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.cli import federation, read_only
from shoal.cli.comparison_tables import print_comparison
from shoal.cli.listings import make_listing
from shoal.cli.progress import Progress, combine_watchers, hide_finished_bars
from shoal.cli.recipe_flags import add_recipe_flags, resolve_recipe
from shoal.cli.render import make_sheet_tables, make_summary_table
from shoal.core.errors import ERROR_KINDS, ShoalError
from shoal.core.interrupts import stop_on_sigterm, was_terminated
from shoal.reproduce.run import reproduce_table
from shoal.runs.failed_runs import refuse_all_void, warn_of_failed_runs
from shoal.runs.recipe_files import parse_recipe_pairs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Federated learning when neither data nor devices are alike.",
)
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables and bars.")]
Log = Annotated[
    str | None, typer.Option(help="Also log to tensorboard:DIR, mlflow:URI or wandb:PROJECT.", metavar="KIND:WHERE")
]
Workers = Annotated[
    int, typer.Option(help="Divide the runs among so many processes; pays for small models on a GPU.", min=1, max=256)
]
Sets = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any key of the recipe.")]


@app.command("run")
@add_recipe_flags
def run_command(
    file: Annotated[Path | None, typer.Argument(metavar="[RECIPE.toml]", help="A recipe; flags go over it.")] = None,
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    log: Log = None,
    *,
    given: dict[str, Any],
) -> None:
    """Run one method."""
    from shoal.runs.start import run_recipe

    with Progress(quiet or as_json, as_json, quiet=quiet) as progress:
        result = run_recipe(resolve_recipe(file, sets, given), combine_watchers(progress, log))
        warn_of_failed_runs({result.recipe.method: [result]}, unless_all_void=True)
    if not (quiet or as_json):
        Console().print(make_summary_table(result))
    refuse_all_void([result.history])


@app.command("compare")
@add_recipe_flags
def compare_command(
    methods: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help="Methods, in quotes where they have brackets.")
    ],
    seeds: Annotated[int, typer.Option(help="Seeds per method.", min=1, max=1000)] = 1,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2,...", help="Run each method with each of these values of a recipe key."),
    ] = None,
    workers: Workers = 1,
    budget_seconds: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="Show the accuracies within X simulated seconds; may be given several times."),
    ] = None,
    budget_bytes: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="Show the accuracies within X bytes both ways; may be given several times."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--recipe", help="A recipe; flags go over it.")] = None,
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    log: Log = None,
    *,
    given: dict[str, Any],
) -> None:
    """Run several methods on the same data, devices and seeds, and draw them side by side."""
    from shoal.compare.budgets import Budgets
    from shoal.compare.comparison import run_comparison
    from shoal.compare.spec import ComparisonSpec
    from shoal.report.write import require_matplotlib

    if "method" in given:
        raise ShoalError("bad-value", "compare has no --method.", "List the methods: shoal compare fedavg scaffold.")
    recipe = resolve_recipe(file, sets, given)
    budgets = Budgets(tuple(budget_seconds or ()), tuple(budget_bytes or ()))
    if recipe.out:
        require_matplotlib()
    runs = ComparisonSpec(tuple(methods), recipe, seeds, tuple(vary or ())).make_recipes()
    varied = [pair.partition("=")[0].strip().replace("-", "_") for pair in vary or ()]
    with Progress(quiet or as_json, False, runs=len(runs) * seeds, varied=varied, quiet=quiet) as progress:
        comparison = run_comparison(
            methods, recipe, seeds, combine_watchers(progress, log), vary or (), budgets, workers
        )
        warn_of_failed_runs(comparison.results, unless_all_void=True)
    print_comparison(comparison, recipe.out, quiet, as_json)


@app.command("reproduce")
def reproduce_command(
    table: Annotated[str | None, typer.Argument(help="The name of a table, or a TOML file.")] = None,
    scale: Annotated[str, typer.Option(help="full: as in the paper; smoke: two rounds on a sliver.")] = "full",
    seeds: Annotated[int, typer.Option(help="Seeds per cell.", min=1, max=1000)] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Run these methods of the paper alone.")
    ] = None,
    out: Annotated[str, typer.Option(help="Folder of the runs and of the table. [dim]\\[runs/TABLE][/dim]")] = "",
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a table of a paper and put what comes out beside what was published; without a table, list them."""
    if table is None:
        return Console().print(make_listing("tables", ()))
    with Progress(quiet or as_json, False, runs=2, varied=("data", "model"), quiet=quiet) as progress:
        sheet = reproduce_table(
            table, scale, seeds, only or (), out, parse_recipe_pairs(sets or []), hide_finished_bars(progress)
        )
    if as_json:
        typer.echo(json.dumps(sheet.to_dict()))
    elif not quiet:
        for table_or_remark in make_sheet_tables(sheet):
            Console().print(table_or_remark)


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Other budgets, for example rounds=100."),
    ] = None,
    workers: Workers = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run or a comparison that was stopped."""
    from shoal.compare.comparison import resume_comparison
    from shoal.compare.spec import COMPARISON_FILE
    from shoal.report.write import require_matplotlib
    from shoal.runs.start import resume_run

    is_comparison = (folder / COMPARISON_FILE).is_file()
    if workers > 1 and not is_comparison:
        raise ShoalError("bad-value", f"{folder} is no comparison: there is one run to do.", "Leave out --workers.")
    with Progress(
        quiet or as_json, as_json and not is_comparison, runs=2 if is_comparison else 1, quiet=quiet
    ) as progress:
        if is_comparison:
            require_matplotlib()
            comparison = resume_comparison(folder, progress.show_row, parse_recipe_pairs(sets or []), workers)
            warn_of_failed_runs(comparison.results, unless_all_void=True)
            result = None
        else:
            comparison, result = None, resume_run(folder, progress.show_row, parse_recipe_pairs(sets or []))
            warn_of_failed_runs({result.recipe.method: [result]}, unless_all_void=True)
    if comparison:
        print_comparison(comparison, str(folder), quiet, as_json)
    elif result:
        if not (quiet or as_json):
            Console().print(make_summary_table(result))
        refuse_all_void([result.history])


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, finished or not.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write: NAME.pt2, NAME.onnx or NAME.safetensors.")
    ],
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there.")] = False,
    with_frozen: Annotated[
        bool, typer.Option("--with-frozen", help="Write frozen tensors into a .safetensors file, too.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write the trained model to a file that needs no shoal.

    It is the model that is judged, at the newest checkpoint, made smaller if it was pruned.

    [bold].pt2[/bold] is a program for torch.export.load.

    [bold].onnx[/bold] is for ONNX runtimes; writing it needs shoal\\[export].

    [bold].safetensors[/bold] holds the tensors alone, also to start another run from (--init).
    """
    from shoal.runs.export import export

    exported = export(run, file, force=force, with_frozen=with_frozen)
    if not quiet:
        typer.echo(exported)


app.command("list")(read_only.list_command)
app.command("keys")(federation.keys_command)
app.command("server")(federation.server_command)
app.command("join")(federation.join_command)
app.command("proxy")(federation.proxy_command)
app.command("report")(read_only.report_command)
app.add_typer(read_only.data, name="data")


def run_command_line() -> None:
    """Run the command line; whatever goes wrong ends in a sentence, an advice and an exit code."""
    errors = Console(stderr=True)
    try:
        with stop_on_sigterm():
            app()
    except ShoalError as error:
        errors.print(f"[red]{error.kind.name}:[/red]", end=" ")
        errors.print(error.problem, markup=False, highlight=False, soft_wrap=True)
        errors.print(error.advice, markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.kind.code)
    except (KeyboardInterrupt, SystemExit) as error:  # typer makes the second of the first
        if isinstance(error, SystemExit) and not was_terminated(error):
            raise
        sys.exit(ERROR_KINDS["terminated" if was_terminated(error) else "interrupted"].code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        with tempfile.NamedTemporaryFile("w", prefix="shoal-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
        errors.print(f"[red]bug:[/red] {type(error).__name__} where none should be.", soft_wrap=True)
        errors.print(
            f"Please report it with {file.name}; a run with --out can be resumed.", markup=False, soft_wrap=True
        )
        sys.exit(ERROR_KINDS["bug"].code)
