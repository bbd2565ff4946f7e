"""The command line `shoal`: run, compare, tune, reproduce, resume and export, and how errors become exit codes."""

import json
import logging
import os
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from shoal.cli import federation, model_check, prediction, read_only, tuning
from shoal.cli.common_flags import Json, Log, Quiet, Sets, Workers
from shoal.cli.comparison_tables import print_comparison, warn_without_matplotlib
from shoal.cli.console import make_console
from shoal.cli.listings import make_listing
from shoal.cli.plan_table import make_plan_tables, summarise_plan
from shoal.cli.progress import Progress, combine_watchers, hide_finished_bars
from shoal.cli.recipe_flags import CommandWithoutRecipeFlags, add_recipe_flags, resolve_recipe
from shoal.cli.render import make_profile_table, make_sheet_tables, make_summary_table
from shoal.core.errors import ERROR_KINDS, ShoalError
from shoal.core.interrupts import stop_on_sigterm, was_terminated
from shoal.core.version import VERSION
from shoal.runs.failed_runs import refuse_all_void, warn_of_failed_runs
from shoal.runs.recipe_files import TUNING_FILE, parse_recipe_pairs
from shoal.storage.files import explain_path_errors

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Federated learning when neither data nor devices are alike.",
)


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shoal {VERSION}")
        raise typer.Exit


@app.callback()
def take_common_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Federated learning when neither data nor devices are alike."""


@app.command("run")
@add_recipe_flags
def run_command(
    file: Annotated[Path | None, typer.Argument(metavar="[RECIPE.toml]", help="A recipe; flags go over it.")] = None,
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    log: Log = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Print where the time goes, and trace a round: trace.json in the run's folder, or here."
        ),
    ] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Run one method."""
    from shoal.runs.start import run_recipe

    recipe = resolve_recipe(file, sets, given)
    trace = Path(recipe.out) / "trace.json" if profile else ""
    with Progress(quiet or as_json, as_json, quiet=quiet) as progress:
        result = run_recipe(recipe, combine_watchers(progress, log), trace)
        warn_of_failed_runs({result.recipe.method: [result]}, unless_all_void=True)
    if not (quiet or as_json):
        make_console().print(make_summary_table(result))
        if result.profile:
            make_console().print(make_profile_table(result.profile))
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
    workers: Workers = 0,
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

    if "method" in given:
        raise ShoalError("bad-value", "compare has no --method.", "List the methods: shoal compare fedavg scaffold.")
    varied = [pair.partition("=")[0].strip().replace("-", "_") for pair in vary or ()]
    recipe = resolve_recipe(file, sets, given, varied)
    budgets = Budgets(tuple(budget_seconds or ()), tuple(budget_bytes or ()))
    runs = ComparisonSpec(tuple(methods), recipe, seeds, tuple(vary or ())).make_recipes()
    with Progress(quiet or as_json, False, runs=len(runs) * seeds, varied=varied, quiet=quiet) as progress:
        progress.plan_comparison(runs)
        if recipe.out:
            warn_without_matplotlib()
        comparison = run_comparison(
            methods, recipe, seeds, combine_watchers(progress, log), vary or (), budgets, workers
        )
        warn_of_failed_runs(comparison.results, unless_all_void=True)
    print_comparison(comparison, recipe.out, quiet, as_json)


