"""Metrics of the user's own: a function of all logits and targets, or an object with `update` and `compute`.

They come from a Python file, or from the program that runs shoal.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import isfinite
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError, describe_error
from shoal.core.learning_task import LearningTask
from shoal.core.library_metrics import LibraryMetric
from shoal.core.measures.evaluate import StreamingMetric
from shoal.core.metric import COLUMNS, METRICS
from shoal.data.dataset import Dataset
from shoal.models.user_call import make_model_error
from shoal.plugins.load import make_lost_object_error
from shoal.storage.python_file import load_named_object

log = logging.getLogger("shoal")
LOGITS_BYTES_LIMIT = 2 * 2**30
"""Bytes of logits and targets that the functions of a run may be given at once."""
FORMS = (
    "Name a function of (logits, targets), an object with update(logits, targets) and compute(), "
    "or what makes one from nothing, `classes` or `num_classes`."
)
HANDED_OVER_METRICS: dict[str, Any] = {}
"""Metrics that a program gave as objects, by `own-...:NAME`; they live as long as it does."""
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def load_metric_factories(
    specs: Sequence[str], dataset: Dataset, outputs: int, dtype: torch.dtype
) -> dict[str, Callable[[], StreamingMetric]]:
    """By name, what makes the metric `FILE.py:NAME` for one evaluation of a model with so many outputs of this type.

    A function of (logits, targets) is given those of the whole test set at once. Anything else is an object with
    `update(logits, targets)` and `compute()`, or a class or a function that makes one, from the number of classes
    where it takes `classes` or `num_classes`.
    """
    makers: dict[str, Callable[[], StreamingMetric]] = {}
    functions, undefined = 0, set[str]()
    for spec in specs:
        name, thing = spec.rpartition(":")[2], load_metric(spec)
        spec = name if spec in HANDED_OVER_METRICS else spec
        if name in METRICS or name in COLUMNS or name in makers:
            why = "another metric has that name" if name in makers else "the history has a column of that name"
            raise make_model_error(spec, why, "Give it another name.")
        functions += takes_logits_and_targets(thing)
        make = find_metric_maker(spec, thing, dataset.test_targets, outputs, dtype, functions)
        makers[name] = partial(GuardedMetric, spec, make, undefined)
    return makers


def find_metric_maker(
    spec: str, thing: Any, targets: Tensor, outputs: int, dtype: torch.dtype, functions: int = 1
) -> Callable[[], StreamingMetric]:
    """What makes a metric for one evaluation, from an object, a function of everything, or what makes an object."""
    if is_streaming_metric(thing):
        return partial(reset_metric, spec, thing)
    if takes_logits_and_targets(thing):
        refuse_large_logits(spec, functions, targets, outputs, dtype)
        return partial(WholeSetMetric, thing, len(targets))
    make = partial(make_metric, spec, thing, outputs)
    make()
    return make


def make_task_metrics(
    task: LearningTask, asked: Sequence[str], dataset: Dataset, outputs: int, dtype: torch.dtype
) -> dict[str, Callable[[], StreamingMetric]]:
    """By name, what makes those metrics of a task that are no means over the test set, for one evaluation.

    They are given predictions in place of outputs. The loss of a task that mixes a batch is one of them: it is taken
    over the whole test set.
    """
    makers: dict[str, Callable[[], StreamingMetric]] = {}
    for metric in task.metrics:
        if metric.make is None or (metric.asked and metric.asked not in asked):
            continue
        if isinstance(metric.make, LibraryMetric):
            make = partial(metric.make, outputs)
            make()
        else:
            spec = f"{metric.name} of the task {task.name}"
            own = find_metric_maker(spec, metric.make, dataset.test_targets, outputs, dtype)
            make = partial(GuardedMetric, spec, own, set())
        makers[metric.name] = partial(PredictionMetric, task.predict, make)
    if task.mixes_batch:
        mean_loss = lambda outputs, targets: float(task.compute_sample_losses(outputs, targets).double().mean())  # noqa: E731
        makers["loss"] = partial(WholeSetMetric, mean_loss, len(dataset.test_targets))
    return makers


class PredictionMetric:
    """A metric that is given what a task reads in a model's outputs, such as probabilities."""

    def __init__(self, predict: Callable[[Tensor], Tensor], make: Callable[[], StreamingMetric]):
        self.predict, self.metric = predict, make()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.metric.update(self.predict(outputs), targets)

    def compute(self) -> Any:
        return self.metric.compute()


def load_metric(spec: str) -> Any:
    """What `FILE.py:NAME` names, or the object that the program gave."""
    if ".py:" in spec:
        return load_named_object(spec)
    if spec not in HANDED_OVER_METRICS:
        raise make_lost_object_error("metric", spec, "metrics=[...]")
    return HANDED_OVER_METRICS[spec]


def is_streaming_metric(thing: Any) -> bool:
    """Whether an object has `update` and `compute`, so that it takes a test set batch by batch."""
    return not isinstance(thing, type) and all(callable(getattr(thing, key, None)) for key in ("update", "compute"))


