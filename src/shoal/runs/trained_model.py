"""The model that a run has trained so far, as it is evaluated, with what has to be known to use it."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs, count_samples, scale_pixels, take_rows
from shoal.core.model.low_rank import merge_adapters
from shoal.core.model.module_call import call_module
from shoal.core.model.net import Net
from shoal.core.model.outputs import LogitsModel
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params
from shoal.core.streams import RandomStreams
from shoal.core.version import VERSION
from shoal.data.dataset import has_moments
from shoal.runs.best_model import BestModel, read_best_model
from shoal.runs.build import assemble_run
from shoal.runs.engine_choice import EngineChoice, parse_engine_choice, use_engine_settings
from shoal.runs.given_objects import describe_way_to_resume, refuse_missing_objects
from shoal.runs.history import History
from shoal.runs.model_content import refuse_changed_config
from shoal.runs.prepared_data import DatasetCache
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import load_recipe_dataset
from shoal.runs.session import Result, blame_user_parts
from shoal.runs.store import RunFolder
from shoal.storage.files import explain_disk_errors

BATCHES = (1, 7)
"""Sizes of the batches on which an exported file is compared with the model."""


class NormalisingModel(nn.Module):
    """A model that takes inputs as they are read and normalises them itself."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: nn.Module, mean: Tensor, deviation: Tensor):
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x - self.mean) / self.deviation)


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model on the CPU, ready to be written."""

    module: nn.Module
    """Takes inputs as they are read from the data, also where training normalised them."""
    params: Params
    """The tensors of the model without normalisation: it takes normalised inputs where training did."""
    samples: Inputs
    """A few inputs to try an exported file on; they are not written."""
    about: dict[str, Any]
    frozen: Params = field(default_factory=dict)
    """Those of the model's tensors that no run changes; `params` is without them."""
    net: Net | None = None
    """The net of the params."""

    def with_frozen(self) -> "TrainedModel":
        """The same model with the frozen tensors among its params."""
        return replace(self, params=self.params | self.frozen)

    def with_adapters_merged(self) -> "TrainedModel":
        """The same model with its adapters added to the weights, and all tensors named as without adapters."""
        assert self.net is not None
        params = merge_adapters(self.net, self.params)
        about = {key: value for key, value in self.about.items() if key not in ("frozen", "kept")}
        about |= {"parameters": sum(v.numel() for v in params.values()), "merged": True}
        return replace(self, params=params, about=about, frozen={})

    def to_float32(self) -> "TrainedModel":
        """The same model in float32, which is what most runtimes compute in."""
        samples = tree.map_tensors(lambda t: t.float() if t.is_floating_point() else t, self.samples)
        about = self.about | {"input_dtype": describe_tensors(samples, lambda t: format_dtype(t.dtype))}
        return replace(self, module=deepcopy(self.module).float(), samples=samples, about=about)


