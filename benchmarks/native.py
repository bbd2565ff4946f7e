"""Kernels of our own against torch's operations on one core, shape by shape: what the limits in native_ops.py follow.

    python benchmarks/native.py [--repeats 15] [--out benchmarks/results/native.md]

Microseconds are the best of several turns, in which both take part, so that whatever else the machine does hits both
alike. Batches have 10 images.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from peers.board import aligned, machine, markdown
from torch import Tensor

from shoal.engines.batched.native_library import load_native_kernels

OUT = Path(__file__).resolve().parent / "results" / "native.md"
BATCH = 10
aten, native = torch.ops.aten, torch.ops.shoal_native
CONVOLUTIONS = {
    "LeNet 1": (3, 32, 5, 6, 1, 0),
    "LeNet 2": (6, 14, 5, 16, 1, 0),
    "CNN 1": (3, 32, 3, 32, 1, 0),
    "CNN 2": (32, 15, 3, 64, 1, 0),
    "CNN 3": (64, 6, 3, 64, 1, 0),
    "VGG 1": (3, 32, 3, 64, 1, 1),
    "VGG 2": (64, 16, 3, 128, 1, 1),
    "VGG 4": (256, 8, 3, 256, 1, 1),
    "VGG 8": (512, 2, 3, 512, 1, 1),
    "ResNet stem": (3, 32, 7, 64, 2, 3),
    "ResNet 3x3": (64, 8, 3, 64, 1, 1),
    "ResNet 1x1": (64, 8, 1, 128, 2, 0),
    "grey 5x5": (1, 28, 5, 32, 1, 2),
}
"""Channels, size, filter size, output channels, stride and padding."""
PRODUCTS = {"LeNet fc1": (400, 120), "LeNet fc3": (84, 10), "MLP": (784, 128), "wide": (2048, 512)}
"""Inputs and outputs of a linear layer."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", default=str(OUT), help="Markdown file; none with an empty name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not load_native_kernels():
        sys.exit("The kernels cannot be built here: no C++ compiler was found, or SHOAL_NATIVE_KERNELS is off.")
    head = [f"{key}: {value}" for key, value in machine().items()]
    rows = [["layer", "operation", "torch, us", "own, us", "ratio"]]
    for name, shape in CONVOLUTIONS.items():
        rows += [[name, *row] for row in time_convolution(shape, args.repeats)]
    for name, shape in PRODUCTS.items():
        rows += [[name, *row] for row in time_products(shape, args.repeats)]
    print("\n".join(head), aligned(rows), sep="\n\n")
    if args.out:
        command = shlex.join(["python", "benchmarks/native.py", *sys.argv[1:]])
        text = ["# Kernels", f"Command: `{command}`.", "\n".join(f"- {line}" for line in head), markdown(rows)]
        Path(args.out).write_text("\n\n".join(text) + "\n", encoding="utf-8")


def time_convolution(shape: tuple[int, ...], repeats: int) -> list[list[str]]:
    channels, size, width, out, step, margin = shape
    x, w, b = draw_images(BATCH, channels, size, size), draw_images(out, channels, width, width), torch.randn(out)
    stride, padding = [step] * 2, [margin] * 2
    options = (stride, padding, [1, 1], False, [0, 0], 1)
    y = aten.convolution(x, w, b, *options)
    slopes = torch.randn_like(y)
    pairs = {"forward": (lambda: aten.convolution(x, w, b, *options), lambda: native.conv2d(x, w, b, stride, padding))}
    for name, wanted in (("filter gradient", [False, True, True]), ("input gradient", [True, False, False])):
        pairs[name] = (
            lambda wanted=wanted: aten.convolution_backward(slopes, x, w, [out], *options, wanted),
            lambda wanted=wanted: native.conv2d_backward(slopes, x, w, stride, padding, *wanted),
        )
    if y.shape[-1] >= 8:
        pairs |= pair_poolings(y)
    return [time_pair(name, *pair, repeats) for name, pair in pairs.items()]


def pair_poolings(y: Tensor) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """A ReLU and a max-pooling behind a convolution, and their gradient."""
    relu, window = aten.relu(y), [2, 2]
    pooled, indices = aten.max_pool2d_with_indices(relu, window, window)
    own, places = native.max_pool2d(y, window, window, True)
    slopes = torch.randn_like(pooled)

    def backprop() -> Tensor:
        spread = aten.max_pool2d_with_indices_backward(slopes, relu, window, window, [0, 0], [1, 1], False, indices)
        return aten.threshold_backward(spread, relu, 0)

    return {
        "ReLU, pooling": (
            lambda: aten.max_pool2d_with_indices(aten.relu(y), window, window),
            lambda: native.max_pool2d(y, window, window, True),
        ),
        "their gradient": (
            backprop,
            lambda: native.max_pool2d_backward(slopes, own, places, list(y.shape), window, window, True),
        ),
    }


def time_products(shape: tuple[int, ...], repeats: int) -> list[list[str]]:
    inputs, outputs = shape
    x, w, b, slopes = (torch.randn(*s) for s in ((BATCH, inputs), (outputs, inputs), (outputs,), (BATCH, outputs)))
    pairs = {
        "forward": (lambda: torch.addmm(b, x, w.t()), lambda: native.matmul(b, x, w.t())),
        "input gradient": (lambda: torch.mm(slopes, w), lambda: native.matmul(None, slopes, w)),
        "update": (
            lambda: w.addmm_(slopes.t(), x, alpha=-1e-6),
            lambda: native.add_matmul_(w, slopes.t(), x, -1e-6),
        ),
    }
    return [time_pair(name, *pair, repeats) for name, pair in pairs.items()]


def time_pair(name: str, by_torch: Callable[[], object], own: Callable[[], object], repeats: int) -> list[str]:
    best = [float("inf")] * 2
    for turn in range(repeats + 1):
        for i, call in enumerate((by_torch, own)):
            start, calls = perf_counter(), 0
            while perf_counter() - start < 2e-3:
                call()
                calls += 1
            if turn:
                best[i] = min(best[i], (perf_counter() - start) / calls)
    return [name, *(f"{1e6 * seconds:.1f}" for seconds in best), f"{best[0] / best[1]:.2f}"]


def draw_images(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


if __name__ == "__main__":
    main()
