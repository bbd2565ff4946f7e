"""What judges a run of a recipe: its metrics and headline, evaluators on both halves, and the tests of devices."""

from collections.abc import Callable
from difflib import get_close_matches

import numpy as np
import torch

from shoal.core.batch import Samples
from shoal.core.builtin_tasks import CLASSIFY
from shoal.core.compose import Method
from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.learning_task import LearningTask
from shoal.core.measures.device_tests import list_device_test_metrics
from shoal.core.measures.evaluate import Evaluator, EvaluatorOfBothHalves
from shoal.core.metric import ASKED, COSTS, METRICS, Metric, is_own_metric, list_run_metrics
from shoal.core.types import Work
from shoal.data.dataset import Dataset
from shoal.data.device_samples import DeviceSamples
from shoal.data.noniid_degree import count_labels_by_device
from shoal.data.population import Population
from shoal.engines.device_tests import DeviceTester
from shoal.engines.host import LocalDevices
from shoal.plugins.metrics import load_metric_factories, make_task_metrics
from shoal.runs.recipe import Recipe
from shoal.runs.task_targets import count_outputs

MOST_DEVICES = 1000
"""How many devices are judged one by one."""


def list_recipe_metrics(recipe: Recipe, method: Method, task: LearningTask) -> dict[str, Metric]:
    """What the rows of a run of this recipe may hold, by column."""
    own = list_device_test_metrics(task) if recipe.has_own_tests else {}
    return list_run_metrics(method, recipe.metrics, task.metrics) | own


def choose_headline(recipe: Recipe, task: LearningTask) -> str:
    """What a run is about where its recipe names nothing: what devices get on their own tests, or the task's."""
    return "personal_mean" if recipe.has_own_tests else task.headline


def build_evaluators(
    recipe: Recipe,
    task: LearningTask,
    dataset: Dataset,
    labels: np.ndarray,
    population: Population,
    classes: int,
    dtype: torch.dtype,
) -> tuple[Evaluator, Evaluator | EvaluatorOfBothHalves]:
    """The evaluator of the samples that a run is steered by, and the one of its rows, which may judge both halves."""
    by_device = None
    if classes and {"devices", "local"} & set(recipe.metrics):
        by_device = count_labels_by_device(labels, population, classes, min(len(population), MOST_DEVICES))
    evaluator = build_evaluator(recipe, task, dataset, classes, by_device, dtype)
    test_half = dataset.take_test_half()
    if not test_half:
        return evaluator, evaluator
    return evaluator, EvaluatorOfBothHalves(
        evaluator, build_evaluator(recipe, task, test_half, classes, by_device, dtype)
    )


def build_evaluator(
    recipe: Recipe,
    task: LearningTask,
    dataset: Dataset,
    classes: int,
    by_device: np.ndarray | None,
    dtype: torch.dtype,
) -> Evaluator:
    """The evaluator on the test set with the recipe's metrics; `by_device` are the labels of each device."""
    for metric in recipe.metrics:
        if metric in METRICS and metric not in ASKED:
            problem = f"The metric {metric} need not be asked for: it is told of every run that has it."
            raise ShoalError("bad-value", problem, "Leave it out of metrics.")
        if not is_own_metric(metric) and metric not in ASKED:
            raise unknown_metric_error(metric, task)
        if not is_own_metric(metric) and metric not in task.words:
            problem = f"The metric {metric} means nothing for the task {task.name}."
            raise ShoalError("bad-value", problem, f"It knows {', '.join(task.words) or 'no further ones'}.")
    names = recipe.metrics
    if "perplexity" in names and task.loss is not CLASSIFY.loss:
        names = tuple(dict.fromkeys((*names, "log_loss")))  # the loss is no plain cross-entropy
    specs = list(filter(is_own_metric, names))
    metrics = make_task_metrics(task, names, dataset, count_outputs(task, dataset), dtype)
    metrics |= load_metric_factories(specs, dataset, count_outputs(task, dataset), dtype)
    index = torch.arange(len(dataset.test_targets))
    samples = Samples(dataset.test_inputs, dataset.test_targets, index)
    return Evaluator(samples, classes, names, by_device, metrics)


def unknown_metric_error(name: str, task: LearningTask) -> ShoalError:
    """The error for a metric that nobody knows; the nearest one may be one that every run tells."""
    told = [metric.name for metric in (*task.metrics, *COSTS) if metric.is_in_every_row]
    near = get_close_matches(name.lower(), [*told, *ASKED], n=1, cutoff=0.75)
    near = near or [other for other in told if len(name) > 1 and other.startswith(name.lower())]
    if not near or near[0] in ASKED:
        return unknown_name_error("metric", name, ASKED)
    advice = f"The nearest is {near[0]}, which every run tells: leave it out of metrics."
    return ShoalError("unknown-name", f"There is no metric called {name[:80]!r}.", advice)


def build_device_tester(
    recipe: Recipe,
    dataset: Dataset,
    own_tests: Population | None,
    sizes: np.ndarray,
    host: LocalDevices,
    work: Callable[[int, int], Work],
) -> DeviceTester | None:
    """The tests of devices on samples of their own, or None without any; devices that cannot train are left out."""
    if own_tests is None:
        return None
    half = (dataset.inputs, dataset.targets)
    half = (dataset.test_inputs, dataset.test_targets) if recipe.local_test_of == "owner" else half
    get_tests = DeviceSamples(*half, own_tests.__getitem__)
    tested = np.flatnonzero((own_tests.sizes > 0) & (sizes > 0))[:MOST_DEVICES].tolist()
    return DeviceTester(host, get_tests, tested, work)
