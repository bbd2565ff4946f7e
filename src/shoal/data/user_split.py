"""The training or the test samples of a user's data: inputs and targets, checked and numbered."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError, describe_error
from shoal.core.losses import IGNORED_TARGET
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs

CLASSES = 1_000_000
"""More classes than this are taken for a mistake."""

NUMBERING = {
    "label": "Number the classes from 0 up, and give their number as classes if it is larger.",
    "word": "Number the words from 0 up.",
}
LOOKED_AT = 1000
"""So many sequences show whether targets are the words that come next."""

LARGEST = float(np.finfo(np.float32).max)


class UserSamples(NamedTuple):
    """Inputs, targets as numbers or as names of classes, and the device of each sample where it is known."""

    x: Inputs
    y: Tensor | list[str]
    owners: np.ndarray | None = None
    order: np.ndarray | None = None
    class_names: tuple[str, ...] = ()


def list_class_names(parts: list[UserSamples]) -> tuple[str, ...]:
    """What the classes are called, in the order in which `number_classes` numbers them; nothing for whole numbers."""
    if parts[0].class_names:
        return parts[0].class_names
    texts = {label for part in parts if isinstance(part.y, list) for label in part.y}
    return () if all(map(is_short_decimal, texts)) else tuple(sorted(texts))


def is_short_decimal(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def number_classes(parts: list[UserSamples]) -> list[tuple[Inputs, Tensor]]:
    """Names of classes become numbers: what they say where all are whole numbers, their sorted place otherwise."""
    texts = {label for part in parts if isinstance(part.y, list) for label in part.y}
    if texts and not all(isinstance(part.y, list) for part in parts):
        raise make_data_error("One half has names of classes, the other numbers.", "Give both halves the same form.")
    if all(map(is_short_decimal, texts)):
        place = {label: int(label) for label in texts}
    else:
        place = {label: i for i, label in enumerate(sorted(texts))}
    numbered = []
    for part in map(check_same_length, parts):
        y = torch.tensor([place[label] for label in part.y]) if isinstance(part.y, list) else part.y
        shapes = [x.shape for x in tree.collect_tensors(part.x)]
        column = y.dim() == 2 and y.shape[1] == 1 and y.shape not in shapes
        numbered.append((part.x, y[:, 0] if column else y))
    return read_label_rows(numbered)


def read_label_rows(parts: list[tuple[Inputs, Tensor]]) -> list[tuple[Inputs, Tensor]]:
    """The same with rows of the whole numbers 0 and 1 as yes and no, where they are no words of a sequence.

    Rows with a single 1 each may be classes as well as labels, and are refused.
    """
    if not all(
        y.dtype == torch.int64 and y.dim() == 2 and y.shape[1] > 1 and not list_sequences(x, y) for x, y in parts
    ):
        return parts
    targets = torch.cat([y for _, y in parts]) if len({y.shape[1] for _, y in parts}) == 1 else torch.zeros(0, 2)
    if not len(targets) or not bool(((targets == 0) | (targets == 1)).all()):
        return parts
    if bool((targets.sum(1) == 1).all()):
        raise make_data_error(
            f"The targets are {tuple(parts[0][1].shape)} with a single 1 in each row.",
            "Give classes as y.argmax(1), and several labels as yes and no: y == 1.",
        )
    return [(x, y == 1) for x, y in parts]


def check_same_length(part: UserSamples, whose: str = "") -> UserSamples:
    """The same samples, refused where there are not as many targets, and owners, as inputs."""
    rows = [len(x) if x.dim() else 0 for x in tree.collect_tensors(part.x)]
    if len(set(rows)) > 1:
        problem = f"The tensors of the inputs{whose} have {', '.join(map(str, rows))} rows."
        raise make_data_error(problem, "Give each as many rows as there are samples.")
    lengths = [rows[0], len(part.y) if not isinstance(part.y, Tensor) or part.y.dim() else 0]
    if lengths[0] != lengths[1]:
        raise make_data_error(
            f"There are {lengths[0]} inputs but {lengths[1]} targets{whose}.", "Give one target per input."
        )
    if part.owners is not None and len(part.owners) != lengths[0]:
        raise make_data_error(
            f"There are {lengths[0]} inputs but {len(part.owners)} owners.", "Give one owner per input."
        )
    if part.order is not None and (part.order.shape != (lengths[0],) or np.isnan(part.order).any()):
        problem = f"There are {lengths[0]} inputs, and order has the shape {part.order.shape} or holds no number."
        raise make_data_error(problem, "Give one number per input, the newest largest.")
    return part


def check_samples(part: tuple[Inputs, Tensor], finite: bool = False) -> None:
    """Refuses samples that training would fail on: none at all, values that are not finite, targets of a wrong kind.

    Inputs that are known to be `finite` are not looked through again.
    """
    inputs, y = part
    tensors = tree.collect_tensors(inputs)
    if not all(x.numel() for x in tensors) or not y.numel():
        raise ShoalError("no-data", "One half of the data has no samples.", "Give at least one sample to each half.")
    if isinstance(inputs, Tensor) and inputs.dim() < 2:
        raise make_data_error(
            "Each input is a single number.", "Give inputs with at least two dimensions, samples first."
        )
    if not 1 <= y.dim() <= 2:
        raise make_data_error(
            f"The targets are {tuple(y.shape)} {y.dtype}.", "Give whole numbers from 0 up, one per sample."
        )
    if y.is_floating_point() and not tree.is_tree_finite(y):
        row = int((~torch.isfinite(y)).reshape(len(y), -1).any(1).nonzero()[0])
        raise make_data_error(f"Target {row} is not a number or not finite.", "Replace it or drop the sample.")
    refuse_unfit_rows(inputs, y)
    for x in tensors:
        if not finite and x.is_floating_point() and not tree.is_tree_finite(x):
            row = int((~torch.isfinite(x)).reshape(len(x), -1).any(1).nonzero()[0])
            raise make_data_error(
                f"Input {row} holds a value that is not a number or not finite.", "Replace it or drop the sample."
            )


def refuse_unfit_rows(inputs: Inputs, y: Tensor) -> None:
    """Refuse several whole numbers per sample that are neither labels nor for the positions of a sequence."""
    if y.dim() == 2 and y.dtype == torch.int64 and not list_sequences(inputs, y):
        shapes = " and ".join(str(tuple(x.shape)) for x in tree.collect_tensors(inputs))
        raise make_data_error(
            f"The targets are {tuple(y.shape)} for inputs {shapes}.",
            "Give one target per sample, for sequences one per position, several of yes and no as 0 and 1, and several "
            "numbers to predict as real ones.",
        )


def list_sequences(inputs: Inputs, targets: Tensor) -> list[Tensor]:
    """The tensors of the inputs that have words, or rows of measurements, for each target."""
    return [
        x
        for x in tree.collect_tensors(inputs)
        if (x.shape == targets.shape and x.dtype == torch.int64)
        or (x.dim() == 3 and x.shape[:2] == targets.shape and x.is_floating_point())
    ]


def is_next_words(inputs: Inputs, targets: Tensor) -> bool:
    """Whether targets are the words of a language model: inputs are one tensor of words, and most are its next ones.

    Targets that are none, such as a tag for each word, are numbered for themselves, and so are those of texts of one
    word, whose next words the inputs do not have.
    """
    if not isinstance(inputs, Tensor) or inputs.dtype != torch.int64 or inputs.shape != targets.shape:
        return False
    if inputs.shape[1] == 1:
        return False
    following, targets = inputs[:LOOKED_AT, 1:], targets[:LOOKED_AT, :-1]
    counted = targets != IGNORED_TARGET
    return 2 * int(((targets == following) & counted).sum()) >= int(counted.sum())


def count_classes(parts: list[tuple[Inputs, Tensor]], classes: int) -> int:
    """The number of classes, of words where the targets are the next words, or of numbers or yes and no to predict."""
    y = parts[0][1]
    if y.dtype != torch.int64:
        return 1 if y.dim() == 1 else y.shape[1]
    marks = [y[y != IGNORED_TARGET] if y.dim() == 2 else y for _, y in parts]
    if not any(len(own) for own in marks):
        raise make_data_error(f"No target counts: all are {IGNORED_TARGET}.", "Give a class for some positions.")
    words = [x for x, _ in parts if y.dim() == 2 and isinstance(x, Tensor) and x.dtype == torch.int64]
    are_next = bool(words) and is_next_words(*parts[0])
    high = refuse_numbers_outside("label", [*marks, *words] if are_next else marks, classes or CLASSES)
    if words and not are_next:
        refuse_numbers_outside("word", words, CLASSES)
    return classes or high + 1


def refuse_numbers_outside(what: str, marks: list[Tensor], count: int) -> int:
    """The largest of these numbers; those below 0 and from `count` up are refused."""
    marks = [own for own in marks if len(own)]
    low, high = min(int(own.min()) for own in marks), max(int(own.max()) for own in marks)
    if low < 0 or high >= count:
        problem = f"There is a {what} {low if low < 0 else high}, outside 0 to {count - 1}."
        raise make_data_error(problem, NUMBERING[what])
    return high


def number_owners(owners: Any) -> np.ndarray:
    """Owners numbered from 0 up, in sorted order of what they are called."""
    names = np.asarray(owners.cpu() if isinstance(owners, Tensor) else owners)
    if names.ndim != 1 or names.dtype.kind not in "iuU":
        raise make_data_error("The owners are not a list of numbers or names.", "Give one number or name per sample.")
    if names.dtype.kind == "U" and all(map(is_short_decimal, names.tolist())):
        names = names.astype(np.int64)
    return np.unique(names, return_inverse=True)[1].reshape(-1)


def convert_inputs(value: Any, what: str) -> Inputs:
    """Inputs as plain tensors: one, or those of a dict or of a tuple of tensors and arrays.

    In a dict or tuple, yes and no become 1 and 0, as a mask has them; bytes are pixels.
    """
    if isinstance(value, Mapping):
        if not value or not all(isinstance(name, str) for name in value):
            raise make_data_error(f"The {what} is a dict without names.", "Name each of its tensors.")
        return {name: convert_entry(own, f"{what}, {name}") for name, own in value.items()}
    if isinstance(value, tuple) and value and all(isinstance(own, Tensor | np.ndarray) for own in value):
        return tuple(convert_entry(own, f"{what}, number {i}") for i, own in enumerate(value))
    return convert_tensor(value, what)


def convert_targets(value: Any, what: str = "y") -> Tensor | list[str]:
    """Targets as numbers, or as names of classes; several of yes and no per sample stay that."""
    if not isinstance(value, Tensor | np.ndarray | list | tuple) and hasattr(value, "to_numpy"):  # pandas, polars
        value = value.to_numpy()
    if is_ragged(value):
        return pad_targets(list(value), what)
    plain = value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "OU" else value
    if isinstance(plain, list | tuple) and plain:
        texts = sum(isinstance(own, str) for own in plain)
        if texts == len(plain):
            return [str(own) for own in plain]
        if texts:
            row = next(i for i, own in enumerate(plain) if not isinstance(own, str))
            problem = f"Of {what}, {texts} of {len(plain)} are texts, and number {row} is {str(plain[row])[:40]!r}."
            raise make_data_error(problem, "Give all names of classes, or all numbers.")
    targets = convert_tensor(value, what)
    yes_or_no = isinstance(value, np.ndarray | Tensor) and str(value.dtype) in ("bool", "torch.bool")
    return targets.bool() if yes_or_no and targets.dim() == 2 and targets.shape[1] > 1 else targets


def is_ragged(value: Any) -> bool:
    """Whether a value is a list, or an array of objects, of sequences that are not all of one length."""
    if isinstance(value, np.ndarray) and (value.dtype != object or value.ndim != 1):
        return False
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        return False
    if not all(isinstance(own, list | tuple | np.ndarray | Tensor) and np.ndim(own) for own in value):
        return False
    return len({len(own) for own in value}) > 1


def pad_targets(sequences: Sequence[Any], what: str, length: int = 0) -> Tensor:
    """Targets of the positions of sequences, (N, longest); positions that are not there do not count."""
    rows = [convert_tensor(own, what) for own in sequences]
    odd = next((i for i, own in enumerate(rows) if own.dim() != 1 or own.dtype != torch.int64), None)
    if odd is not None:
        raise make_data_error(
            f"Number {odd} of {what} is no sequence of whole numbers.", "Give a class for each position."
        )
    padded = torch.full((len(rows), max(length, *map(len, rows))), IGNORED_TARGET)
    for row, own in zip(padded, rows):
        row[: len(own)] = own
    return padded


def convert_entry(value: Any, what: str) -> Tensor:
    """One tensor of a dict or tuple of inputs; yes and no become 1 and 0."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "b":
        value = value.astype(np.int64)
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        value = value.to(torch.int64)
    return convert_tensor(value, what)


