"""Flags that several commands have."""

from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables and bars.")]
Log = Annotated[
    str | None, typer.Option(help="Also log to tensorboard:DIR, mlflow:URI or wandb:PROJECT.", metavar="KIND:WHERE")
]
Workers = Annotated[
    int, typer.Option(help="Divide the runs among so many processes; 0: as many as pay.", min=0, max=256)
]
Sets = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any key of the recipe.")]
