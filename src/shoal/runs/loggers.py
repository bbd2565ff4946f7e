"""Loggers: every round of a run, told to TensorBoard, MLflow or Weights & Biases as it happens."""

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
from shoal.runs.session import Watcher, is_run_over
from shoal.storage.files import explain_disk_errors

LogStep = Callable[[int, dict[str, float]], None]
OpenLoggerRun = Callable[[Recipe, str], tuple[LogStep, Callable[[], None]]]
"""Begins one run of a logger: how to log a step, and how to end it."""


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
    """One run of the logger per method and seed, begun with its first row and ended with its last."""
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
    """Whatever goes wrong in a logger, told in one sentence."""
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

        def log_step(step: int, found: dict[str, float]) -> None:
            for key, value in found.items():
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
        found = client.get_experiment_by_name("shoal")
        run = client.create_run(found.experiment_id if found else client.create_experiment("shoal"), run_name=name)
        at = run.info.run_id
        client.log_batch(at, params=[Param(key, str(value)[:500]) for key, value in asdict(recipe).items()])

        def log_step(step: int, found: dict[str, float]) -> None:
            client.log_batch(at, [Metric(key, value, get_milliseconds(), step) for key, value in found.items()])

        return log_step, lambda: client.set_terminated(at)

    return begin_run


def open_wandb(where: str) -> OpenLoggerRun:
    require_package("wandb", "wandb")
    import wandb  # pyright: ignore

    def begin_run(recipe: Recipe, name: str):
        run: Any = wandb.init(project=where, name=name, config=asdict(recipe), reinit="create_new")
        return lambda step, found: run.log(found, step=step), run.finish

    return begin_run


KINDS: dict[str, Callable[[str], OpenLoggerRun]] = {
    "tensorboard": open_tensorboard,
    "mlflow": open_mlflow,
    "wandb": open_wandb,
}
EXAMPLES = {"tensorboard": "tensorboard:runs/board", "mlflow": "mlflow:", "wandb": "wandb:my-project"}


def require_package(package: str, extra: str) -> None:
    """Say what is missing before anything is computed."""
    try:
        import_module(package)
    except ImportError:
        advice = f"Run: pip install 'shoal[{extra}]'."
        raise ShoalError("missing-extra", f"{package} is not installed.", advice) from None


def get_milliseconds() -> int:
    """Milliseconds, as MLflow wants them."""
    return int(time() * 1000)


def sanitise_name(name: str) -> str:
    """A name that every logger takes, and every file system."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "run"