def load_trained_model(path: Path, best: bool = False) -> TrainedModel:
    """The model of a run folder at its newest checkpoint, or the best one kept; nothing is trained or written."""
    with explain_disk_errors(path):
        folder = RunFolder.open(path, to_write=False)
    recipe = folder.read_recipe()
    if not folder.checkpoint_file.exists():
        raise ShoalError(
            "no-run",
            f"{path} has no checkpoint yet.",
            f"Go on with it by {describe_way_to_resume(path, recipe)} first.",
        )
    refuse_missing_objects(recipe, path, "shoal.export({}, FILE{})")
    refuse_changed_config(folder, recipe)
    dataset_cache: DatasetCache = {}
    cpu_recipe = replace(recipe, compute="cpu", precision="float32" if recipe.precision == "tf32" else recipe.precision)
    assembly = assemble_run(cpu_recipe, dataset_cache=dataset_cache)
    checkpoint = folder.read_checkpoint(recipe, assembly.net, assembly.method.names)
    assert checkpoint
    net = checkpoint.server_state.net
    pick = parse_engine_choice(folder.read_note("engine")) or EngineChoice("serial", threads=recipe.threads or 1)
    with blame_user_parts(assembly), use_engine_settings(pick):
        params = assembly.loop.make_final_params(checkpoint.server_state, checkpoint.rounds)
    history, cuts = folder.read_history_until(checkpoint), checkpoint.server_state.cuts
    if best:
        kept = require_best_model(folder, recipe, history, assembly.net)
        net, params, cuts, history = kept.net, kept.params, kept.cuts, history.cut(kept.rounds)
    module, (data,), moments = Result(recipe, history, net, params).module(), dataset_cache.values(), None
    with torch.no_grad():
        returned = call_module(module, net.make_example_inputs(1), net.call_form)
    if net.call_form != "one" or not isinstance(returned, Tensor):
        module = LogitsModel(module, net.call_form)
    if recipe.normalises and has_moments(data.inputs):
        data = load_recipe_dataset(cpu_recipe, RandomStreams(cpu_recipe.seed)).to(net.dtype, net.place)
        moments = mean, deviation = data.find_moments(recipe.normalise_by)
        module = NormalisingModel(module, mean, deviation)
    inputs = data.test_inputs if count_samples(data.test_inputs) else data.inputs
    samples = scale_pixels(take_rows(inputs, torch.arange(max(BATCHES)) % count_samples(inputs)))
    with torch.no_grad():
        output_shape = list(module(samples).shape[1:])
    about = describe_training(recipe, history) | ({"best": True} if best else {})
    about |= {
        "parameters": sum(v.numel() for v in params.values()),
        "classes": net.classes,
        "input_shape": describe_tensors(samples, lambda t: list(t.shape[1:])),
        "input_dtype": describe_tensors(samples, lambda t: format_dtype(t.dtype)),
        "input_range": describe_tensors(inputs, lambda t: [t.min().item(), t.max().item()]),
        "output_shape": output_shape,
    }
    if moments:
        about["normalise"] = {k: v.flatten().tolist() for k, v in zip(("mean", "deviation"), moments)}
    if data.encoding:
        about["table"] = data.encoding.to_dict() | {"task": net.task.name}
    if cuts:
        about["kept"] = list_kept_units(cuts)
    if net.frozen:
        about["frozen"] = {"digest": net.digest, "parameters": sum(v.numel() for v in net.frozen.values())}
    return TrainedModel(module.eval(), params, samples, about, net.frozen, net)


def require_best_model(folder: RunFolder, recipe: Recipe, history: History, net: Net) -> BestModel:
    """The best model that a run kept; refused where it kept none."""
    if not recipe.keep_best:
        problem = f"{folder.path} kept no best model: its recipe does not say keep_best."
        raise ShoalError("no-run", problem, "Run it with --keep-best --validation 0.1, or export without --best.")
    model = read_best_model(folder, history, net)
    if model is None:
        problem = f"{folder.path} holds no best model: no round was evaluated, or its file is gone."
        raise ShoalError("no-run", problem, "Export without --best, or run it again.")
    return model


def describe_training(recipe: Recipe, history: History) -> dict[str, Any]:
    """Model, method, rounds and headline of a run; of paths only the last name, which gives nothing away."""
    headline = "accuracy" if "accuracy" in (history.rows[-1] if history.rows else ["accuracy"]) else history.headline
    evaluated = [row for row in history.rows if row.get(headline) is not None]
    return {
        "shoal": VERSION,
        "model": Path(recipe.model).name,
        "method": recipe.method,
        "rounds": len(history),
        headline: evaluated[-1][headline] if evaluated else None,
        f"{headline}_after": evaluated[-1]["round"] + 1 if evaluated else None,
    } | ({} if headline == "accuracy" else {"headline": headline})


def describe_tensors(inputs: Inputs, describe: Callable[[Tensor], Any]) -> Any:
    """A fact about the inputs, ready for JSON: by name where they are a dict, as a list where they are a tuple."""
    if isinstance(inputs, Tensor):
        return describe(inputs)
    if isinstance(inputs, dict):
        return {name: describe(value) for name, value in inputs.items()}
    return [describe(value) for value in inputs]


def list_kept_units(cuts: Sequence[Plan]) -> dict[str, list[int]]:
    """By axis, the units of the first model that are left after all prunings."""
    kept: dict[str, Tensor] = {}
    for cut in cuts:
        for axis, units in cut.kept.items():
            kept[axis] = kept[axis][units] if axis in kept else units
    return {axis: units.tolist() for axis, units in kept.items()}


def format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
