"""Build a run from its recipe: data, split, model, method, fleet, and the loop that plays its rounds."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from shoal.core.clashes import refuse_task
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.fleet_protocol import Fleet
from shoal.core.ledger import Deadlines
from shoal.core.local.device import TrainingSetup
from shoal.core.local.optimiser_checks import (
    refuse_accumulation,
    refuse_optimiser_clashes,
    refuse_unmatched_groups,
)
from shoal.core.local.personal_model import has_personal_models
from shoal.core.measures.evaluate import Evaluator
from shoal.core.measures.local_models import LocalModelEvaluator
from shoal.core.metric import Metric, add_test_metrics
from shoal.core.model.net import Net
from shoal.core.round import Loop
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Work
from shoal.data.augment import parse_augment, refuse_augmenting
from shoal.data.plausibility import Doubt, find_doubts
from shoal.engines.deterministic import fix_cublas_workspace
from shoal.engines.device_tests import DeviceScorer
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.engines.threads import use_threads
from shoal.fleet.fleets import UniformFleet, parse_fleet
from shoal.plugins.load import load_method, smoke_test_user_parts
from shoal.plugins.smoke_run import make_smoke_setup
from shoal.runs.headline import check_headline
from shoal.runs.prepared_data import DatasetCache, prepare_data
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import load_recipe_dataset
from shoal.runs.recipe_doubts import find_recipe_doubts
from shoal.runs.recipe_evaluators import build_device_tester, build_evaluators, choose_headline, list_recipe_metrics
from shoal.runs.recipe_model import build_recipe_net, describe_local_step, parse_compute_device, set_precision
from shoal.runs.recipe_optimiser import make_optimiser, make_round_lr
from shoal.runs.recipe_task import build_task
from shoal.runs.work_amounts import PROPORTIONAL, WorkAmount, make_amount_rule, parse_amount
from shoal.storage.memory import DeviceMemory

log = logging.getLogger("shoal")


@dataclass(frozen=True, eq=False)
class Assembly:
    """A run put together from its recipe, before its first round."""

    recipe: Recipe
    method: Method
    net: Net
    loop: Loop[LocalDevices]
    memory: DeviceMemory
    evaluator: Evaluator
    split: Callable[[], dict]
    """Summarises how samples lie on devices, ready for JSON."""
    doubts: Callable[[], Iterable[Doubt]]
    """Finds what is implausible about data, recipe and model, to be told before the first round."""
    device_tester: DeviceScorer | None = None
    """Judges devices on their own test samples, where they have any."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """What the rows of this run may hold, by column."""
        metrics = list_recipe_metrics(self.recipe, self.method, self.net.task)
        return add_test_metrics(metrics) if self.recipe.validation and self.recipe.evaluate_test else metrics

    @property
    def headline(self) -> str:
        """The metric that targets, budgets, tables and the report are about."""
        return self.recipe.headline or choose_headline(self.recipe, self.net.task)

    @property
    def task_note(self) -> dict[str, str]:
        """What a run's folder notes of its task, ready for JSON."""
        return {"name": self.net.task.name, "headline": choose_headline(self.recipe, self.net.task)}


