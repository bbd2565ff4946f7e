"""Feature skew: devices whose inputs differ, by noise or rotation, whatever the split of the samples is."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.streams import RandomStreams
from shoal.data.dataset import Dataset, get_single_tensor
from shoal.data.mapped import count_gigabytes, stays_on_disk
from shoal.data.population import Population, StoredPopulation


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on the inputs: none on the first device, and of the deviation SCALE on the last; tests have none.

    In equal steps between, as in NIID-Bench (Li and others 2022, arXiv:2102.02079).
    """

    scale: float

    def change_device(self, x: Tensor, device: int, devices: int, generator: torch.Generator) -> Tensor:
        level = self.scale * device / max(devices - 1, 1)
        return x + level * torch.randn(x.shape, generator=generator).to(x) if level else x

    def change_test(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Rotation:
    """Images turned by one of K angles, on one device after the other; test samples by each angle in turn."""

    count: int

    def change_device(self, x: Tensor, device: int, devices: int, generator: torch.Generator) -> Tensor:
        return rotate_images(x, 360 * (device % self.count) / self.count)

    def change_test(self, x: Tensor) -> Tensor:
        rotated = x.clone()
        for turn in range(1, self.count):
            rotated[turn :: self.count] = rotate_images(x[turn :: self.count], 360 * turn / self.count)
        return rotated


FeatureSkew = Noise | Rotation


def rotate_images(x: Tensor, degrees: float) -> Tensor:
    """Images (N, C, H, W) turned against the clock; right angles of squares are exact, what comes from outside is 0."""
    if x.dim() != 4:
        problem = f"rotation turns images, and inputs have the shape {tuple(x.shape[1:])}."
        raise ShoalError("bad-value", problem, "Leave it out of the split, or give inputs (N, C, H, W).")
    if degrees % 180 == 0 or (degrees % 90 == 0 and x.shape[2] == x.shape[3]):
        return torch.rot90(x, round(degrees / 90), (2, 3))
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    cos, sin = float(angle.cos()), float(angle.sin())
    ratio = x.shape[2] / x.shape[3]
    turn = torch.tensor([[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]], dtype=x.dtype, device=x.device)
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _parse_scale(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e6:
        raise ValueError
    return value


def _parse_angles(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 360:
        raise ValueError
    return value


SKEWS: dict[str, tuple[Callable[..., FeatureSkew], Callable[[str], float], str]] = {
    "noise": (Noise, _parse_scale, "noise:SCALE with SCALE from 0, for example iid+noise:0.5"),
    "rotation": (Rotation, _parse_angles, "rotation:K with K angles from 1 to 360, for example iid+rotation:4"),
}
"""For each name its class, the reader of its value, and how it is written, after a split and a plus."""


def parse_skew(text: str) -> FeatureSkew:
    """The skew that a text like `noise:0.5` names."""
    name, _, given = text.partition(":")
    if name not in SKEWS:
        raise unknown_name_error("feature skew", name, SKEWS)
    kind, read, form = SKEWS[name]
    try:
        return kind(read(given))
    except ValueError:
        problem = f"The feature skew {text[:80]!r} cannot be read."
        raise ShoalError("bad-value", problem, f"Write {form}.") from None


def skew_features(
    dataset: Dataset, population: Population, skews: tuple[FeatureSkew, ...], streams: RandomStreams
) -> Dataset:
    """The data set with the inputs of each device changed; those of the server and of nobody stay as they are."""
    if not skews:
        return dataset
    x, test_x = (get_single_tensor(inputs, "feature skew") for inputs in (dataset.inputs, dataset.test_inputs))
    if not isinstance(population, StoredPopulation):
        problem = "Devices of the split virtual share samples, which cannot be changed for each of them."
        raise ShoalError("bad-value", problem, "Use another split for a feature skew.")
    if stays_on_disk(dataset) or not x.is_floating_point():
        what = f"{count_gigabytes(x)} of mapped inputs" if stays_on_disk(dataset) else "whole numbers"
        raise ShoalError("bad-value", f"A feature skew cannot change {what}.", "Leave it out of the split.")
    x = x.clone()
    for device in range(len(population)):
        rows = torch.from_numpy(population[device]).to(x.device)
        if len(rows):
            own = x.index_select(0, rows)
            for i, skew in enumerate(skews):
                own = skew.change_device(own, device, len(population), streams.make_torch_generator("skew", i, device))
            x.index_copy_(0, rows, own)
    final_x = None if dataset.final_inputs is None else get_single_tensor(dataset.final_inputs, "feature skew")
    for skew in skews:
        test_x = skew.change_test(test_x)
        final_x = None if final_x is None else skew.change_test(final_x)
    return replace(dataset, inputs=x, test_inputs=test_x, final_inputs=final_x)
