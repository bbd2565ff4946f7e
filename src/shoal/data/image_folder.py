"""A folder of images, one folder per class, or one per device and class."""

from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.data.download import read_bytes
from shoal.data.frames import refuse_wide_pixels
from shoal.data.tiny_imagenet import open_image, read_pixels
from shoal.data.user_split import UserSamples, make_data_error, number_owners
from shoal.storage.files import explain_disk_errors

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")


def list_subfolders(path: Path) -> list[str]:
    path = path.expanduser()
    if not path.is_dir():
        return []
    with explain_disk_errors(path):
        return sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def read_image_folder(folder: Path) -> UserSamples:
    """`<class>/*.png` or `<device>/<class>/*.png`; all images have one size, and are grey when all of them are."""
    with explain_disk_errors(folder):
        paths_by_depth = {
            depth: sorted(p for p in folder.glob("/".join("*" * (depth + 1))) if p.suffix.lower() in IMAGE_SUFFIXES)
            for depth in (1, 2)
        }
    depth = 1 if paths_by_depth[1] else 2
    if paths_by_depth[1] and paths_by_depth[2]:
        raise make_data_error(
            f"{folder} has images at two depths.", "Write <class>/*.png or <device>/<class>/*.png throughout."
        )
    paths = paths_by_depth[depth]
    if not paths:
        raise ShoalError(
            "no-data", f"There are no images in {folder}.", "Write <class>/*.png or <device>/<class>/*.png."
        )
    opened = [(path, open_image(read_bytes(path), path)) for path in paths]
    size = opened[0][1].size
    for path, image in opened:
        refuse_wide_pixels(image, str(path))
        if image.size != size:
            raise make_data_error(
                f"{path} is {image.size[0]} x {image.size[1]}, the first image {size[0]} x {size[1]}.",
                "Bring all images to one size.",
            )
    mode = "L" if all(image.mode in ("1", "L") for _, image in opened) else "RGB"
    x = torch.from_numpy(np.stack([read_pixels(image, path, mode, size) for path, image in opened]))
    owners = number_owners([path.parts[-3] for path in paths]) if depth == 2 else None
    return UserSamples(x, [path.parent.name for path in paths], owners)