def convert_tensor(value: Any, what: str) -> Tensor:
    """Single precision, bytes or whole numbers, on the CPU; a copy is made only where it has to be.

    Inputs of yes and no are the numbers 1 and 0.
    """
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError) as error:
            raise make_data_error(
                f"The {what} cannot be made into an array ({describe_error(error)[:80]}).", "Give a tensor."
            ) from error
        if (
            isinstance(value, np.memmap)
            and array.dtype in (np.float32, np.uint8, np.int64)
            and array.flags.c_contiguous
        ):
            return wrap_mapped_array(array)
        if array.dtype.kind not in "buif":
            raise make_data_error(
                f"The {what} holds {array.dtype}, not numbers.", "Give a tensor or an array of numbers."
            )
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:
            array = array.astype(np.int64)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
        if array.dtype.kind == "f" and array.dtype.itemsize > 8:
            array = array.astype(np.float64)
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
    value = value.detach().cpu()
    if value.is_complex() or value.is_quantized or value.layout != torch.strided:
        raise make_data_error(
            f"The {what} holds {value.dtype} in a form that is not plain.", "Give a plain tensor of numbers."
        )
    if value.is_floating_point():
        return value.to(torch.float32)
    if what.startswith("x") and value.dtype in (torch.uint8, torch.bool):
        return value if value.dtype == torch.uint8 else value.to(torch.float32)
    return value if value.dtype == torch.bool and value.dim() > 1 else value.to(torch.int64)


def wrap_mapped_array(array: np.ndarray) -> Tensor:
    """A tensor on an array in a file, not copied; nothing here writes to inputs, so it may be one to read only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def make_data_error(problem: str, advice: str) -> ShoalError:
    """The error that refuses a user's data."""
    return ShoalError("bad-value", problem, advice)