@use_threads(1)
def assemble_run(
    recipe: Recipe,
    memory_folder: Path | None = None,
    dataset_cache: DatasetCache | None = None,
    elsewhere: bool = False,
) -> Assembly:
    """Build all pieces of a run; whatever is wrong with the recipe is refused here, before anything is trained.

    With `elsewhere` the samples lie on real devices, and the sizes of all of them are 0 here.
    """
    method = load_method(recipe.method, recipe.parts)
    optimiser = make_optimiser(recipe)
    refuse_optimiser_clashes(method, optimiser)
    streams = RandomStreams(recipe.seed)
    place = parse_compute_device(recipe.compute)
    if recipe.deterministic and place.type == "cuda":
        fix_cublas_workspace()
    dtype, half = set_precision(recipe.precision, place)
    dataset = load_recipe_dataset(recipe, streams)
    task = build_task(recipe, dataset)
    check_headline(recipe, list_recipe_metrics(recipe, method, task), choose_headline(recipe, task))
    refuse_task(method.parts, task)
    dataset_cache = {} if dataset_cache is None else dataset_cache
    data = prepare_data(recipe, dataset, task, streams, dtype, place, dataset_cache, elsewhere)
    dataset = data.dataset
    augment = parse_augment(recipe.augment)
    if augment:
        refuse_augmenting(dataset.inputs)
    net = build_recipe_net(recipe, task, dataset, streams, dtype, half, place)
    kind = describe_local_step(recipe, task, dataset)
    smoke_test_user_parts(method, f"{kind}, {place}", lambda: make_smoke_setup(net, dataset.inputs, dataset.targets))
    net = method.model(net)
    refuse_accumulation(net, optimiser)
    refuse_unmatched_groups(net, optimiser)

    get_samples, sizes = data.make_device_samples(), data.population.sizes
    if net.mixes_batch:
        if recipe.batch < 2:
            raise ShoalError("bad-value", "batch is 1, and batch norm needs several samples.", "Give 2 or more.")
        sizes = np.where(sizes < 2, 0, sizes)
    server_samples = get_samples(SERVER) if len(data.server_index) else None
    setup = TrainingSetup(method, net, streams, optimiser, get_samples, augment, kind=kind)
    memory = DeviceMemory(memory_folder, recipe.memory_mb * 2**20, place)
    evaluator, evaluate_model = build_evaluators(
        recipe, task, dataset, data.labels, data.population, data.classes, dtype
    )
    fleet = parse_fleet(recipe.fleet, streams, len(sizes), recipe.rounds)
    host = LocalDevices(setup, memory, SerialEngine())
    work = make_work_schedule(recipe, streams, fleet, data.population.sizes)
    device_tester = build_device_tester(recipe, dataset, data.own_tests, sizes, host, work)
    loop = Loop(
        method=method,
        host=host,
        fleet=fleet,
        streams=streams,
        sizes=sizes,
        sample=min(recipe.sample, len(sizes)),
        work=work,
        evaluate_model=evaluate_model,
        evaluates=lambda row: True,
        optimiser=optimiser,
        deadlines=Deadlines(recipe.failures, recipe.deadline, recipe.over_select),
        server=server_samples,
        tell_every=recipe.eval_every,
        measure_replies=LocalModelEvaluator(evaluator, get_samples, recipe.metrics),
        test_devices=device_tester or (lambda server_state, params, number: {}),
    )
    if not recipe.has_own_tests and has_personal_models(method, net):
        log.info("devices make models of their own, which nothing judges: --local-test 0.25 would")

    def list_doubts() -> Iterable[Doubt]:
        return chain(find_doubts(dataset, data.population.sizes), find_recipe_doubts(recipe, net, dataset))

    return Assembly(recipe, method, net, loop, memory, evaluator, data.summarise_split, list_doubts, device_tester)


def make_work_schedule(
    recipe: Recipe, streams: RandomStreams, fleet: Fleet | None = None, sizes: np.ndarray | None = None
) -> Callable[[int, int], Work]:
    """The function that gives the work of a device in a round; without fleet and sizes all devices are alike."""
    sizes = np.broadcast_to(1, recipe.devices) if sizes is None else sizes
    key = "steps" if recipe.steps else "epochs"
    amount = parse_amount(key, getattr(recipe, key)) or WorkAmount((1.0, 1.0))
    count_steps = round if amount.kind in PROPORTIONAL else int  # cut off, their mean would be half a step below
    draw_amount = make_amount_rule(key, amount, streams, fleet or UniformFleet(), sizes)
    compute_round_lr = make_round_lr(recipe)

    def make_work(round: int, device: int) -> Work:
        lr, drawn = compute_round_lr(round), draw_amount(round, device)
        if key == "steps":
            return Work(0.0, max(1, count_steps(drawn)), recipe.batch, lr)
        return Work(drawn, 0, recipe.batch, lr)

    return make_work
