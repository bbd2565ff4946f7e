"""The command `shoal predict`: what a trained model says of new rows of a table."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from shoal.cli.common_flags import Json, Quiet
from shoal.cli.console import make_console
from shoal.core.errors import ShoalError


def predict_command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A .pt2 or .onnx file of shoal export, or the folder of a run.")
    ],
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="A CSV or parquet file with the columns of training.")],
    out: Annotated[Path | None, typer.Option(help="The CSV file to write. [dim]\\[printed][/dim]")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict for new rows of a table, which are encoded as the training half was.

    A line for each row: the prediction, and the probability of each class. Columns that the model does not take are
    not looked at.
    """
    from shoal.runs.predict import predict
    from shoal.storage.files import explain_disk_errors

    with explain_disk_errors(out or Path()):
        is_there = out is not None and out.exists()
        is_input = out is not None and out.resolve() in (model.resolve(), rows.resolve())
    if is_there and not force:
        raise ShoalError("bad-value", f"{out} is already there.", "Give another name, or --force to replace it.")
    if is_input:
        raise ShoalError("bad-value", f"{out} is what is read here.", "Give another name.")
    predictions = predict(model, rows)
    if not quiet:
        errors = make_console(stderr=True)
        for remark in predictions.remarks:
            errors.print(Text.assemble(("warning: ", "yellow"), remark), highlight=False, soft_wrap=True)
    if out:
        predictions.write(out)
    if as_json:
        typer.echo(json.dumps(predictions.list_rows()))
    elif not out:
        typer.echo(predictions.to_csv(), nl=False)
    elif not quiet:
        typer.echo(f"{out}: predictions for {len(predictions):,} row{'s' * (len(predictions) != 1)}")
