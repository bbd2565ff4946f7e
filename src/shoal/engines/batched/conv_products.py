"""Convolutions of several devices as batched matrix products over unfolded images.

A grouped convolution with a group for each device is, per device, a product of patches (for each pixel of the output
what a filter sees there) and filters. Filter taps that only ever meet padding are left out: of a 3x3 filter with
padding 1 on an image of one pixel one tap remains, and the product is a ninth.

All is written with views, padding and sums, which a compiler fuses into few kernels. The patches of the forward pass
and those of the filters' gradient are the same: whoever has them already can hand them over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Where the windows of filters lie along one side of an image, and which of their taps meet the image at all."""

    size: int
    """Pixels of the image."""
    stride: int
    count: int
    """Windows, which is pixels of the output."""
    first: int
    """The first tap that meets the image."""
    taps: int
    """Taps from the first to the last that meets it."""
    before: int
    """Padding before the image that these taps see; what they see after it, less what they leave out, is `after`."""

    @property
    def after(self) -> int:
        return self.stride * (self.count - 1) + self.taps - self.before - self.size

    @property
    def kept_taps(self) -> slice:
        return slice(self.first, self.first + self.taps)


def find_windows(size: int, kernel: int, stride: int, padding: int) -> Windows:
    """The windows along one side of an image."""
    count = (size + 2 * padding - kernel) // stride + 1
    meeting = [tap for tap in range(kernel) if any(0 <= stride * at + tap - padding < size for at in range(count))]
    first, last = (meeting[0], meeting[-1]) if meeting else (0, 0)
    return Windows(size, stride, count, first, last - first + 1, padding - first)


def find_both_windows(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Windows, Windows]:
    """The windows down and across an image; torch writes a stride or padding of one number for both."""
    down, across = (
        find_windows(size[-2 + side], kernel[-2 + side], stride[side % len(stride)], padding[side % len(padding)])
        for side in (0, 1)
    )
    return down, across


def make_patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], devices: int
) -> Tensor:
    """What filters of this size see: [devices, batch * pixels of the output, channels * taps]."""
    return unfold_patches(x, *find_both_windows(x.shape, kernel, stride, padding), devices)


def multiply_forward(
    x: Tensor,
    filters: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    devices: int,
    patches: Tensor | None = None,
) -> Tensor:
    """The convolution [batch, devices * outputs, height, width]."""
    down, across = find_both_windows(x.shape, filters.shape, stride, padding)
    patches = unfold_patches(x, down, across, devices) if patches is None else patches
    rows = torch.bmm(patches, flatten_filters(filters, down, across, devices).mT)
    return unflatten_rows(rows, len(x), down.count, across.count)


def multiply_filter_gradient(
    grad: Tensor,
    x: Tensor,
    filters: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    devices: int,
    patches: Tensor | None = None,
) -> Tensor:
    """The filters' gradient, of which only the shape of `filters` is read; taps that were left out have none."""
    down, across = find_both_windows(x.shape, filters.shape, stride, padding)
    patches = unfold_patches(x, down, across, devices) if patches is None else patches
    kept = torch.bmm(flatten_rows(grad, devices).mT, patches)
    kept = kept.view(*filters.shape[:2], down.taps, across.taps)
    height, width = filters.shape[2:]
    left_out = (across.first, width - across.kept_taps.stop, down.first, height - down.kept_taps.stop)
    return F.pad(kept, left_out) if any(left_out) else kept


def multiply_input_gradient(
    grad: Tensor, x: Tensor, filters: Tensor, stride: Sequence[int], padding: Sequence[int], devices: int
) -> Tensor:
    """The images' gradient, of which only the shape of `x` is read.

    With stride 1 it is a convolution of the padded gradient with filters that are turned around; else it is folded.
    """
    down, across = find_both_windows(x.shape, filters.shape, stride, padding)
    if down.stride > 1 or across.stride > 1:
        return fold_input_gradient(grad, x, filters, stride, padding, devices)
    turned = filters[..., down.kept_taps, across.kept_taps].flip(2, 3).unflatten(0, (devices, -1))
    turned = turned.permute(0, 1, 3, 4, 2).flatten(1, 3)
    patches = unfold_patches(grad, reverse_windows(down), reverse_windows(across), devices)
    return unflatten_rows(torch.bmm(patches, turned), len(x), down.size, across.size)