def takes_logits_and_targets(thing: Any) -> bool:
    """Whether it can be called with (logits, targets)."""
    if isinstance(thing, type) or not callable(thing):
        return False
    try:
        inspect.signature(thing).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it does not tell what it takes
        pass
    return True


def refuse_large_logits(spec: str, functions: int, targets: Tensor, classes: int, dtype: torch.dtype) -> None:
    """Refuse a function of all logits where these need more than LOGITS_BYTES_LIMIT, before anything is trained."""
    needed = functions * targets.numel() * (classes * dtype.itemsize + targets.element_size())
    if needed > LOGITS_BYTES_LIMIT:
        problem = (
            f"{spec} is a function of all logits at once, and those of {len(targets)} test samples "
            f"take {needed / 2**30:.1f} GiB, more than the {LOGITS_BYTES_LIMIT / 2**30:g} GiB that are kept for such "
            "functions."
        )
        advice = "Write it as a class with update(logits, targets) and compute(), which is given them piece by piece."
        raise ShoalError("bad-value", problem, advice)


def make_metric(spec: str, thing: Any, classes: int) -> StreamingMetric:
    """A new object from a class, or from a function that makes one."""
    if not callable(thing):
        raise make_model_error(spec, f"it is {describe_wrong_value(thing)}", FORMS)
    try:
        takes = list(inspect.signature(thing).parameters.values())
    except (TypeError, ValueError):
        takes = []
    given = {p.name: classes for p in takes if p.name in ("classes", "num_classes")}
    if any(p.default is p.empty and p.name not in given and p.kind not in VARIABLE for p in takes):
        raise make_model_error(spec, f"it takes ({', '.join(p.name for p in takes)})", FORMS)
    with blame_metric(spec):
        metric: Any = thing(**given)
    if not is_streaming_metric(metric):
        raise make_model_error(
            spec, f"it makes {describe_wrong_value(metric)}, which has no `update` and `compute`", FORMS
        )
    return metric


def reset_metric(spec: str, metric: Any) -> StreamingMetric:
    """The user's own object without what an earlier evaluation left in it."""
    if callable(getattr(metric, "reset", None)):
        metric.reset()
        return metric
    try:
        return deepcopy(metric)
    except Exception as error:
        raise make_model_error(
            spec, f"it cannot be copied ({describe_error(error)})", "Give it a method reset()."
        ) from error


class WholeSetMetric:
    """Keeps the logits and targets of a whole test set for a function of them."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], samples: int):
        self.function, self.samples, self.filled = function, samples, 0
        self.kept: tuple[Tensor, ...] = ()

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.kept = self.kept or tuple(t.new_empty(self.samples, *t.shape[1:]) for t in (logits, targets))
        for kept, new in zip(self.kept, (logits, targets)):
            kept[self.filled : self.filled + len(new)] = new
        self.filled += len(targets)

    def compute(self) -> Any:
        return self.function(*self.kept)


class GuardedMetric:
    """A user's metric in one evaluation: what it raises is reported as its error, and it must give one number."""

    def __init__(self, spec: str, make: Callable[[], StreamingMetric], undefined: set[str]):
        self.spec, self.undefined = spec, undefined
        with blame_metric(spec):  # a reset() may raise, too
            self.metric = make()

    def update(self, logits: Tensor, targets: Tensor) -> None:
        with blame_metric(self.spec):
            self.metric.update(logits.clone(), targets.clone())

    def compute(self) -> float:
        with blame_metric(self.spec):
            value = self.metric.compute()
            if isinstance(value, (Tensor, np.ndarray, np.generic)) and count_values(value) == 1:
                value = value.item()
        if not isinstance(value, (int, float)):
            raise make_model_error(
                self.spec, f"it gives {describe_wrong_value(value)} and not a number", "Let it give one number."
            )
        if not isfinite(value) and self.spec not in self.undefined:
            self.undefined.add(self.spec)
            log.warning("%s gives %s, which is no number: the history has null in such rounds.", self.spec, value)
        return float(value)


@contextmanager
def blame_metric(spec: str) -> Iterator[None]:
    """Inside, whatever is raised becomes an error of this metric, with the line in its file."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        file = str(Path(spec.rpartition(":")[0]))
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename.endswith(file)]
        where = f" in line {lines[-1]}" if lines else ""
        raise make_model_error(
            spec, f"it raises {describe_error(error)}{where}", "Correct it there; a run with --out can be resumed."
        ) from error


def describe_wrong_value(value: Any) -> str:
    """Words for a value of the wrong kind."""
    if value is None:
        return "nothing"
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{count_values(value)} values"
    return f"the text {value[:40]!r}" if isinstance(value, str) else f"something of type {type(value).__name__}"


def count_values(value: Tensor | np.ndarray | np.generic) -> int:
    return value.numel() if isinstance(value, Tensor) else value.size