@app.command("reproduce")
def reproduce_command(
    table: Annotated[str | None, typer.Argument(help="The name of a table, or a TOML file.")] = None,
    scale: Annotated[str, typer.Option(help="full: as in the paper; smoke: two rounds on a sliver.")] = "full",
    protocol: Annotated[
        str, typer.Option(help="fair: one recipe, several seeds, means; authors: as their code has it.")
    ] = "fair",
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Seeds per cell. [dim]\\[as the protocol asks for][/dim]", min=1, max=1000, show_default=False
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Run these methods of the paper alone.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run these columns of the table alone.")
    ] = None,
    out: Annotated[str, typer.Option(help="Folder of the runs and of the table. [dim]\\[runs/TABLE][/dim]")] = "",
    plan: Annotated[
        bool, typer.Option("--plan", help="Say which cells are there and what the others take; run none.")
    ] = False,
    until_minutes: Annotated[
        float | None, typer.Option(metavar="N", help="Run missing cells by what they decide, for N minutes.", min=0)
    ] = None,
    results: Annotated[
        str, typer.Option(help="Ledger whose runs need not be run again. [dim]\\[results, if there][/dim]")
    ] = "",
    record: Annotated[bool, typer.Option("--record", help="Add the runs to the ledger, also broken-off ones.")] = False,
    workers: Workers = 0,
    sets: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a table of a paper and put what comes out beside what was published; without a table, list them."""
    from shoal.reproduce.plan import plan_table, reproduce_in_order
    from shoal.reproduce.run import reproduce_table

    if table is None:
        return make_console().print(make_listing("tables", ()))
    changes, rows, columns = parse_recipe_pairs(sets or []), only or (), column or ()
    if scale == "smoke" and (plan or record or until_minutes is not None):
        raise ShoalError("bad-value", "The scale smoke means nothing worth planning.", "Leave out --scale.")
    if plan:
        with Progress(quiet or as_json, False, runs=2, quiet=quiet):
            found = plan_table(table, seeds, rows, out, changes, results, protocol=protocol, columns=columns)
        if as_json:
            return typer.echo(json.dumps(found.to_dict()))
        return None if quiet else make_console().print(make_plan_tables(found))
    with Progress(quiet or as_json, False, runs=2, varied=("data", "model"), quiet=quiet) as progress:
        watch = hide_finished_bars(progress)
        if scale == "full":
            told = plan_table(table, seeds, rows, out, changes, results, "full", False, protocol, columns)
            logging.getLogger("shoal").info(summarise_plan(told))
        if record or until_minutes is not None:
            sheet = reproduce_in_order(
                table, seeds, rows, out, changes, watch, results, until_minutes, record, protocol, columns, workers
            )
        else:
            sheet = reproduce_table(
                table, scale, seeds, rows, out, changes, watch, protocol, results, columns=columns, workers=workers
            )
    if as_json:
        typer.echo(json.dumps(sheet.to_dict()))
    elif not quiet:
        for table_or_remark in make_sheet_tables(sheet):
            make_console().print(table_or_remark)


@app.command("resume", cls=CommandWithoutRecipeFlags)
def resume_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, of a comparison or of a tuning.")],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="KEY=VALUE", help="Other budgets, for example rounds=100, or data_dir=FOLDER."
        ),
    ] = None,
    workers: Workers = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run, a comparison or a tuning that was stopped."""
    from shoal.compare.comparison import resume_comparison
    from shoal.compare.spec import COMPARISON_FILE, read_comparison_file
    from shoal.runs.start import change_budgets, resume_run
    from shoal.runs.store import count_rows_on_disk

    if (folder / TUNING_FILE).is_file():
        return tuning.resume_tuning_folder(folder, parse_recipe_pairs(sets or []), workers, quiet, as_json)
    is_comparison = (folder / COMPARISON_FILE).is_file()
    if workers > 1 and not is_comparison:
        raise ShoalError("bad-value", f"{folder} is no comparison: there is one run to do.", "Leave out --workers.")
    with Progress(
        quiet or as_json, as_json and not is_comparison, runs=2 if is_comparison else 1, quiet=quiet
    ) as progress:
        if is_comparison:
            warn_without_matplotlib()
            spec, changes = read_comparison_file(folder), parse_recipe_pairs(sets or [])
            runs = replace(spec, recipe=change_budgets(spec.recipe, changes)).make_recipes()
            progress.plan_comparison(runs, lambda recipe: count_rows_on_disk(Path(recipe.out)))
            comparison = resume_comparison(folder, progress.show_row, changes, workers)
            warn_of_failed_runs(comparison.results, unless_all_void=True)
            result = None
        else:
            comparison, result = None, resume_run(folder, progress.show_row, parse_recipe_pairs(sets or []))
            warn_of_failed_runs({result.recipe.method: [result]}, unless_all_void=True)
    if comparison:
        print_comparison(comparison, str(folder), quiet, as_json)
    elif result:
        if not (quiet or as_json):
            make_console().print(make_summary_table(result))
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
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the model without adapters: what they learnt is in its weights.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="The model of the best validation metric, of a run with --keep-best.")
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

    exported = export(run, file, force=force, with_frozen=with_frozen, merged=merged, best=best)
    if not quiet:
        typer.echo(exported)


app.command("predict")(prediction.predict_command)
app.command("tune")(add_recipe_flags(tuning.tune_command))
app.command("check")(add_recipe_flags(model_check.check_command))
app.command("list")(read_only.list_command)
app.command("keys")(federation.keys_command)
app.command("server")(federation.server_command)
app.command("join")(federation.join_command)
app.command("proxy")(federation.proxy_command)
app.command("report")(read_only.report_command)
app.add_typer(read_only.data, name="data")


def run_command_line() -> None:
    """Run the command line; whatever goes wrong ends in a sentence, an advice and an exit code."""
    errors = make_console(stderr=True)
    try:
        with stop_on_sigterm(), explain_path_errors():
            app()
    except ShoalError as error:
        errors.print(Text(f"{error.kind.name}:", "red"), end=" ")
        errors.print(error.problem, highlight=False, soft_wrap=True)
        errors.print(error.advice, highlight=False, soft_wrap=True)
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
        errors.print(Text("bug:", "red"), f"{type(error).__name__} where none should be.", soft_wrap=True)
        errors.print(f"Please report it with {file.name}; a run with --out can be resumed.", soft_wrap=True)
        sys.exit(ERROR_KINDS["bug"].code)
