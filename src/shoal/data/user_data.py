"""A user's own data: tensors, torch data sets, folders of images and CSV tables, all made into a `Dataset`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.inputs import concat_inputs, count_samples, describe_inputs, outline_sample, take_rows
from shoal.data.csv_table import read_csv_table
from shoal.data.dataset import Dataset
from shoal.data.download import read_bytes
from shoal.data.image_folder import list_subfolders, read_image_folder
from shoal.data.user_split import (
    UserSamples,
    check_same_length,
    check_samples,
    convert_inputs,
    convert_tensor,
    count_classes,
    make_data_error,
    number_classes,
    number_owners,
)


def build_user_dataset(
    data: Any, *, test: Any = None, test_share: float = 0.2, seed: int = 0, classes: int = 0, name: str = "own"
) -> Dataset:
    """A data set from almost anything.

    `data` is (x, y), where x is a tensor or an array, or a dict or tuple of them; (x, y, test_x, test_y); ((x, y),
    (test_x, test_y)); a dict with `x`, `y` and, if wanted, `test_x`, `test_y` and `owners`; a list of (x, y), one per
    device; a `torch.utils.data.Dataset` or a pair of them; a folder `<class>/*.png` or `<device>/<class>/*.png`, below
    `train` and `test` if wanted; or a CSV table. `test` is the test half in one of these forms. Without one,
    `test_share` of the samples are held back, drawn with `seed`. `classes` is one more than the largest label unless it
    is given.
    """
    if isinstance(data, Dataset):
        return data
    data, test = separate_test_data(data, test)
    train, rest = read_user_samples(data), None if test is None else read_user_samples(test)
    if rest is None and not 0 < test_share < 1:
        raise make_data_error(f"A test share of {test_share} leaves one half empty.", "Write a number between 0 and 1.")
    parts = number_classes([train] if rest is None else [train, rest])
    for part in parts:
        check_samples(part)
    (x, y), (test_x, test_y) = parts[0][:2], parts[-1][:2]
    if isinstance(x, dict) and isinstance(test_x, dict) and x.keys() == test_x.keys():
        test_x = {name: test_x[name] for name in x}
    if outline_sample(x) != outline_sample(test_x) or y.dim() != test_y.dim():
        raise make_data_error(
            f"Training samples are {describe_inputs(x)}, test samples {describe_inputs(test_x)}.",
            "Give both halves the same form.",
        )
    dataset = Dataset(name, x, y, test_x, test_y, count_classes(parts, classes), train.owners)
    return hold_out_validation(dataset, test_share, seed) if rest is None else dataset


def hold_out_validation(dataset: Dataset, share: float, seed: int = 0) -> Dataset:
    """The data set with a share of the training samples, drawn with `seed`, in place of the test set."""
    total = len(dataset.targets)
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
        inputs=take_rows(dataset.inputs, kept),
        targets=dataset.targets[kept],
        test_inputs=take_rows(dataset.inputs, back),
        test_targets=dataset.targets[back],
        owners=None if dataset.owners is None else dataset.owners[kept.numpy()],
    )


def separate_test_data(data: Any, test: Any) -> tuple[Any, Any]:
    """The training data and the test data, where one object holds both."""
    test_data = None
    if isinstance(data, tuple) and len(data) == 4:
        data, test_data = data[:2], data[2:]
    elif (
        isinstance(data, tuple)
        and len(data) == 2
        and all(isinstance(d, tuple | torch.utils.data.Dataset) for d in data)
    ):
        data, test_data = data
    elif isinstance(data, dict) and ("test_x" in data or "test_inputs" in data):
        test_data = {key.removeprefix("test_"): value for key, value in data.items() if key.startswith("test_")}
    elif isinstance(data, str | Path) and {"train", "test"} <= (folders := set(list_subfolders(Path(data)))):
        if len(folders) > 2:
            raise make_data_error(
                f"{data} has folders besides train and test.", "Move them elsewhere, or rename train and test."
            )
        data, test_data = Path(data) / "train", Path(data) / "test"
    if test_data is not None and test is not None:
        raise make_data_error("There are two test halves: one in the data and one in test.", "Leave one of them out.")
    return data, test if test_data is None else test_data


def read_user_samples(data: Any) -> UserSamples:
    """The training or the test samples, in any of the forms that `build_user_dataset` takes."""
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not path.exists():
            raise ShoalError("no-data", f"There is no file or folder {path}.", "Correct the name.")
        return read_image_folder(path) if path.is_dir() else read_csv_table(read_bytes(path), path)
    if isinstance(data, torch.utils.data.Dataset):
        return read_torch_dataset(data)
    if isinstance(data, dict):
        x, y = (data.get(short, data.get(long)) for short, long in (("x", "inputs"), ("y", "targets")))
        if x is None or y is None:
            raise make_data_error(f"The dict has the keys {', '.join(map(str, data))[:80]}.", "It needs x and y.")
        owners = data.get("owners")
        return UserSamples(
            convert_inputs(x, "x"), convert_tensor(y, "y"), None if owners is None else number_owners(owners)
        )
    if isinstance(data, list):
        return join_device_samples(data)
    if isinstance(data, tuple) and len(data) == 2:
        return UserSamples(convert_inputs(data[0], "x"), convert_tensor(data[1], "y"))
    raise make_data_error(
        f"A {type(data).__name__} is no data set.",
        "Give (x, y), a dict, a list of (x, y) per device, a torch data set, a folder of images or a CSV file.",
    )


def join_device_samples(data: Sequence[Any]) -> UserSamples:
    """A list of (x, y), one per device; a device may have no samples."""
    if not data:
        raise ShoalError("no-data", "The list of devices is empty.", "Give at least one pair (x, y).")
    parts: list[UserSamples] = []
    for i, pair in enumerate(data):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise make_data_error(f"Device {i} is not a pair (x, y).", "Give a list with one pair per device.")
        part = UserSamples(convert_inputs(pair[0], f"x of device {i}"), convert_tensor(pair[1], f"y of device {i}"))
        check_same_length(part, f" of device {i}")
        parts.append(part)
    full = [part for part in parts if count_samples(part.x)] or parts[:1]
    shapes = {(outline_sample(part.x), part.y.dim()) for part in full if isinstance(part.y, Tensor)}
    if len(shapes) > 1:
        raise make_data_error(
            "The samples of the devices differ in shape or type.", "Give all devices samples of one form."
        )
    owners = np.repeat(np.arange(len(parts)), [count_samples(part.x) for part in parts])
    y = torch.cat([part.y for part in full if isinstance(part.y, Tensor)])
    return UserSamples(concat_inputs([part.x for part in full]), y, owners)


def read_torch_dataset(data: Any) -> UserSamples:
    """A torch data set that knows its length and gives (x, y) for each index."""
    if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__"):
        raise make_data_error(
            "The torch data set has no length.", "Give one of map style, with __len__ and __getitem__."
        )
    if not len(data):
        raise ShoalError("no-data", "The torch data set is empty.", "Give at least one sample.")
    xs, ys = [], []
    for i in range(len(data)):
        sample = data[i]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise make_data_error(f"Sample {i} of the torch data set is not a pair (x, y).", "Let it give pairs.")
        x, y = sample
        if hasattr(x, "getbands"):  # an image of Pillow: channels first
            x = np.asarray(x)
            x = x[None] if x.ndim == 2 else x.transpose(2, 0, 1)
        xs.append(tree.map_tensors(lambda t: t[None], convert_inputs(x, f"x of sample {i}")))
        ys.append(convert_tensor(y, f"y of sample {i}")[None])
    for what, values in (("x", xs), ("y", ys)):
        forms = [outline_sample(value) for value in values]
        odd = [i for i, form in enumerate(forms) if form != forms[0]]
        if odd:
            raise make_data_error(
                f"The {what} of sample {odd[0]} differs in shape or type from the first.", "Make them alike."
            )
    return UserSamples(concat_inputs(xs), torch.cat(ys))
