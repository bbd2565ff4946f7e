"""A user's own data: tensors, torch data sets, folders of images and CSV tables, all made into a `Dataset`."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError, told
from shoal.data.dataset import Dataset
from shoal.data.download import read_bytes
from shoal.data.tiny_imagenet import picture, pixels
from shoal.files import disk_errors

CLASSES = 1_000_000
"""More classes than this are taken for a mistake."""

LARGEST = float(np.finfo(np.float32).max)

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")


class Half(NamedTuple):
    """Inputs, targets as numbers or as names of classes, and the device of each sample where it is known."""

    x: Tensor
    y: Tensor | list[str]
    owners: np.ndarray | None = None


def dataset_of(
    data: Any, *, test: Any = None, test_share: float = 0.2, seed: int = 0, classes: int = 0, name: str = "own"
) -> Dataset:
    """A data set from almost anything.

    `data` is (x, y); (x, y, test_x, test_y); ((x, y), (test_x, test_y)); a dict with `x`, `y` and, if wanted, `test_x`,
    `test_y` and `owners`; a list of (x, y), one per device; a `torch.utils.data.Dataset` or a pair of them; a folder
    `<class>/*.png` or `<device>/<class>/*.png`, below `train` and `test` if wanted; or a CSV table. `test` is the test
    half in one of these forms. Without one, `test_share` of the samples are held back, drawn with `seed`. `classes` is
    one more than the largest label unless it is given.
    """
    if isinstance(data, Dataset):
        return data
    data, test = halves(data, test)
    train, rest = half(data), None if test is None else half(test)
    if rest is None and not 0 < test_share < 1:
        raise bad(f"A test share of {test_share} leaves one half empty.", "Write a number between 0 and 1.")
    parts = numbered([train] if rest is None else [train, rest])
    for part in parts:
        check(part)
    (x, y), (test_x, test_y) = parts[0][:2], parts[-1][:2]
    if x.shape[1:] != test_x.shape[1:] or y.dim() != test_y.dim() or x.dtype != test_x.dtype:
        raise bad(
            f"Training samples are {form(x)}, test samples {form(test_x)}.",
            "Give both halves the same form.",
        )
    dataset = Dataset(name, x, y, test_x, test_y, count(parts, classes), train.owners)
    return validation(dataset, test_share, seed) if rest is None else dataset


def form(x: Tensor) -> str:
    return f"{tuple(x.shape[1:])} {x.dtype}"


def validation(dataset: Dataset, share: float, seed: int = 0) -> Dataset:
    """The same with a share of the training half, drawn with `seed`, in place of the test half."""
    total = len(dataset.inputs)
    held = round(share * total) if 0 < share < 1 else 0
    if not 0 < held < total:
        raise ShoalError(
            "no-data",
            f"Holding back a share of {share} of {total} samples leaves one half empty.",
            "Write a number between 0 and 1 that leaves at least one sample on either side.",
        )
    order = np.random.default_rng(seed).permutation(total)
    kept, back = (torch.from_numpy(np.sort(rows)) for rows in (order[: total - held], order[total - held :]))
    return replace(
        dataset,
        inputs=dataset.inputs[kept],
        targets=dataset.targets[kept],
        test_inputs=dataset.inputs[back],
        test_targets=dataset.targets[back],
        owners=None if dataset.owners is None else dataset.owners[kept.numpy()],
    )


def halves(data: Any, test: Any) -> tuple[Any, Any]:
    """What is to train on and what to test with, where one thing holds both."""
    found = None
    if isinstance(data, tuple) and len(data) == 4:
        data, found = data[:2], data[2:]
    elif (
        isinstance(data, tuple)
        and len(data) == 2
        and all(isinstance(d, tuple | torch.utils.data.Dataset) for d in data)
    ):
        data, found = data
    elif isinstance(data, dict) and ("test_x" in data or "test_inputs" in data):
        found = {key.removeprefix("test_"): value for key, value in data.items() if key.startswith("test_")}
    elif isinstance(data, str | Path) and {"train", "test"} <= (folders := set(subfolders(Path(data)))):
        if len(folders) > 2:
            raise bad(f"{data} has folders besides train and test.", "Move them elsewhere, or rename train and test.")
        data, found = Path(data) / "train", Path(data) / "test"
    if found is not None and test is not None:
        raise bad("There are two test halves: one in the data and one in test.", "Leave one of them out.")
    return data, test if found is None else found


def half(data: Any) -> Half:
    """One half, whatever its form."""
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not path.exists():
            raise ShoalError("no-data", f"There is no file or folder {path}.", "Correct the name.")
        return images(path) if path.is_dir() else table(read_bytes(path), path)
    if isinstance(data, torch.utils.data.Dataset):
        return from_torch(data)
    if isinstance(data, dict):
        x, y = (data.get(short, data.get(long)) for short, long in (("x", "inputs"), ("y", "targets")))
        if x is None or y is None:
            raise bad(f"The dict has the keys {', '.join(map(str, data))[:80]}.", "It needs x and y.")
        owners = data.get("owners")
        return Half(tensor(x, "x"), tensor(y, "y"), None if owners is None else devices_of(owners))
    if isinstance(data, list):
        return per_device(data)
    if isinstance(data, tuple) and len(data) == 2:
        return Half(tensor(data[0], "x"), tensor(data[1], "y"))
    raise bad(
        f"A {type(data).__name__} is no data set.",
        "Give (x, y), a dict, a list of (x, y) per device, a torch data set, a folder of images or a CSV file.",
    )


def per_device(data: Sequence[Any]) -> Half:
    """A list of (x, y), one per device; a device may have no samples."""
    if not data:
        raise ShoalError("no-data", "The list of devices is empty.", "Give at least one pair (x, y).")
    parts: list[Half] = []
    for i, pair in enumerate(data):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise bad(f"Device {i} is not a pair (x, y).", "Give a list with one pair per device.")
        part = Half(tensor(pair[0], f"x of device {i}"), tensor(pair[1], f"y of device {i}"))
        same_length(part, f" of device {i}")
        parts.append(part)
    full = [part for part in parts if len(part.x)] or parts[:1]
    shapes = {(tuple(part.x.shape[1:]), part.x.dtype, part.y.dim()) for part in full if isinstance(part.y, Tensor)}
    if len(shapes) > 1:
        raise bad("The samples of the devices differ in shape or type.", "Give all devices samples of one form.")
    owners = np.repeat(np.arange(len(parts)), [len(part.x) for part in parts])
    y = torch.cat([part.y for part in full if isinstance(part.y, Tensor)])
    return Half(torch.cat([part.x for part in full]), y, owners)


def from_torch(data: Any) -> Half:
    """A torch data set that knows its length and gives (x, y) for each index."""
    if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__"):
        raise bad("The torch data set has no length.", "Give one of map style, with __len__ and __getitem__.")
    if not len(data):
        raise ShoalError("no-data", "The torch data set is empty.", "Give at least one sample.")
    xs, ys = [], []
    for i in range(len(data)):
        sample = data[i]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise bad(f"Sample {i} of the torch data set is not a pair (x, y).", "Let it give pairs.")
        x, y = sample
        if hasattr(x, "getbands"):  # an image of Pillow: channels first
            x = np.asarray(x)
            x = x[None] if x.ndim == 2 else x.transpose(2, 0, 1)
        xs.append(tensor(x, f"x of sample {i}"))
        ys.append(tensor(y, f"y of sample {i}"))
    for what, values in (("x", xs), ("y", ys)):
        odd = [i for i, value in enumerate(values) if value.shape != values[0].shape or value.dtype != values[0].dtype]
        if odd:
            raise bad(f"The {what} of sample {odd[0]} differs in shape or type from the first.", "Make them alike.")
    return Half(torch.stack(xs), torch.stack(ys))


def subfolders(path: Path) -> list[str]:
    path = path.expanduser()
    if not path.is_dir():
        return []
    with disk_errors(path):
        return sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def images(folder: Path) -> Half:
    """`<class>/*.png` or `<device>/<class>/*.png`; all images have one size, and are grey when all of them are."""
    with disk_errors(folder):
        found = {
            depth: sorted(p for p in folder.glob("/".join("*" * (depth + 1))) if p.suffix.lower() in IMAGES)
            for depth in (1, 2)
        }
    depth = 1 if found[1] else 2
    if found[1] and found[2]:
        raise bad(f"{folder} has images at two depths.", "Write <class>/*.png or <device>/<class>/*.png throughout.")
    paths = found[depth]
    if not paths:
        raise ShoalError(
            "no-data", f"There are no images in {folder}.", "Write <class>/*.png or <device>/<class>/*.png."
        )
    opened = [(path, picture(read_bytes(path), path)) for path in paths]
    size = opened[0][1].size
    for path, image in opened:
        if image.size != size:
            raise bad(
                f"{path} is {image.size[0]} x {image.size[1]}, the first image {size[0]} x {size[1]}.",
                "Bring all images to one size.",
            )
    mode = "L" if all(image.mode in ("1", "L") for _, image in opened) else "RGB"
    x = torch.from_numpy(np.stack([pixels(image, path, mode, size) for path, image in opened]))
    owners = devices_of([path.parts[-3] for path in paths]) if depth == 2 else None
    return Half(x, [path.parent.name for path in paths], owners)


def table(content: bytes, path: Path) -> Half:
    """A CSV table of numbers, with a head unless its first line is all numbers.

    The target is the column `label` or `target`, or else the last; `device` or `owner` gives the device.
    """
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise bad(f"{path} is not a CSV table ({told(error)[:100]}).", "Save it as UTF-8 with commas.") from error
    names = [cell.strip() for cell in rows[0][1]] if rows else []
    if all(number(cell) is not None for cell in names):
        names = [str(i + 1) for i in range(len(names))]
    else:
        rows = rows[1:]
    if not rows:
        raise ShoalError("no-data", f"{path} has no rows.", "Give at least one line below the head.")
    if len(set(names)) != len(names):
        raise bad(f"{path} has two columns of one name.", "Name each column once.")
    special = {key: i for i, key in enumerate(names) if key.lower() in ("device", "owner")}
    device = next(iter(special.values()), None)
    marked = [i for i, key in enumerate(names) if key.lower() in ("label", "target")]
    target = marked[0] if marked else max((i for i in range(len(names)) if i != device), default=0)
    columns = [i for i in range(len(names)) if i not in (target, device)]
    if len(special) > 1 or len(marked) > 1 or not columns:
        raise bad(
            f"{path} has the columns {', '.join(names)[:80]!r}.",
            "It needs one column for the target, at most one for the device, and at least one more.",
        )
    x = np.empty((len(rows), len(columns)), np.float32)
    for at, (line, row) in enumerate(rows):
        if len(row) != len(names):
            raise bad(f"{path}, line {line}: {len(row)} cells instead of {len(names)}.", "Complete the row.")
        for i, cell in enumerate(row):
            if not cell.strip():
                raise bad(f"{path}, line {line}, column {names[i]!r}: the cell is empty.", "Fill it or drop the row.")
        for to, i in enumerate(columns):
            value = number(row[i])
            if value is None:
                where = f"{path}, line {line}, column {names[i]!r}"
                raise bad(f"{where}: {row[i][:40]!r} is not a usable number.", "Correct it or drop the column.")
            x[at, to] = value
    owners = None if device is None else devices_of([row[device].strip() for _, row in rows])
    return Half(torch.from_numpy(x), [row[target].strip() for _, row in rows], owners)


def number(cell: str) -> float | None:
    """A finite number that single precision can hold."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST and "_" not in cell else None


