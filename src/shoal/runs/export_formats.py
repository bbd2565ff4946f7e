"""File formats of an exported model: safetensors, pt2 and ONNX; programs are checked on a few inputs when made."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import BytesIO, StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from shoal.core.errors import ShoalError, describe_error
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs
from shoal.runs.trained_model import BATCHES, TrainedModel


class ExportDeviation(NamedTuple):
    """The largest difference between the file's logits and the model's, and the model's largest logit."""

    max_error: float
    max_logit: float


ExportOutput = tuple[bytes, ExportDeviation | None]
"""The bytes of the file, and its deviation from the model; None where it was not tried."""


def export_safetensors(model: TrainedModel) -> ExportOutput:
    """The tensors by name, and what is known about them as JSON under `about` in the metadata.

    `shoal` holds the three facts of the first version of this file. The header is written here, since safetensors
    puts metadata in another order every time, and the same run shall give the same bytes.
    """
    from safetensors.torch import save

    content = save({k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in model.params.items()})
    size = int.from_bytes(content[:8], "little")
    first = {k: model.about[k] for k in ("model", "method", "rounds")}
    about = {"shoal": json.dumps(first), "about": json.dumps(model.about)}
    header = json.dumps({"__metadata__": about} | json.loads(content[8 : 8 + size])).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + size :], None


def export_pt2(model: TrainedModel) -> ExportOutput:
    """A program for `torch.export.load`, for batches of any size; `about.json` is among its extra files."""
    with wrap_export_errors(model):
        file = BytesIO()
        torch.export.save(trace_program(model), file, extra_files={"about.json": json.dumps(model.about)})
        content = file.getvalue()
        loaded: Any = torch.export.load(BytesIO(content)).module()
        return content, compare_outputs(model, loaded)


def export_onnx(model: TrainedModel) -> ExportOutput:
    """An ONNX model with one input, `input`, and one output, `logits`; `about` is in its metadata.

    Where the model takes a dict, the inputs have the names of its tensors; of a tuple, input_0, input_1 and so on.
    """
    names = name_inputs(model.samples)
    with wrap_export_errors(model):
        program = torch.onnx.export(
            trace_program(model),
            dynamo=True,
            verbose=False,
            dynamic_shapes=(tree.map_tensors(lambda _: {0: "batch"}, model.samples),),
            input_names=names,
            output_names=["logits"],
        )
        assert program
        program.model.metadata_props["about"] = json.dumps(model.about)
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()
        content = program.model_proto.SerializeToString()
        if find_spec("onnxruntime") is None:
            return content, None
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

        def run_session(inputs: Inputs) -> Tensor:
            given = zip(names, (t.numpy() for t in tree.collect_tensors(inputs)))
            return torch.from_numpy(session.run(None, dict(given))[0])

        return content, compare_outputs(model, run_session)


def name_inputs(inputs: Inputs) -> list[str]:
    """The names of the inputs in an ONNX model."""
    if isinstance(inputs, Tensor):
        return ["input"]
    return list(inputs) if isinstance(inputs, dict) else [f"input_{i}" for i in range(len(inputs))]


def require_onnx() -> None:
    """Refuse to go on without the packages that write ONNX, before anything is read."""
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            problem = f"An .onnx file is written with {package}, which is not installed."
            raise ShoalError("missing-extra", problem, "Run: pip install 'shoal[export]'.")


# what both programs share ---------------------------------------------------------------------------------------------
def trace_program(model: TrainedModel) -> torch.export.ExportedProgram:
    """The model as a graph of tensor operations, traced on zeros; paths of source files are removed from it."""
    zeros = tree.map_tensors(lambda t: torch.zeros_like(t[:2]), model.samples)
    batch = torch.export.Dim("batch")
    sizes = (tree.map_tensors(lambda _: {0: batch}, model.samples),)
    with torch.no_grad():
        try:
            program = torch.export.export(model.module, (zeros,), dynamic_shapes=sizes)
        except Exception:  # reading its byte code takes longer, and gets along with len(x) where running it does not
            program = torch.export.export(model.module, (zeros,), dynamic_shapes=sizes, strict=True)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


@torch.no_grad()
def compare_outputs(model: TrainedModel, loaded: Callable[[Inputs], Tensor] | Module) -> ExportDeviation:
    """The largest deviation of a file's logits from the model's on batches of several sizes; a large one is refused."""
    deviation = ExportDeviation(0.0, 0.0)
    for size in BATCHES:
        samples = tree.map_tensors(lambda t: t[:size], model.samples)
        expected, actual = model.module(samples), loaded(samples)
        finite = expected.isfinite()
        max_error, max_logit = (float(torch.where(finite, v, 0).abs().max()) for v in (actual - expected, expected))
        deviation = ExportDeviation(max(deviation.max_error, max_error), max(deviation.max_logit, max_logit))
        if not torch.equal(actual.isfinite(), finite) or max_error > 1e-3 * max(1.0, max_logit):
            why = f"what the file computes is up to {max_error:.1g} away from what the model does"
            raise not_exportable_error(model, why, "Take what is drawn at random out of its forward")
    return deviation


@contextmanager
def wrap_export_errors(model: TrainedModel) -> Iterator[None]:
    """Inside, torch prints and logs nothing, and what it raises becomes one sentence about the model."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    except ShoalError:
        raise
    except Exception as error:
        raise not_exportable_error(model, explain_export_error(error)) from error
    finally:
        logging.disable(before)


def explain_export_error(error: BaseException) -> str:
    while error.__cause__:
        error = error.__cause__
    if "Constraints violated" in str(error):
        return "its forward is bound to one size of batch"
    return f"torch cannot follow its forward ({describe_error(error).rstrip('.')})"


def not_exportable_error(
    model: TrainedModel, why: str, advice: str = "Use tensor operations alone in its forward"
) -> ShoalError:
    problem = f"{model.about['model']} cannot be exported: {why}."
    return ShoalError("bad-part", problem, f"{advice}, or export to .safetensors.")
