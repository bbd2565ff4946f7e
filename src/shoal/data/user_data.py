"""A user's own data: tensors, frames, torch data sets, files and folders, all made into a `Dataset`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.inputs import concat_inputs, count_samples, describe_inputs, outline_sample, take_rows
from shoal.data.array_files import is_array_folder, read_array_file
from shoal.data.dataset import Dataset
from shoal.data.frames import find_frame_kind
from shoal.data.hf_data import PREFIX, is_from_datasets, is_hf_dataset, load_hf_dataset, separate_hf_halves
from shoal.data.holding_out import choose_held_out_rows
from shoal.data.image_folder import list_subfolders, read_image_folder
from shoal.data.mapped import MappedTensors, is_mapped, stays_on_disk, take_slice
from shoal.data.sequences import MASK, pad_sequences, pad_to_length
from shoal.data.table import ColumnRoles
from shoal.data.table_dataset import build_table_dataset, read_plain_samples, refuse_roles
from shoal.data.table_sources import read_sample_table
from shoal.data.text_columns import TextReading
from shoal.data.torch_data import read_torch_dataset
from shoal.data.user_split import (
    IGNORED_TARGET,
    UserSamples,
    check_same_length,
    check_samples,
    convert_inputs,
    convert_targets,
    count_classes,
    is_ragged,
    list_class_names,
    make_data_error,
    number_classes,
    number_owners,
)

FORMS = (
    "Give (x, y), a dict, a list of (x, y) per device, a frame, a torch data set, a data set of Hugging Face, a folder "
    "of images or arrays, or a CSV, parquet, npz or safetensors file."
)


def build_user_dataset(
    data: Any,
    *,
    test: Any = None,
    test_share: float = 0.2,
    seed: int = 0,
    classes: int = 0,
    name: str = "own",
    label: str | Sequence[str] = "",
    owner: str = "",
    order: str = "",
    missing: str = "refuse",
    text: TextReading | None = None,
) -> Dataset:
    """A data set from almost anything.

    `data` is (x, y), where x is a tensor or an array, or a dict or tuple of them, or a list of sequences of unequal
    length; (x, y, test_x, test_y); ((x, y), (test_x, test_y)); a dict with `x`, `y` and, if wanted, `test_x`, `test_y`,
    `owners` and `order`; a list with one of these per device; a frame of pandas, polars or Arrow, a `datasets.Dataset`
    or a `torch.utils.data.Dataset`, or a pair or dict of two; a bunch of scikit-learn; a folder `<class>/*.png` or
    `<device>/<class>/*.png`, below `train` and `test` if wanted; a CSV, parquet, npz or safetensors file, or a folder
    of parquet or npy files; or `hf:FOLDER`. `test` is the test half in one of these forms. Without one, `test_share` of
    the samples are held back, drawn with `seed`. `classes` is one more than the largest label unless it is given.

    Of tables, `label`, `owner` and `order` name the columns of targets (several with commas between them, or as a
    list), devices and times (the newest samples are the test half), and `missing` is `refuse`, or how gaps are filled:
    `mean`, `median`, `zero`, or `flag` for the mean and a further input that says so. `text` says how columns of text
    become tokens; without it they are categories.
    """
    if isinstance(data, Dataset):
        return data
    roles = ColumnRoles(label if isinstance(label, str) else ",".join(label), owner, order, missing)
    data, test = separate_test_data(data, test)
    if test is None and not 0 < test_share < 1:
        raise make_data_error(f"A test share of {test_share} leaves one half empty.", "Write a number between 0 and 1.")
    table = read_sample_table(data, roles.missing)
    test_table = None if test is None or table is None else read_sample_table(test, roles.missing)
    if table is not None and (test is None or test_table is not None):
        return build_table_dataset(table, test_table, roles, test_share, seed, classes, name, text)
    if table is not None:
        raise make_data_error("The training half is a table and the test half is not.", "Give both in one form.")
    refuse_roles(roles, "this data")
    train, rest = read_user_samples(data), None if test is None else read_user_samples(test)
    halves = [train] if rest is None else [train, rest]
    halves = pad_alike(halves)
    parts = number_classes(halves)
    for part in parts:
        check_samples(part, isinstance(data, MappedTensors))
    (x, y), (test_x, test_y) = parts[0][:2], parts[-1][:2]
    if isinstance(x, dict) and isinstance(test_x, dict) and x.keys() == test_x.keys():
        test_x = {name: test_x[name] for name in x}
    if outline_sample(x) != outline_sample(test_x) or y.dim() != test_y.dim():
        raise make_data_error(
            f"Training samples are {describe_inputs(x)}, test samples {describe_inputs(test_x)}.",
            "Give both halves the same form.",
        )
    if y.dtype != test_y.dtype:
        raise make_data_error(
            f"Training targets are {y.dtype}, test targets {test_y.dtype}.", "Give both halves the same form."
        )
    names = list_class_names(halves)
    count, mapped = max(count_classes(parts, classes), len(names)), is_mapped(data)
    dataset = Dataset(
        name, x, y, test_x, test_y, count, train.owners, class_names=names, order=train.order, mapped=mapped
    )
    return hold_out_validation(dataset, test_share, seed) if rest is None else dataset


def hold_out_validation(dataset: Dataset, share: float, seed: int = 0, stratify: bool = False) -> Dataset:
    """The data set with a share of the training samples in place of the test set: the newest, or drawn with `seed`.

    With `stratify` every class gives the same share of its samples, but for rounding, where a sample has one class.
    """
    labels = dataset.targets.numpy() if stratify and has_one_class_each(dataset.targets) else None
    rows = choose_held_out_rows(len(dataset.targets), share, seed, dataset.order, labels)
    kept, back = map(torch.from_numpy, rows)
    take = take_slice if stays_on_disk(dataset) else take_rows
    return replace(
        dataset,
        inputs=take(dataset.inputs, kept),
        targets=dataset.targets[kept],
        test_inputs=take(dataset.inputs, back),
        test_targets=dataset.targets[back],
        owners=None if dataset.owners is None else dataset.owners[kept.numpy()],
        order=None if dataset.order is None else dataset.order[kept.numpy()],
    )


def describe_held_out(dataset: Dataset, stratify: bool) -> str:
    """Which training samples `hold_out_validation` takes, in words."""
    if dataset.order is not None:
        return "the newest ones"
    return "held back class by class" if stratify and has_one_class_each(dataset.targets) else "drawn at random"


def has_one_class_each(targets: Tensor) -> bool:
    return targets.dim() == 1 and not targets.is_floating_point()


def separate_test_data(data: Any, test: Any) -> tuple[Any, Any]:
    """The training data and the test data, where one object holds both."""
    test_data = None
    if isinstance(data, str) and data.startswith(PREFIX):
        data = load_hf_dataset(data)
    if isinstance(data, str | Path) and is_array_path(Path(data).expanduser()):
        data = read_array_file(Path(data).expanduser())
    if isinstance(data, tuple) and len(data) == 4:
        data, test_data = data[:2], data[2:]
    elif isinstance(data, tuple) and len(data) == 2 and all(map(is_whole_half, data)):
        data, test_data = data
    elif isinstance(data, dict) and ("train" in data or is_from_datasets(data)):
        data, test_data = separate_hf_halves(data)
    elif isinstance(data, dict) and ("test_x" in data or "test_inputs" in data):
        test_data = {key.removeprefix("test_"): value for key, value in data.items() if key.startswith("test_")}
    elif isinstance(data, str | Path) and Path(data).expanduser().is_dir():
        data, test_data = separate_folder(Path(data).expanduser())
    if test_data is not None and test is not None:
        raise make_data_error("There are two test halves: one in the data and one in test.", "Leave one of them out.")
    return data, test if test_data is None else test_data


def is_whole_half(data: Any) -> bool:
    """Whether an object holds inputs and targets, so that a pair of such are the two halves."""
    return isinstance(data, tuple | torch.utils.data.Dataset) or bool(find_frame_kind(data)) or is_hf_dataset(data)


def is_array_path(path: Path) -> bool:
    return path.suffix in (".npz", ".safetensors") and path.is_file() or is_array_folder(path)


def separate_folder(folder: Path) -> tuple[Path, Path | None]:
    """The halves of a folder: folders, CSV or parquet files called train and test; the folder itself without them."""
    for suffix in (".csv", ".parquet"):
        if (folder / f"train{suffix}").is_file() and (folder / f"test{suffix}").is_file():
            return folder / f"train{suffix}", folder / f"test{suffix}"
    folders = set(list_subfolders(folder))
    if not {"train", "test"} <= folders:
        return folder, None
    if len(folders) > 2:
        raise make_data_error(
            f"{folder} has folders besides train and test.", "Move them elsewhere, or rename train and test."
        )
    return folder / "train", folder / "test"


def read_user_samples(data: Any, roles: ColumnRoles | None = None, text: TextReading | None = None) -> UserSamples:
    """The training or the test samples, in any of the forms that `build_user_dataset` takes."""
    table = read_sample_table(data)
    if table is not None:
        return read_plain_samples(table, roles or ColumnRoles(), text)
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not path.exists():
            raise ShoalError("no-data", f"There is no file or folder {path}.", "Correct the name.")
        if is_array_path(path):
            return read_user_samples(read_array_file(path))
        if path.suffix == ".npy":
            raise make_data_error(f"{path} holds a single array.", "Give the folder with x.npy and y.npy.")
        if path.is_file():
            raise make_data_error(f"{path} is no kind of file that is known.", FORMS)
        return read_image_folder(path)
    if isinstance(data, torch.utils.data.Dataset):
        return read_torch_dataset(data)
    if isinstance(data, dict):
        return read_dict_samples(data)
    if isinstance(data, list):
        return join_device_samples(data)
    if isinstance(data, tuple) and len(data) == 2:
        return UserSamples(convert_sample_inputs(data[0], "x"), convert_targets(data[1]))
    if isinstance(data, torch.utils.data.DataLoader):
        raise make_data_error(
            "A DataLoader is no data set.", "Give its data set, loader.dataset: devices make batches."
        )
    raise make_data_error(f"A {type(data).__name__} is no data set.", FORMS)


def convert_sample_inputs(value: Any, what: str) -> Any:
    """Inputs as tensors; sequences of unequal length are padded, with a mask."""
    return pad_sequences(value, what) if is_ragged(value) else convert_inputs(value, what)


def read_dict_samples(data: dict[str, Any]) -> UserSamples:
    """A dict of x and y, or a bunch of scikit-learn with data and target."""
    longer = (("x", "inputs", "data"), ("y", "targets", "target"))
    x, y = (next((data[key] for key in keys if data.get(key) is not None), None) for keys in longer)
    if x is None or y is None:
        raise make_data_error(f"The dict has the keys {', '.join(map(str, data))[:80]}.", "It needs x and y.")
    owners, order, names = data.get("owners"), data.get("order"), data.get("target_names")
    targets = convert_targets(y)
    named = isinstance(targets, Tensor) and targets.dtype == torch.int64
    return UserSamples(
        convert_sample_inputs(x, "x"),
        targets,
        None if owners is None else number_owners(owners),
        None if order is None else np.asarray(order, dtype=np.float64),
        tuple(map(str, names)) if named and names is not None else (),
    )


def join_device_samples(data: Sequence[Any]) -> UserSamples:
    """A list of (x, y), one per device; a device may have no samples."""
    if not data:
        raise ShoalError("no-data", "The list of devices is empty.", "Give at least one pair (x, y).")
    parts: list[UserSamples] = []
    for i, pair in enumerate(data):
        if isinstance(pair, torch.utils.data.Dataset):
            part = read_torch_dataset(pair)
        elif not isinstance(pair, tuple | list) or len(pair) != 2:
            raise make_data_error(f"Device {i} is not a pair (x, y).", "Give a list with one pair per device.")
        else:
            x, y = convert_sample_inputs(pair[0], f"x of device {i}"), convert_targets(pair[1], f"y of device {i}")
            part = UserSamples(x, y)
        check_same_length(part, f" of device {i}")
        parts.append(part)
    parts = pad_alike(parts)
    full = [part for part in parts if count_samples(part.x)] or parts[:1]
    shapes = {(outline_sample(part.x), part.y.dim() if isinstance(part.y, Tensor) else "names") for part in full}
    if len(shapes) > 1:
        raise make_data_error(
            "The samples of the devices differ in shape or type.", "Give all devices samples of one form."
        )
    owners = np.repeat(np.arange(len(parts)), [count_samples(part.x) for part in parts])
    tensors = [part.y for part in full if isinstance(part.y, Tensor)]
    names = [text for part in full if isinstance(part.y, list) for text in part.y]
    y = torch.cat(tensors) if tensors else names
    return UserSamples(concat_inputs([part.x for part in full]), y, owners, class_names=full[0].class_names)


def pad_alike(parts: list[UserSamples]) -> list[UserSamples]:
    """The same samples, where padded sequences are as long in all parts as the longest of any."""
    longest = max((find_padded_length(part.x) for part in parts), default=0)
    padded = []
    for part in parts:
        y, width = part.y, find_padded_length(part.x)
        if isinstance(y, Tensor) and y.dim() == 2 and y.dtype == torch.int64 and 0 < y.shape[1] == width < longest:
            y = torch.nn.functional.pad(y, (0, longest - width), value=IGNORED_TARGET)
        padded.append(part._replace(x=pad_to_length(part.x, longest), y=y))
    return padded


def find_padded_length(inputs: Any) -> int:
    """The length to which sequences were padded; 0 where there are none."""
    mask = inputs.get(MASK) if isinstance(inputs, dict) else None
    return mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 0
