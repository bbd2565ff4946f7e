"""Loggers: every round of a run is sent to TensorBoard, MLflow or Weights & Biases when it is over."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from math import isfinite
from pathlib import Path
from time import time
from typing import Any

from shoal.core.errors import ShoalError, describe_error, unknown_name_error
from shoal.core.ledger import Row
from shoal.runs.history import History
from shoal.runs.recipe import Recipe
from shoal.runs.session import is_run_over
from shoal.runs.watching import Watcher
from shoal.storage.files import explain_disk_errors

LogStep = Callable[[int, dict[str, float]], None]
OpenLoggerRun = Callable[[Recipe, str], tuple[LogStep, Callable[[], None]]]
"""Opens a run of a logger under a name: the functions that log a step and that end the run."""


def open_logger(spec: str) -> Watcher:
    """A watcher for `tensorboard:DIR`, `mlflow:URI` (empty for MLflow's own default) or `wandb:PROJECT`."""
    kind, _, where = spec.partition(":")
    if kind not in KINDS:
        raise unknown_name_error("logger", kind, KINDS)
    if not where and kind != "mlflow":
        raise ShoalError("bad-value", f"The logger {kind} is not told where to write.", f"Write {EXAMPLES[kind]}.")
    with blame_logger(kind):
        return make_logging_watcher(kind, KINDS[kind](where))


def make_logging_watcher(kind: str, open_run: OpenLoggerRun) -> Watcher:
    """A watcher that opens one run of the logger per method and seed, and ends it with its last row."""
    running: dict[str, tuple[LogStep, Callable[[], None]]] = {}

    def watch(recipe: Recipe, row: Row, history: History) -> None:
        name = f"{sanitise_name(recipe.method)[:60]}-seed-{recipe.seed}"
        with blame_logger(kind):
            if name not in running:
                running[name] = open_run(recipe, name)
            log, end = running[name]
            log(row["round"] + 1, dict(flatten_numbers(row)))
            if is_run_over(recipe, history):
                end()
                del running[name]

    return watch


@contextmanager
def blame_logger(kind: str) -> Iterator[None]:
    """Inside, whatever a logger raises becomes an error that names the logger."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        advice = "Check where it writes to, or go on without it; a run with a folder can be resumed."
        raise ShoalError("bad-value", f"The logger {kind} failed ({describe_error(error)}).", advice) from error


def flatten_numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every finite number of a row; tables inside it as `bytes_by/up/model`, lists of devices as their length."""
    for key, value in row.items():
        if key == "round" and not prefix:
            continue
        name = prefix + sanitise_name(key)
        if isinstance(value, Mapping):
            yield from flatten_numbers(value, name + "/")
        elif name in ("devices", "dropped"):
            yield name, len(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
            yield name, value


def open_tensorboard(where: str) -> OpenLoggerRun:
    require_package("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    def begin_run(recipe: Recipe, name: str):
        with explain_disk_errors(Path(where)):
            writer = SummaryWriter(str(Path(where) / name))
        writer.add_text("recipe", "".join(f"    {line}\n" for line in recipe.to_toml().splitlines()))

        def log_step(step: int, values: dict[str, float]) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return log_step, writer.close

    return begin_run


def open_mlflow(where: str) -> OpenLoggerRun:
    require_package("mlflow", "mlflow")
    from mlflow import MlflowClient  # pyright: ignore
    from mlflow.entities import Metric, Param  # pyright: ignore

    client = MlflowClient(where or None)

    def begin_run(recipe: Recipe, name: str):
        experiment = client.get_experiment_by_name("shoal")
        run = client.create_run(
            experiment.experiment_id if experiment else client.create_experiment("shoal"), run_name=name
        )
        run_id = run.info.run_id
        client.log_batch(run_id, params=[Param(key, str(value)[:500]) for key, value in asdict(recipe).items()])

        def log_step(step: int, values: dict[str, float]) -> None:
            client.log_batch(run_id, [Metric(key, value, get_milliseconds(), step) for key, value in values.items()])

        return log_step, lambda: client.set_terminated(run_id)

    return begin_run


def open_wandb(where: str) -> OpenLoggerRun:
    require_package("wandb", "wandb")
    import wandb  # pyright: ignore

    def begin_run(recipe: Recipe, name: str):
        run: Any = wandb.init(project=where, name=name, config=asdict(recipe), reinit="create_new")
        return lambda step, values: run.log(values, step=step), run.finish

    return begin_run


KINDS: dict[str, Callable[[str], OpenLoggerRun]] = {
    "tensorboard": open_tensorboard,
    "mlflow": open_mlflow,
    "wandb": open_wandb,
}
EXAMPLES = {"tensorboard": "tensorboard:runs/board", "mlflow": "mlflow:", "wandb": "wandb:my-project"}


def require_package(package: str, extra: str) -> None:
    """Refuse to go on without a package, before anything is computed."""
    try:
        import_module(package)
    except ImportError:
        advice = f"Run: pip install 'shoal[{extra}]'."
        raise ShoalError("missing-extra", f"{package} is not installed.", advice) from None


def get_milliseconds() -> int:
    """The time now in milliseconds since 1970, as MLflow wants it."""
    return int(time() * 1000)


def sanitise_name(name: str) -> str:
    """A name with only characters that every logger and every file system takes."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "run"
