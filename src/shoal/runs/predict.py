"""Predictions for new rows of a table, by an exported model or by that of a run folder."""

import csv
import io
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.builtin_tasks import TASKS
from shoal.core.errors import ShoalError, describe_error
from shoal.data.row_encoding import TableEncoding, parse_table_encoding
from shoal.data.table_sources import read_sample_table
from shoal.data.user_split import make_data_error
from shoal.display.data_frame import make_data_frame
from shoal.runs.trained_model import load_trained_model
from shoal.storage.files import damaged_file_error, explain_disk_errors, write_bytes

ROWS_AT_ONCE = 4096
"""Rows that go through the model in one call."""
Program = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says of new rows: columns of one value per row, in the order of the rows."""

    columns: dict[str, list[Any]]
    """`prediction`, and the probabilities of classes as `p_NAME`; of several targets a column for each.

    Where `p_NAME` is itself a target, the probability of NAME is `p_NAME_2`.
    """
    remarks: tuple[str, ...] = ()
    """What the rows have that training could not show."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def list_rows(self) -> list[dict[str, Any]]:
        """One dict per row."""
        return [dict(zip(self.columns, values)) for values in zip(*self.columns.values())]

    def to_pandas(self) -> Any:
        """The columns as a DataFrame."""
        return make_data_frame(self.list_rows())

    def to_csv(self) -> str:
        """The text of a CSV file with a head; real numbers have seven digits."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for values in zip(*self.columns.values()):
            writer.writerow([f"{own:.7g}" if isinstance(own, float) else own for own in values])
        return text.getvalue()

    def write(self, path: str | Path) -> None:
        """Write the CSV file, whole or not at all."""
        write_bytes(Path(path), self.to_csv().encode())


def predict(model: str | Path, rows: Any) -> Predictions:
    """What a model says of new rows: `predict("model.pt2", "new.csv")`.

    `model` is a .pt2 or .onnx file that `export` wrote of a run on a table, or the folder of such a run. `rows` is a
    CSV or parquet file or a frame with the columns that it was trained on, encoded as the training half was; further
    columns are not looked at.
    """
    path = Path(model)
    program, about = load_program(path)
    encoding = read_encoding(path, about)
    table = read_sample_table(rows, encoding.missing, encoding.kinds)
    if table is None:
        what = str(rows)[:80] if isinstance(rows, str | Path) else f"A {type(rows).__name__}"
        raise make_data_error(f"{what} is no table.", "Give a frame, or a CSV or parquet file.")
    inputs, remarks = encoding.encode_rows(table)
    outputs = run_program(path, program, inputs, str(about.get("input_dtype")))
    return Predictions(name_outputs(about["table"].get("task", ""), outputs, encoding), tuple(remarks))


def read_encoding(path: Path, about: dict[str, Any]) -> TableEncoding:
    """How the model of a file reads the columns of a table, as the file notes it."""
    if not isinstance(about, dict) or "table" not in about:
        problem = f"{path} does not say how the columns of a table become its inputs."
        advice = (
            "Only models trained on a table of numbers, dates and categories do, exported by this version or later."
        )
        raise ShoalError("bad-value", problem, advice)
    try:
        return parse_table_encoding(about["table"])
    except ValueError as error:
        raise damaged_file_error(path, str(error)) from error


def run_program(path: Path, program: Program, inputs: Tensor, dtype_name: str) -> Tensor:
    """The outputs for all inputs, which are given in the type that the file notes; a program that fails is damaged."""
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise damaged_file_error(path, "it does not say in which type of numbers it computes")
    try:
        with torch.no_grad():
            return torch.cat([program(some) for some in inputs.to(dtype).split(ROWS_AT_ONCE)])
    except MemoryError:
        raise
    except Exception as error:
        raise damaged_file_error(path, f"its program fails: {describe_error(error)}") from error


def name_outputs(task: str, outputs: Tensor, encoding: TableEncoding) -> dict[str, list[Any]]:
    """Outputs of a built-in task as columns of predictions and probabilities; those of other tasks as they are."""
    outputs = outputs.reshape(len(outputs), -1)
    labels = [name.strip() for name in encoding.label.split(",")]
    labels = labels if len(labels) == outputs.shape[1] else [str(i + 1) for i in range(outputs.shape[1])]
    names = encoding.class_names
    match task:
        case "classify":
            classes: Sequence[Any] = names if len(names) == outputs.shape[1] else range(outputs.shape[1])
            chances = TASKS[task].predict(outputs)
            found = {"prediction": [classes[i] for i in chances.argmax(1).tolist()]}
            return found | {f"p_{name}": column for name, column in zip(classes, chances.T.tolist())}
        case "binary":
            classes = names if len(names) == 2 else (0, 1)
            chances = TASKS[task].predict(outputs)[:, 0].tolist()
            return {"prediction": [classes[p > 0.5] for p in chances], f"p_{classes[1]}": chances}
        case "multilabel":
            chances = TASKS[task].predict(outputs)
            given = dict(zip(labels, (chances > 0.5).long().T.tolist()))
            return given | dict(zip(name_chances(labels), chances.T.tolist()))
        case "regress":
            return dict(zip(["prediction"] if len(labels) == 1 else labels, outputs.T.tolist()))
    return {f"output_{i + 1}": column for i, column in enumerate(outputs.T.tolist())}


def name_chances(labels: Sequence[str]) -> list[str]:
    """The columns of the probabilities of targets: `p_NAME`, with a number behind it where another column has that."""
    names = [f"p_{label}" for label in labels]
    taken = {*labels, *names}
    for i, name in enumerate(names):
        if name in labels:
            names[i] = next(own for number in count(2) if (own := f"{name}_{number}") not in taken)
            taken.add(names[i])
    return names


def load_program(path: Path) -> tuple[Program, dict[str, Any]]:
    """The function of a .pt2 or .onnx file, or of a run folder, and what it says about itself."""
    with explain_disk_errors(path):
        is_folder, is_there = path.is_dir(), path.exists()
    if is_folder:
        trained = load_trained_model(path)
        return trained.module, trained.about
    readers = {".pt2": read_pt2, ".onnx": read_onnx}
    if not is_there:
        raise ShoalError("no-data", f"There is no file or folder {path}.", "Correct the name.")
    if path.suffix.lower() not in readers:
        problem = f"{path} is no program" + (": it holds tensors alone." if path.suffix == ".safetensors" else ".")
        raise ShoalError("bad-value", problem, "Give a .pt2 or .onnx file of `shoal export`, or the folder of a run.")
    try:
        return readers[path.suffix.lower()](path)
    except ShoalError:
        raise
    except Exception as error:
        raise damaged_file_error(path, describe_error(error)) from error


def read_pt2(path: Path) -> tuple[Program, dict[str, Any]]:
    extra = {"about.json": ""}
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        program: Any = torch.export.load(path, extra_files=extra).module()
    return program, json.loads(extra["about.json"] or "{}")


def read_onnx(path: Path) -> tuple[Program, dict[str, Any]]:
    if find_spec("onnxruntime") is None:
        problem = "An .onnx file is run by onnxruntime, which is not installed."
        raise ShoalError("missing-extra", problem, "Run: pip install 'shoal[export]'.")
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map.get("about", "{}"))
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]), about