def numbered(parts: list[Half]) -> list[tuple[Tensor, Tensor]]:
    """Names of classes become numbers: what they say where all are whole numbers, their sorted place otherwise."""
    texts = {label for part in parts if isinstance(part.y, list) for label in part.y}
    if texts and not all(isinstance(part.y, list) for part in parts):
        raise bad("One half has names of classes, the other numbers.", "Give both halves the same form.")
    if all(label.isascii() and label.isdecimal() and len(label) < 10 for label in texts):
        place = {label: int(label) for label in texts}
    else:
        place = {label: i for i, label in enumerate(sorted(texts))}
    found = []
    for part in map(same_length, parts):
        y = torch.tensor([place[label] for label in part.y]) if isinstance(part.y, list) else part.y
        column = y.dim() == 2 and y.shape[1] == 1 and y.shape != part.x.shape
        found.append((part.x, y[:, 0] if column else y))
    return found


def same_length(part: Half, whose: str = "") -> Half:
    lengths = [len(v) if not isinstance(v, Tensor) or v.dim() else 0 for v in (part.x, part.y)]
    if lengths[0] != lengths[1]:
        raise bad(f"There are {lengths[0]} inputs but {lengths[1]} targets{whose}.", "Give one target per input.")
    if part.owners is not None and len(part.owners) != lengths[0]:
        raise bad(f"There are {lengths[0]} inputs but {len(part.owners)} owners.", "Give one owner per input.")
    return part


