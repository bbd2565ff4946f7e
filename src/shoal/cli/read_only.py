"""Commands that change no run: `list`, `report` and `data show`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.console import make_console
from shoal.cli.listings import make_listing
from shoal.cli.recipe_flags import add_recipe_flags
from shoal.runs.owner_split import split_by_known_owners
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import parse_recipe_pairs

data = typer.Typer(no_args_is_help=True, help="Look at data sets and splits.")


def list_command(
    what: Annotated[str, typer.Argument(metavar="methods|data|models|tasks|splits|fleets|tables")],
    parts: Annotated[list[str] | None, typer.Option(help="Python files with parts of your own.")] = None,
) -> None:
    """List what there is to choose from."""
    make_console().print(make_listing(what, tuple(parts or ())))


def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs or of comparisons.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one page about runs: curves, split, costs, recipes, papers to cite."""
    from shoal.report.write import write_report

    for path in write_report(folders, out):
        typer.echo(path)


def show_split_command(
    sets: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="data, split, devices, seed ...")
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("split.png"),
    *,
    given: dict[str, Any],
) -> None:
    """Draw how a data set is spread over devices: shoal data show --split dirichlet:0.1 --devices 20.

    The same can be said as split=dirichlet:0.1 devices=20.
    """
    from shoal.report.plots import draw_split
    from shoal.runs.recipe_data import describe_split

    values = split_by_known_owners(
        {"sample": 1} | parse_recipe_pairs(sets or [], "shoal data show data=digits devices=20") | given
    )
    recipe = Recipe().with_values(**values)
    split = describe_split(recipe)
    draw_split(split, out)
    sizes = split["sizes"]
    devices = split["devices"]
    typer.echo(f"{recipe.data}, {recipe.split}: {devices} devices, {min(sizes)} to {max(sizes)} samples each")
    typer.echo(f"mean non-IID degree {split['degree']:.4f} (0: all alike, 1: nothing in common)")
    typer.echo(f"picture: {out}")


SPLIT_KEYS = ("data", "data_dir", "split", "server_data", "devices", "seed", "validation", "stratify_validation")
"""Recipe keys that decide who holds what."""
data.command("show")(add_recipe_flags(show_split_command, only=SPLIT_KEYS))
