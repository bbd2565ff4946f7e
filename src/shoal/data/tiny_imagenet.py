"""Tiny-ImageNet: 200 classes of colour images of 64 x 64, as JPEG files in folders."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.data.dataset import Dataset
from shoal.data.download import ZipReader, find_data_file, read_bytes
from shoal.storage.files import damaged_file_error

FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP")
PIXELS = 2**24


def read_tiny_imagenet(folder: Path, name: str = "tiny-imagenet", side: int = 64) -> Dataset:
    """The official folder, or the official zip file as it is; `side=32` halves the images by averaging 2 x 2 pixels."""
    place = folder / "tiny-imagenet-200"
    if place.is_dir():
        names = [path.relative_to(place).as_posix() for path in place.glob("train/*/images/*")]
        return assemble_tiny_imagenet(names, lambda file: read_bytes(place / file), place, name, side)
    archive = ZipReader(find_data_file(folder, ["tiny-imagenet-200.zip"]))
    try:
        top = "tiny-imagenet-200/"
        names = [file.removeprefix(top) for file in archive.names if file.startswith(top)]
        return assemble_tiny_imagenet(names, lambda file: archive.read(top + file), archive.path, name, side)
    finally:
        archive.close()


def assemble_tiny_imagenet(
    names: list[str], content: Callable[[str], bytes], path: Path, name: str, side: int
) -> Dataset:
    """Training images by folder, and the labelled validation images as the test set."""
    classes = {word: i for i, word in enumerate(decode_lines(content("wnids.txt"), path / "wnids.txt"))}
    train: list[tuple[str, int]] = []
    for file in sorted(names):
        parts = PurePosixPath(file).parts
        if len(parts) == 4 and (parts[0], parts[2]) == ("train", "images") and parts[3].endswith(".JPEG"):
            if parts[1] not in classes:
                raise damaged_file_error(path / file, "its class is not in wnids.txt")
            train.append((file, classes[parts[1]]))
    test: list[tuple[str, int]] = []
    notes = path / "val" / "val_annotations.txt"
    for line in decode_lines(content("val/val_annotations.txt"), notes):
        file, label = (*line.split("\t"), "")[:2]
        if label not in classes or not file.endswith(".JPEG") or PurePosixPath(file).name != file or "\\" in file:
            raise damaged_file_error(notes, f"it has the line {line[:60]!r}")
        test.append((f"val/images/{file}", classes[label]))
    halves: list[torch.Tensor] = []
    for half in (train, test):
        if not half:
            raise damaged_file_error(path, "it holds no images")
        images = np.empty((len(half), 3, side, side), np.uint8)
        for i, (file, _) in enumerate(half):
            images[i] = decode_square_image(content(file), path / file, 64, side)
        halves += [torch.from_numpy(images), torch.tensor([label for _, label in half])]
    return Dataset(name, *halves, classes=len(classes))


def decode_lines(content: bytes, path: Path) -> list[str]:
    """The lines of a text file that are not empty, refused where it is not ASCII."""
    try:
        return [line for line in content.decode("ascii").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise damaged_file_error(path, error) from error


def decode_square_image(content: bytes, path: Path, side: int, to: int) -> np.ndarray:
    """A colour image (3, to, to) from one of `side` x `side`."""
    image = open_image(content, path)
    if image.size != (side, side):
        raise damaged_file_error(path, f"{image.size[0]} x {image.size[1]} pixels instead of {side} x {side}")
    return read_pixels(image, path, "RGB", (to, to))


def open_image(content: bytes, path: Path):
    """An image of which only the head has been read; its size is known to be reasonable."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ShoalError(
            "missing-extra", "Images are read with Pillow, which is not installed.", "Run pip install 'shoal[data]'."
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:
        raise damaged_file_error(
            path, error if not isinstance(error, OSError) else "not an image that can be read"
        ) from error
    if image.size[0] * image.size[1] > PIXELS:
        raise damaged_file_error(path, f"it has more than {PIXELS} pixels")
    return image


def read_pixels(image, path: Path, mode: str, size: tuple[int, int]) -> np.ndarray:
    """The bytes of an image, channels first; made smaller or larger by averaging over areas where need be."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = image.convert(mode)
            if image.size != size:
                image = image.resize(size, Image.Resampling.BOX)
            values = np.asarray(image, np.uint8)
    except Exception as error:
        raise damaged_file_error(path, error) from error
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
