"""Trying a model before a run: its shapes, sizes and costs, whether it can be vectorised, what methods do with it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from shoal.core.compose import Method
from shoal.core.model.net import Net
from shoal.engines.threads import use_threads
from shoal.plugins.smoke_run import make_smoke_setup
from shoal.runs.build import Assembly, assemble_run
from shoal.runs.engine_choice import EngineChoice, build_engine, use_engine_settings
from shoal.runs.engine_trial import make_short_tasks
from shoal.runs.method_trials import MethodTrial, find_obstacle, list_method_names, quiet_log, try_methods
from shoal.runs.recipe import DEFAULTS, Recipe

STEPS, WIDTH = 4, 4
"""Local steps of a device, and devices in a call, by which the seconds of a step are measured."""


@dataclass(frozen=True)
class ModelCheck:
    """What was found about a model on the data of a recipe."""

    model: str
    data: str
    task: str
    inputs: str
    """The shape of a sample, or what its tensors are."""
    outputs: int
    parameters: int
    """Numbers that devices train."""
    frozen: int
    buffers: int
    """Numbers that travel without being trained, such as the statistics of batch norm."""
    tied: dict[str, str]
    """Further names of tensors that several layers hold, with their first names."""
    axes: dict[str, int]
    """Widths that methods may shrink, with their units."""
    blocks: tuple[str, ...]
    has_dropout: bool
    mixes_batch: bool
    macs: int
    """Multiply-accumulates of one sample forward."""
    batch: int
    step_seconds: dict[str, float]
    """Seconds of a local step of one device, by engine."""
    obstacle: str
    """Why its steps cannot be made for many devices in one call; empty where they can."""
    methods: tuple[MethodTrial, ...]

    @property
    def is_vectorised(self) -> bool:
        return not self.obstacle

    def group_refusals(self) -> dict[str, list[MethodTrial]]:
        """The methods that refuse the model, by cause."""
        causes: dict[str, list[MethodTrial]] = {}
        for trial in self.methods:
            if not trial.trains:
                causes.setdefault(trial.cause, []).append(trial)
        return causes

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        methods = [asdict(trial) | {"trains": trial.trains} for trial in self.methods]
        return asdict(self) | {"vectorised": self.is_vectorised, "methods": methods}


@use_threads(1)
def check_model(recipe: Recipe, methods: Sequence[str] = ()) -> ModelCheck:
    """Try the recipe's model on its data, with all methods or those named; one that cannot be used is refused.

    Where the recipe says nothing of devices there are a few, with samples at random.
    """
    recipe = fit_to_check(recipe)
    assembly = assemble_run(recipe)
    net, samples = assembly.net, assembly.loop.host.setup.samples(0)
    setting = make_smoke_setup(net, samples.inputs, samples.targets)
    with quiet_log():
        obstacle = find_obstacle(Method(), setting)
        seconds = {"serial": measure_step(EngineChoice("serial"), assembly, 1)}
        if not obstacle:
            seconds["batched"] = measure_step(EngineChoice("batched", WIDTH), assembly, WIDTH)
    names = methods or list_method_names(recipe.parts)
    trials = try_methods(names, setting, assembly.loop.optimiser, recipe.parts)
    return ModelCheck(
        model=recipe.model,
        data=recipe.data,
        task=net.task.name,
        inputs=str(net.input_shape),
        outputs=net.classes,
        parameters=count_numbers(net, net.trainable),
        frozen=sum(value.numel() for value in net.frozen.values()),
        buffers=count_numbers(net, net.buffers),
        tied=dict(net.ties),
        axes={axis.name: axis.size for axis in net.axes},
        blocks=tuple(block.name for block in net.blocks),
        has_dropout=net.has_dropout,
        mixes_batch=net.mixes_batch,
        macs=net.macs_forward,
        batch=recipe.batch,
        step_seconds=seconds,
        obstacle=obstacle,
        methods=tuple(trials),
    )


def fit_to_check(recipe: Recipe) -> Recipe:
    """The recipe with FedAvg on a few devices with samples at random, as far as it says nothing else of devices."""
    values: dict[str, Any] = {"method": "fedavg", "rounds": 1, "engine": "serial", "out": ""}
    if recipe.split == DEFAULTS["split"]:
        values["split"] = "iid"
        if recipe.devices == DEFAULTS["devices"]:
            values["devices"] = WIDTH
    devices = values.get("devices", recipe.devices)
    values["sample"] = min(WIDTH, devices) if devices else WIDTH
    return replace(recipe, **values)


def measure_step(pick: EngineChoice, assembly: Assembly, devices: int) -> float:
    """Seconds of a local step of one device, the least of three calls after one that sets up."""
    tasks, times = make_short_tasks(assembly, devices, STEPS), []
    with use_engine_settings(pick):
        engine = build_engine(pick)
        try:
            for _ in range(4):
                start = perf_counter()
                engine.train(tasks)
                times.append(perf_counter() - start)
        finally:
            engine.close()
    return min(times[1:]) / (STEPS * devices)


def count_numbers(net: Net, names: Sequence[str]) -> int:
    """How many numbers the tensors of these names have together."""
    return sum(net.initial[name].numel() for name in names)
