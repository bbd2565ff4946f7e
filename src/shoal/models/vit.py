"""A small vision Transformer (Dosovitskiy et al., 2021) for 32x32 images, with LayerNorm before each sum."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Block, Cut, make_output_rows
from shoal.models.image_input import check_image_shape


class Patches(nn.Module):
    """Cuts an image into squares, embeds each, and adds its position."""

    def __init__(self, channels: int, patch: int, count: int, width: int):
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn(count, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.place


class Attention(nn.Module):
    """Self-attention; how many heads there are follows from the rows of its weight."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.heads = nn.Identity()
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * self.head**-0.5).softmax(-1)
        return self.out(self.heads((weights @ v).transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    """Attention over the patches, then a perceptron on each; both are added to what came in."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(self.gelu(self.fc1(self.norm2(x))))


class Mean(nn.Module):
    """The mean over the patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def vit(input_shape: tuple[int, ...], classes: int) -> Net:
    """patches of 4x4, width 64, 4 layers of 4 heads and 128 hidden units, the mean over patches, classes."""
    patch, width, depth, heads, hidden = 4, 64, 4, 4, 128
    channels, *sides = check_image_shape(input_shape, "The Transformer")
    if any(side % patch for side in sides):
        problem = f"The Transformer cuts images into {patch}x{patch} squares, {sides[0]}x{sides[1]} does not divide."
        raise ShoalError("no-data", problem, "Use --model lenet, which takes any size.")
    names = [f"layer{i + 1}" for i in range(depth)]
    module = nn.Sequential(
        OrderedDict(
            [
                ("patches", Patches(channels, patch, sides[0] * sides[1] // patch**2, width)),
                *((name, Layer(width, heads, hidden)) for name in names),
                ("norm", nn.LayerNorm(width)),
                ("mean", Mean()),
                ("fc", nn.Linear(width, classes)),
            ]
        )
    )
    axes = tuple(axis for name in names for axis in find_layer_axes(name, heads, width // heads, hidden))
    blocks = (
        Block("stem", ("patches",)),
        *(Block(name, (name,)) for name in names),
        Block("head", ("norm", "mean", "fc")),
    )
    return Net(module, input_shape, classes, axes, blocks, rows=(make_output_rows("fc", classes),))


def find_layer_axes(layer: str, heads: int, head: int, hidden: int) -> tuple[Axis, ...]:
    """The heads and the hidden units. The width itself passes through sums and LayerNorms and is no axis."""
    packed = (Cut(f"{layer}.attention.qkv.{key}", 0, span=head, copies=3) for key in ("weight", "bias"))
    return (
        Axis(
            f"{layer}.heads",
            heads,
            (*packed, Cut(f"{layer}.attention.out.weight", 1, span=head, reads=True)),
            f"{layer}.attention.heads",
        ),
        Axis(
            f"{layer}.fc1",
            hidden,
            (Cut(f"{layer}.fc1.weight", 0), Cut(f"{layer}.fc1.bias", 0), Cut(f"{layer}.fc2.weight", 1, reads=True)),
        ),
    )
