"""Pixels: images of every mode of Pillow, and masks of yes and no, have the values that they show."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.data.user_data import build_user_dataset

image_module = pytest.importorskip("PIL.Image")
RED = image_module.fromarray(np.full((4, 4, 3), [200, 10, 10], np.uint8))
DEEP = image_module.fromarray(np.full((4, 4), 40_000, np.uint16))
STRIPES = image_module.fromarray(np.tile(np.array([0, 255], np.uint8), (4, 2))).convert("1")


class Pictures(torch.utils.data.Dataset):
    """Twenty times the same picture, of two classes."""

    def __init__(self, picture):
        self.picture = picture

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int):
        return self.picture, i % 2


def write_folder(picture, folder: Path) -> Path:
    for i in range(20):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    return folder


def list_values(data) -> list[int]:
    inputs = build_user_dataset(data).inputs
    assert isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8
    return inputs.unique().tolist()


@pytest.mark.parametrize(
    ("picture", "values"), [(RED, [10, 200]), (RED.quantize(4), [10, 200]), (STRIPES, [0, 255])], ids=["RGB", "P", "1"]
)
def test_numbers_of_colours_and_bits_become_brightness(picture, values, tmp_path):
    assert list_values(Pictures(picture)) == values
    assert list_values(write_folder(picture, tmp_path)) == values


def test_pixels_of_16_bits_are_refused_and_not_cut_off_at_255(tmp_path):
    for data in (Pictures(DEEP), write_folder(DEEP, tmp_path)):
        with pytest.raises(ShoalError, match="16 or 32 bits"):
            build_user_dataset(data)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_inputs_of_yes_and_no_are_1_and_0_and_no_bytes_of_a_picture(kind):
    x = np.random.default_rng(0).random((20, 5)) < 0.5
    dataset = build_user_dataset((kind(x), np.arange(20) % 2)).to(torch.float32, torch.device("cpu"))
    assert isinstance(dataset.inputs, torch.Tensor) and dataset.inputs.unique().tolist() == [0.0, 1.0]
