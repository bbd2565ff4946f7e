"""Export the model of a run to a file: a PyTorch program, an ONNX model, or bare tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.runs.export_formats import (
    ExportDeviation,
    ExportOutput,
    export_onnx,
    export_pt2,
    export_safetensors,
    require_onnx,
)
from shoal.runs.given_objects import hand_over_again
from shoal.runs.session import Result
from shoal.runs.store import RunFolder
from shoal.runs.trained_model import BATCHES, TrainedModel, load_trained_model
from shoal.storage.files import explain_disk_errors, write_bytes

WRITERS: dict[str, Callable[[TrainedModel], ExportOutput]] = {
    ".pt2": export_pt2,
    ".onnx": export_onnx,
    ".safetensors": export_safetensors,
}


@dataclass(frozen=True)
class ExportedModel:
    """A file with a model in it; `str` of it is a description for whoever uses the file."""

    path: Path
    about: dict[str, Any]
    """Facts about the model, which are in the file, too."""
    deviation: ExportDeviation | None
    """How far the file's logits are from the model's; None where they were not compared."""
    with_frozen: bool = False
    """Whether frozen tensors are in a .safetensors file, too."""

    def __str__(self) -> str:
        return "\n".join(describe_export(self))


def export(
    run: str | Path | Result,
    path: str | Path,
    *,
    data: Any = None,
    model: Any = None,
    task: Any = None,
    loss: Any = None,
    parts: Any = (),
    metrics: Any = (),
    fleet: Any = None,
    force: bool = False,
    with_frozen: bool = False,
    merged: bool = False,
    best: bool = False,
) -> ExportedModel:
    """Write the judged model of a run folder, at its newest checkpoint: `export("runs/first", "model.onnx")`.

    With `best`, the model of the best validation metric, which a run with `keep_best` has.

    The ending says how: .pt2, .onnx or .safetensors. `force` replaces a file that is there. A run that was begun with
    `data`, `model`, `task`, `loss`, `parts`, `metrics` or a `fleet` as objects needs the same ones again, unless the
    program still has them from then.

    A .safetensors file holds what was trained, and of frozen tensors the digest alone, unless `with_frozen`; a program
    (.pt2, .onnx) always holds everything, since it must run. With `merged` it holds all tensors of the model as they
    are without adapters: what the adapters learnt is added to the weights, which have the names of the base model.
    """
    folder, path = get_run_folder(run), Path(path)
    write = WRITERS.get(path.suffix.lower())
    if write is None:
        raise ShoalError("bad-value", f"{path} has no ending that is known.", f"End it with {' or '.join(WRITERS)}.")
    if merged and write is not export_safetensors:
        problem = f"{path} is a program, in which adapters are computed beside the weights."
        raise ShoalError("bad-value", problem, "Leave merged out, or end the name with .safetensors.")
    with explain_disk_errors(folder):
        RunFolder.open(folder, to_write=False)
    refuse_overwrite(path, folder, force)
    if write is export_onnx:
        require_onnx()
    with hand_over_again(folder, data, model, task, loss, parts=parts, metrics=metrics, fleet=fleet):
        trained = load_trained_model(folder, best)
    if write is export_onnx:
        trained = trained.to_float32()
    if merged:
        trained = trained.with_adapters_merged()
    elif with_frozen:
        trained = trained.with_frozen()
    content, deviation = write(trained)
    write_bytes(path, content)
    return ExportedModel(path, trained.about, deviation, with_frozen)


def refuse_overwrite(path: Path, folder: Path, force: bool) -> None:
    """Refuse to replace a file unless forced, and the run's checkpoint always."""
    with explain_disk_errors(path):
        own = (folder / "checkpoint.safetensors", *folder.glob("best-*.safetensors"))
        exists, is_own = path.exists(), path.resolve() in [file.resolve() for file in own]
    if is_own:
        what = "checkpoint" if path.name == own[0].name else "best model"
        raise ShoalError("bad-value", f"{path} is where the run keeps its {what}.", "Give another name.")
    if exists and not force:
        advice = "Give another name, or --force to replace it (force=True in Python)."
        raise ShoalError("bad-value", f"{path} is already there.", advice)


def get_run_folder(run: str | Path | Result) -> Path:
    where = run.recipe.out if isinstance(run, Result) else run
    if not str(where):
        raise ShoalError("no-run", "The run has no folder to export from.", "Run it with out='runs/NAME'.")
    return Path(where)


def describe_export(exported: ExportedModel) -> list[str]:
    """Lines that describe an exported file: model, headline, inputs, outputs, and how it was checked."""
    about, is_bare = exported.about, exported.path.suffix.lower() == ".safetensors"
    rounds, headline = about["rounds"], about.get("headline", "accuracy")
    after = about[f"{headline}_after"]
    judged = f"{headline} {about[headline]:.4f} after round {after}" if after else "not evaluated yet"
    judged += ", the best on validation samples" if about.get("best") else ""
    lines = [
        f"{exported.path}: {about['model']} trained by {about['method']} for {rounds} round{'s' * (rounds != 1)}",
        f"{about['parameters']:,} numbers, {judged}",
        f"takes {describe_model_inputs(about)}",
        f"gives {'outputs' if 'headline' in about else 'logits'} {format_shape(about['output_shape'])}",
    ]
    if "kept" in about:
        lines.append("pruned: " + ", ".join(f"{len(units)} units of {axis}" for axis, units in about["kept"].items()))
    if "merged" in about:
        lines.append("its adapters are added to the weights, which have the names of the model without adapters")
    if "frozen" in about and is_bare:
        frozen, holds = about["frozen"], "with" if exported.with_frozen else "without"
        lines.append(f"{holds} its {frozen['parameters']:,} frozen numbers, whose digest is {frozen['digest']}")
    if "normalise" in about:
        few = len(about["normalise"]["mean"]) <= 4
        values = [f"{k} {' '.join(f'{v:.4g}' for v in vs)}" for k, vs in about["normalise"].items()]
        moments = " and ".join(values) if few else "the mean and the deviation in its metadata"
        lines.append(f"normalise inputs first, by {moments}" if is_bare else f"normalises inputs itself, by {moments}")
    if "table" in about:
        columns = about["table"]["columns"]
        texts = sum(len(column.get("categories", ())) for column in columns)
        names = f", and names {texts} texts of categories" if texts else ""
        lines.append(f"knows how {len(columns)} columns of a table become its inputs{names}: shoal predict")
    if exported.deviation:
        sizes, (max_error, max_logit) = " and ".join(map(str, BATCHES)), exported.deviation
        lines.append(
            f"tried on batches of {sizes}: logits up to {max_logit:.2g}, at most {max_error:.1g} away from the model's"
        )
    elif not is_bare:
        lines.append("not tried: onnxruntime is not installed")
    return lines


def describe_model_inputs(about: dict[str, Any]) -> str:
    """Type, shape and range of what a model takes; of a dict or tuple, those of each tensor."""
    keys = ("input_dtype", "input_shape", "input_range")
    facts = [about[key] for key in keys]
    if isinstance(facts[0], str):
        dtype, shape, (low, high) = facts
        return f"{dtype} {format_shape(shape)} as read from the data, {low:g} to {high:g}"
    names = list(facts[0]) if isinstance(facts[0], dict) else range(len(facts[0]))
    own = [describe_model_inputs(dict(zip(keys, (fact[name] for fact in facts)))) for name in names]
    return "; ".join(f"{name}: {text}" for name, text in zip(names, own))


def format_shape(shape: list[int]) -> str:
    return f"({', '.join(map(str, ['batch', *shape]))})"