def check(part: tuple[Tensor, Tensor]) -> None:
    """Everything that training would stumble over later."""
    x, y = part
    if not x.numel() or not y.numel():
        raise ShoalError("no-data", "One half of the data has no samples.", "Give at least one sample to each half.")
    if x.dim() < 2:
        raise bad("Each input is a single number.", "Give inputs with at least two dimensions, samples first.")
    if y.is_floating_point() or not 1 <= y.dim() <= 2:
        raise bad(f"The targets are {tuple(y.shape)} {y.dtype}.", "Give whole numbers from 0 up, one per sample.")
    if y.dim() == 2 and (x.shape != y.shape or x.dtype != torch.int64):
        raise bad(
            f"The targets are {tuple(y.shape)} for inputs {tuple(x.shape)}.",
            "Give one target per sample, or for sequences of word numbers one per position.",
        )
    if x.is_floating_point() and not torch.isfinite(x).all():
        row = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        raise bad(f"Input {row} holds a value that is not a number or not finite.", "Replace it or drop the sample.")


def count(parts: list[tuple[Tensor, Tensor]], classes: int) -> int:
    """The number of classes, or of words where the targets are sequences."""
    marks = [v for x, y in parts for v in ((x, y) if y.dim() == 2 else (y,))]
    low, high = min(int(v.min()) for v in marks), max(int(v.max()) for v in marks)
    largest = (classes or CLASSES) - 1
    if low < 0 or high > largest:
        raise bad(
            f"There is a label {low if low < 0 else high}, outside 0 to {largest}.",
            "Number the classes from 0 up, and give their number as classes if it is larger.",
        )
    return classes or high + 1


