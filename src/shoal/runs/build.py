"""Build a run from its recipe: data, split, model, method, fleet, evaluator and the loop that plays its rounds."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.ledger import Deadlines
from shoal.core.local.device import TrainingSetup
from shoal.core.local.optimiser_checks import refuse_accumulation, refuse_optimiser_clashes
from shoal.core.measures.evaluate import Evaluator
from shoal.core.measures.local_models import LocalModelEvaluator
from shoal.core.metric import ASKED, Metric, list_run_metrics
from shoal.core.model import tree
from shoal.core.model.inputs import make_example
from shoal.core.model.net import Net
from shoal.core.round import Loop
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Work
from shoal.data.augment import parse_augment
from shoal.data.dataset import Dataset, get_single_tensor
from shoal.data.noniid_degree import count_labels_by_device, summarise_population
from shoal.data.plausibility import Doubt, find_doubts
from shoal.data.population import Population
from shoal.engines.deterministic import fix_cublas_workspace
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.engines.threads import use_threads
from shoal.fleet.fleets import parse_fleet
from shoal.models import build_model
from shoal.plugins.load import load_method, smoke_test_user_parts
from shoal.plugins.metrics import load_metric_factories
from shoal.plugins.smoke_run import make_smoke_setup
from shoal.runs.headline import check_headline
from shoal.runs.recipe import Recipe, parse_amount
from shoal.runs.recipe_data import convert_dataset, load_recipe_dataset, split_dataset
from shoal.runs.recipe_optimiser import make_optimiser, make_round_lr
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
    """Finds what is implausible about the data, to be told before the first round."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """What the rows of this run may hold, by column."""
        return list_run_metrics(self.method, self.recipe.metrics)


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
    check_headline(recipe, list_run_metrics(method, recipe.metrics))
    optimiser = make_optimiser(recipe)
    refuse_optimiser_clashes(method, optimiser)
    streams = RandomStreams(recipe.seed)
    place = parse_compute_device(recipe.compute)
    if recipe.deterministic and place.type == "cuda":
        fix_cublas_workspace()
    dtype, half = set_precision(recipe.precision, place)
    dataset = load_recipe_dataset(recipe, streams)
    labels = dataset.targets.numpy()
    population, server_index = split_dataset(recipe, dataset, streams, elsewhere)
    key = (recipe.data, recipe.data_dir, recipe.normalise, dtype, place, recipe.validation and recipe.seed)
    dataset_cache = {} if dataset_cache is None else dataset_cache
    if key not in dataset_cache:
        dataset_cache[key] = convert_dataset(dataset, recipe.normalise, dtype, place)
    dataset = dataset_cache[key]
    augment = parse_augment(recipe.augment)
    if augment:
        get_single_tensor(dataset.inputs, "augment")
    kind = f"{recipe.model} on {dataset.input_shape}, {dataset.classes} classes, {recipe.precision}"
    net = replace(build_first_net(recipe, dataset, streams, dtype, place), half=half)
    smoke_test_user_parts(method, f"{kind}, {place}", lambda: make_smoke_setup(net, dataset.inputs, dataset.targets))
    net = method.model(net)
    refuse_accumulation(net, optimiser)

    def get_samples(device: int) -> Samples:
        index = server_index if device == SERVER else population[device]
        return Samples(dataset.inputs, dataset.targets, torch.from_numpy(index))

    sizes = population.sizes
    if net.mixes_batch:
        if recipe.batch < 2:
            raise ShoalError("bad-value", "batch is 1, and batch norm needs several samples.", "Give 2 or more.")
        sizes = np.where(sizes < 2, 0, sizes)
    server_samples = get_samples(SERVER) if len(server_index) else None
    setup = TrainingSetup(method, net, streams, optimiser, get_samples, augment, kind=kind)
    memory = DeviceMemory(memory_folder, recipe.memory_mb * 2**20, place)
    evaluator = build_evaluator(recipe, dataset, labels, population, dtype)
    loop = Loop(
        method=method,
        host=LocalDevices(setup, memory, SerialEngine()),
        fleet=parse_fleet(recipe.fleet, streams, recipe.devices, recipe.rounds),
        streams=streams,
        sizes=sizes,
        sample=recipe.sample,
        work=make_work_schedule(recipe, streams),
        evaluate_model=evaluator,
        evaluates=lambda row: True,
        optimiser=optimiser,
        deadlines=Deadlines(recipe.failures, recipe.deadline, recipe.over_select),
        server=server_samples,
        tell_every=recipe.eval_every,
        measure_replies=LocalModelEvaluator(evaluator, get_samples, recipe.metrics),
    )
    split = lambda: summarise_population(labels, population, server_index, dataset.classes)  # noqa: E731
    return Assembly(recipe, method, net, loop, memory, evaluator, split, lambda: find_doubts(dataset, population.sizes))


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
    recipe: Recipe, dataset: Dataset, streams: RandomStreams, dtype: torch.dtype, place: torch.device
) -> Net:
    """The net with its initial weights, drawn from the stream `init` or read from the recipe's file."""
    example = make_example(dataset.inputs)
    net = build_model(recipe.model, dataset.input_shape, dataset.classes, streams.derive_seed("init"), example)
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


def build_evaluator(
    recipe: Recipe, dataset: Dataset, labels: np.ndarray, population: Population, dtype: torch.dtype
) -> Evaluator:
    """The evaluator on the test set with the recipe's metrics; per device it knows the labels of the first 1,000."""
    for metric in recipe.metrics:
        if ".py:" not in metric and metric not in ASKED:
            raise unknown_name_error("metric", metric, ASKED)
    specs = [metric for metric in recipe.metrics if ".py:" in metric]
    user_metrics = load_metric_factories(specs, dataset, dtype)
    by_device = None
    if {"devices", "local"} & set(recipe.metrics):
        by_device = count_labels_by_device(labels, population, dataset.classes, min(len(population), 1000))
    index = torch.arange(len(dataset.test_targets))
    samples = Samples(dataset.test_inputs, dataset.test_targets, index)
    return Evaluator(samples, dataset.classes, recipe.metrics, by_device, user_metrics)


def make_work_schedule(recipe: Recipe, streams: RandomStreams) -> Callable[[int, int], Work]:
    """The function that gives the work of a device in a round; unequal amounts are drawn from the stream `work`."""
    epochs, steps = parse_amount("epochs", recipe.epochs), parse_amount("steps", recipe.steps)
    compute_round_lr = make_round_lr(recipe)

    def draw_amount(ends: tuple[float, float], round: int, device: int) -> float:
        low, high = ends
        if low == high:
            return low
        generator = streams.make_numpy_generator("work", round, device)
        whole = low == int(low) and high == int(high)
        return float(generator.integers(int(low), int(high) + 1) if whole else generator.uniform(low, high))

    def make_work(round: int, device: int) -> Work:
        lr = compute_round_lr(round)
        if steps:
            return Work(0.0, max(1, int(draw_amount(steps, round, device))), recipe.batch, lr)
        return Work(draw_amount(epochs or (1.0, 1.0), round, device), 0, recipe.batch, lr)

    return make_work
