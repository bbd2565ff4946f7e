"""Build a run from its recipe: data, split, model, method, fleet, and the loop that plays its rounds."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from shoal.core.builtin_tasks import CLASSIFY, TASKS
from shoal.core.clashes import refuse_task
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.fleet_protocol import Fleet
from shoal.core.learning_task import LearningTask
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
from shoal.core.model import tree
from shoal.core.model.checkpointing import require_repeated_layers
from shoal.core.model.inputs import make_example
from shoal.core.model.net import Net
from shoal.core.round import Loop
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Work
from shoal.data.augment import parse_augment, refuse_augmenting
from shoal.data.dataset import Dataset
from shoal.data.device_samples import DeviceSamples
from shoal.data.feature_skew import skew_features
from shoal.data.local_tests import replace_test_half
from shoal.data.noniid_degree import summarise_population
from shoal.data.plausibility import Doubt, find_doubts
from shoal.data.splits import parse_split
from shoal.engines.deterministic import fix_cublas_workspace
from shoal.engines.device_tests import DeviceScorer
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.engines.threads import use_threads
from shoal.fleet.fleets import UniformFleet, parse_fleet
from shoal.models import MODELS, build_model
from shoal.models.hf_folder import fingerprint_hf_config, is_hf_model
from shoal.plugins.load import load_method, smoke_test_user_parts
from shoal.plugins.smoke_run import make_smoke_setup
from shoal.runs.given_objects import get_column_roles
from shoal.runs.headline import check_headline
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import (
    convert_dataset,
    count_devices,
    hold_out_own_tests,
    load_recipe_dataset,
    split_dataset,
)
from shoal.runs.recipe_doubts import find_recipe_doubts
from shoal.runs.recipe_evaluators import build_device_tester, build_evaluators, choose_headline, list_recipe_metrics
from shoal.runs.recipe_optimiser import make_optimiser, make_round_lr
from shoal.runs.recipe_task import build_task, check_step_on_model, check_task_on_model, describe_loss
from shoal.runs.task_targets import count_outputs, count_target_classes, derive_labels, fit_targets
from shoal.runs.work_amounts import WorkAmount, make_amount_rule, parse_amount
from shoal.storage.files import read_tensors
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


DatasetCache = dict[tuple, Dataset]
"""Data sets as they are trained on, shared by the runs of a comparison; the key is all that they depend on."""


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
    dataset = fit_targets(dataset, task)
    labels, label_count = derive_labels(task, dataset.targets)
    label_count = max(label_count, classes := count_target_classes(task, dataset))
    devices = count_devices(recipe, dataset)
    if not (recipe.devices or recipe.owner):
        told = (
            "split: %s, since the data say whose each sample is: %d devices; --split and --devices choose another one"
        )
        log.info(told, recipe.split, devices)
    population, server_index = split_dataset(recipe, dataset, streams, labels, elsewhere)
    whole_population = population
    own_tests = None
    if not elsewhere:
        population, own_tests = hold_out_own_tests(recipe, dataset, population, streams, labels)
    source = (recipe.data, recipe.data_dir, *get_column_roles(recipe).values())
    held_back = recipe.validation and (recipe.validation, recipe.stratify_validation, recipe.seed, recipe.evaluate_test)
    key = (*source, recipe.normalise, recipe.normalise_by, dtype, place, held_back, recipe.local_test_of, task.name)
    if is_hf_model(recipe.model):
        key += (recipe.model, recipe.text_length)
    dataset_cache = {} if dataset_cache is None else dataset_cache
    if key not in dataset_cache:
        dataset_cache[key] = convert_dataset(recipe, dataset, dtype, place)
    dataset = dataset_cache[key]
    if not elsewhere:
        dataset = skew_features(dataset, whole_population, parse_split(recipe.split).skews, streams)
    if own_tests is not None and recipe.local_test_of == "all":
        dataset = replace_test_half(dataset, np.concatenate(list(own_tests)))
    augment = parse_augment(recipe.augment)
    if augment:
        refuse_augmenting(dataset.inputs)
    outputs = count_outputs(task, dataset)
    kind = (
        f"{recipe.model} on {dataset.input_shape}, {outputs} classes, {recipe.precision}{describe_loss(recipe, task)}"
    )
    net = build_first_net(recipe, task, dataset, outputs, streams, dtype, place)
    net = replace(net, half=half, task=task, checkpointing=recipe.gradient_checkpointing)
    if net.checkpointing:
        require_repeated_layers(net.module, recipe.model)
    if is_hf_model(recipe.model):
        kind += f", {fingerprint_hf_config(recipe.model)}"
    if task.loss is not CLASSIFY.loss or recipe.model not in MODELS:
        loss_name = recipe.loss or (task.name if task.name not in TASKS else "")
        check_task_on_model(net, dataset, loss_name, recipe.model)
    if recipe.model not in MODELS or net.token_inputs:
        check_step_on_model(net, dataset, recipe.model)
    smoke_test_user_parts(method, f"{kind}, {place}", lambda: make_smoke_setup(net, dataset.inputs, dataset.targets))
    net = method.model(net)
    refuse_accumulation(net, optimiser)
    refuse_unmatched_groups(net, optimiser)

    get_samples = DeviceSamples(
        dataset.inputs, dataset.targets, lambda device: server_index if device == SERVER else population[device]
    )
    sizes = population.sizes
    if net.mixes_batch:
        if recipe.batch < 2:
            raise ShoalError("bad-value", "batch is 1, and batch norm needs several samples.", "Give 2 or more.")
        sizes = np.where(sizes < 2, 0, sizes)
    server_samples = get_samples(SERVER) if len(server_index) else None
    setup = TrainingSetup(method, net, streams, optimiser, get_samples, augment, kind=kind)
    memory = DeviceMemory(memory_folder, recipe.memory_mb * 2**20, place)
    evaluator, evaluate_model = build_evaluators(recipe, task, dataset, labels, population, classes, dtype)
    fleet = parse_fleet(recipe.fleet, streams, devices, recipe.rounds)
    host, work = (
        LocalDevices(setup, memory, SerialEngine()),
        make_work_schedule(recipe, streams, fleet, population.sizes),
    )
    device_tester = build_device_tester(recipe, dataset, own_tests, sizes, host, work)
    loop = Loop(
        method=method,
        host=host,
        fleet=fleet,
        streams=streams,
        sizes=sizes,
        sample=min(recipe.sample, devices),
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
    split = lambda: summarise_population(labels, population, server_index, label_count)  # noqa: E731

    def list_doubts() -> Iterable[Doubt]:
        return chain(find_doubts(dataset, population.sizes), find_recipe_doubts(recipe, net, dataset))

    return Assembly(recipe, method, net, loop, memory, evaluator, split, list_doubts, device_tester)


def set_precision(precision: str, place: torch.device) -> tuple[torch.dtype, bool]:
    """The dtype of weights and inputs, and whether layers compute in bfloat16; sets whether a GPU uses TF32."""
    gpu = place.type == "cuda"
    if precision == "auto" and gpu:
        log.info("numbers: float32 with products in TF32; --precision float32 for exact ones")
    if precision == "tf32" and not gpu:
        raise ShoalError("bad-value", "precision is tf32, and only a GPU has it.", "Use float32, bf16 or float64.")
    if gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("auto", "tf32")
    return torch.float64 if precision == "float64" else torch.float32, precision == "bf16"


def parse_compute_device(name: str) -> torch.device:
    """The torch device of a recipe's `compute`; one that this machine lacks is refused."""
    try:
        place = torch.device(name)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise ShoalError("bad-value", f"compute is {name[:40]!r}.", "It must be cpu, cuda or cuda:N.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ShoalError(
            "no-device", f"There is no compute device {name}: {count} GPUs were found.", "Use --compute cpu."
        )
    return place