def devices_of(owners: Any) -> np.ndarray:
    """Owners numbered from 0 up, in sorted order of what they are called."""
    names = np.asarray(owners.cpu() if isinstance(owners, Tensor) else owners)
    if names.ndim != 1 or names.dtype.kind not in "iuU":
        raise bad("The owners are not a list of numbers or names.", "Give one number or name per sample.")
    if names.dtype.kind == "U" and all(n.isascii() and n.isdecimal() and len(n) < 10 for n in names.tolist()):
        names = names.astype(np.int64)
    return np.unique(names, return_inverse=True)[1].reshape(-1)


def tensor(value: Any, what: str) -> Tensor:
    """Single precision, bytes or whole numbers, on the CPU; a copy is made only where it has to be."""
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError) as error:
            raise bad(f"The {what} cannot be made into an array ({told(error)[:80]}).", "Give a tensor.") from error
        if array.dtype.kind not in "buif":
            raise bad(f"The {what} holds {array.dtype}, not numbers.", "Give a tensor or an array of numbers.")
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:
            array = array.astype(np.int64)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
        if array.dtype.kind == "f" and array.dtype.itemsize > 8:
            array = array.astype(np.float64)
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
    value = value.detach().cpu()
    if value.is_complex() or value.is_quantized or value.layout != torch.strided:
        raise bad(f"The {what} holds {value.dtype} in a form that is not plain.", "Give a plain tensor of numbers.")
    if value.is_floating_point():
        return value.to(torch.float32)
    if what.startswith("x") and value.dtype in (torch.uint8, torch.bool):
        return value.to(torch.uint8)
    return value.to(torch.int64)


def bad(problem: str, advice: str) -> ShoalError:
    return ShoalError("bad-value", problem, advice)
