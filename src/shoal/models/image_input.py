"""Checks and padding of inputs for models of images."""

from torch import nn

from shoal.core.errors import ShoalError


def check_image_shape(input_shape: tuple[int, ...], model: str) -> tuple[int, int, int]:
    """Channels, height and width of the inputs; refused where they are not images."""
    if len(input_shape) != 3:
        raise ShoalError(
            "no-data", f"{model} needs images, got inputs of shape {tuple(input_shape)}.", "Use --model mlp."
        )
    channels, height, width = input_shape
    return channels, height, width


def build_border(height: int, width: int, least: int = 32) -> tuple[nn.Module, int, int]:
    """The layer that puts zeros around an image up to a least size, and the size it has then."""
    tall, wide = max(0, least - height), max(0, least - width)
    sides = (wide // 2, wide - wide // 2, tall // 2, tall - tall // 2)
    return nn.ZeroPad2d(sides) if tall or wide else nn.Identity(), height + tall, width + wide