def build_first_net(
    recipe: Recipe,
    task: LearningTask,
    dataset: Dataset,
    outputs: int,
    streams: RandomStreams,
    dtype: torch.dtype,
    place: torch.device,
) -> Net:
    """The net with its initial weights, drawn from the stream `init` or read from the recipe's file."""
    example = make_example(dataset.inputs)
    seed = streams.derive_seed("init")
    net = build_model(recipe.model, dataset.input_shape, outputs, seed, example, task.name, dataset.words)
    if recipe.init:
        if not Path(recipe.init).is_file():
            raise ShoalError("no-data", f"There is no file {recipe.init}.", "Give a file with first weights.")
        weights = read_tensors(Path(recipe.init))
        for name, value in (net.initial | net.frozen).items():
            if name in net.frozen and name not in weights:
                continue  # the model has brought its own
            if name not in weights or weights[name].shape != value.shape:
                shape = f"shape {tuple(weights[name].shape)}" if name in weights else "nothing"
                raise ShoalError(
                    "no-data",
                    f"{recipe.init} has {shape} for {name}, the model needs {tuple(value.shape)}.",
                    "Give weights of the same model.",
                )
        net.module.load_state_dict({k: weights[k] for k in (*net.initial, *net.frozen) if k in weights}, strict=False)
    net = replace(net, module=net.module.to(device=place, dtype=dtype))
    for name, value in net.initial.items():
        if not tree.is_tree_finite(value):
            source = recipe.init or f"The model {recipe.model}"
            raise ShoalError(
                "bad-value",
                f"{source} has first weights that are not finite ({name}), and nothing can be learnt from them.",
                "Give finite ones; a constant such as a mask belongs into a buffer with persistent=False.",
            )
    return net


def make_work_schedule(
    recipe: Recipe, streams: RandomStreams, fleet: Fleet | None = None, sizes: np.ndarray | None = None
) -> Callable[[int, int], Work]:
    """The function that gives the work of a device in a round; without fleet and sizes all devices are alike."""
    sizes = np.broadcast_to(1, recipe.devices) if sizes is None else sizes
    key = "steps" if recipe.steps else "epochs"
    amount = parse_amount(key, getattr(recipe, key)) or WorkAmount((1.0, 1.0))
    draw_amount = make_amount_rule(key, amount, streams, fleet or UniformFleet(), sizes)
    compute_round_lr = make_round_lr(recipe)

    def make_work(round: int, device: int) -> Work:
        lr, drawn = compute_round_lr(round), draw_amount(round, device)
        if key == "steps":
            return Work(0.0, max(1, int(drawn)), recipe.batch, lr)
        return Work(drawn, 0, recipe.batch, lr)

    return make_work