def reverse_windows(windows: Windows) -> Windows:
    """The windows over the output in which each pixel of the image has been; their stride is 1."""
    return Windows(windows.count, 1, windows.size, 0, windows.taps, windows.taps - 1 - windows.before)


def fold_input_gradient(
    grad: Tensor, x: Tensor, filters: Tensor, stride: Sequence[int], padding: Sequence[int], devices: int
) -> Tensor:
    """The images' gradient as the patches' gradient, in which all that is of one pixel is added up."""
    down, across = find_both_windows(x.shape, filters.shape, stride, padding)
    patches = torch.bmm(flatten_rows(grad, devices), flatten_filters(filters, down, across, devices))
    patches = patches.view(devices, len(x), down.count, across.count, -1, down.taps, across.taps)
    return fold_patches(patches.permute(1, 0, 4, 2, 3, 5, 6), down, across).flatten(1, 2)


def fold_patches(patches: Tensor, down: Windows, across: Windows) -> Tensor:
    """[..., windows down, windows across, taps down, taps across] -> [..., height, width].

    Pixels whose places leave the same remainders when divided by the strides are reached by the same taps: such pixels
    lie next to each other in a smaller image, of which there is one for each pair of remainders.
    """
    images = [
        sum_taps_of_remainders(patches, down, across, row_remainder, column_remainder)
        for row_remainder in range(down.stride)
        for column_remainder in range(across.stride)
    ]
    folded = images[0] if len(images) == 1 else interleave_images(images, down.stride, across.stride)
    return folded[..., down.before : down.before + down.size, across.before : across.before + across.size]


def sum_taps_of_remainders(
    patches: Tensor, down: Windows, across: Windows, row_remainder: int, column_remainder: int
) -> Tensor:
    """The smaller image of the pixels whose places leave these remainders when divided by the strides."""
    tall, wide = count_places(down), count_places(across)
    image = patches.new_zeros(())
    for i in range(row_remainder, down.taps, down.stride):
        for j in range(column_remainder, across.taps, across.stride):
            top, left = i // down.stride, j // across.stride
            around = (left, wide - left - across.count, top, tall - top - down.count)
            image = image + F.pad(patches[..., i, j], around)
    return image.expand(*patches.shape[:-4], tall, wide)


def interleave_images(images: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    """One image of which each block of so many rows and columns has one pixel of every smaller image, row by row."""
    blocks = torch.stack(tuple(images), -1).unflatten(-1, (rows, columns))
    return blocks.movedim(-2, -3).flatten(-4, -3).flatten(-2, -1)


def count_places(windows: Windows) -> int:
    """The pixels along one side of the image of one remainder."""
    pixels = -(-(windows.before + windows.size) // windows.stride)
    return max(pixels, windows.count + (windows.taps - 1) // windows.stride)


def unfold_patches(images: Tensor, down: Windows, across: Windows, devices: int) -> Tensor:
    """What each window sees: [devices, batch * windows, channels * taps]."""
    around = (across.before, across.after, down.before, down.after)
    padded = F.pad(images, around) if any(around) else images
    windows = padded.unflatten(1, (devices, -1))
    windows = windows.unfold(3, down.taps, down.stride).unfold(4, across.taps, across.stride)
    return windows.permute(1, 0, 3, 4, 2, 5, 6).reshape(devices, len(images) * down.count * across.count, -1)


def flatten_filters(filters: Tensor, down: Windows, across: Windows, devices: int) -> Tensor:
    """The taps that are kept: [devices, outputs, channels * taps]."""
    return filters[..., down.kept_taps, across.kept_taps].unflatten(0, (devices, -1)).flatten(2)


def flatten_rows(images: Tensor, devices: int) -> Tensor:
    """[batch, devices * channels, height, width] -> [devices, batch * height * width, channels]."""
    return images.unflatten(1, (devices, -1)).permute(1, 0, 3, 4, 2).flatten(1, 3)


def unflatten_rows(rows: Tensor, batch: int, height: int, width: int) -> Tensor:
    """The inverse of `flatten_rows`."""
    return rows.unflatten(1, (batch, height, width)).permute(1, 0, 4, 2, 3).flatten(1, 2)
