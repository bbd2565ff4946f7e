"""How fast codecs are: 10 million parameters through every one of them, each way.

    python benchmarks/codecs.py [--size 10_000_000] [--threads 2] [--clock cpu] [--out benchmarks/results/codecs.md]

The model is one large matrix and three smaller tensors in float32; `fedbiad` leaves out half of the matrix's rows. A
speed is the bytes of the model over the seconds of the fastest of some rounds; encoding includes error feedback with
what earlier rounds left. On a machine that is busy with other work, `--clock cpu --threads 1` counts the seconds of one
processor that the work itself took.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch import Tensor

from shoal.core import wire
from shoal.core.expression import parse_method
from shoal.core.model import tree
from shoal.core.model.plan import WHOLE_MODEL, Axis, Cut, Slicer
from shoal.core.part import Part
from shoal.core.streams import RandomStreams
from shoal.core.wire import CodecLink
from shoal.parts import PRESETS, find_shipped_parts
from shoal.parts.lib.row_patterns import pick_row_pattern

METHODS = [
    "topk",
    "topk(ratio=0.1)",
    "topk(feedback=False, positions='golomb')",
    "topk(positions='bitmap')",
    "dgc",
    "dgc(warmup='')",
    "stc",
    "stc(positions='golomb')",
    "randomk",
    "randomk(feedback=False)",
    "fedpaq",
    "fedpaq(bits=4)",
    "half",
    "half(kind='bfloat16')",
    "signsgd",
    "topk+fedpaq",
    "fedbiad",
    "fedbiad+dgc(warmup='')",
]

COLUMNS = 1000


def make_model(size: int) -> dict[str, Tensor]:
    """Changes of a model of about that many parameters."""
    generator = torch.Generator().manual_seed(0)
    sizes = (size * 9 // 100, size * 9 // 1000, size // 1000)
    rows = torch.randn(size * 9 // 10 // COLUMNS, COLUMNS, generator=generator)
    return {"t0": rows} | {f"t{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes, 1)}


def time_codecs(
    codecs: tuple[Part, ...], values: dict[str, Tensor], times: int, clock=perf_counter
) -> tuple[float, float, int]:
    """The fewest seconds to encode and to decode, and the bytes in between."""
    rows = Axis("rows", len(values["t0"]), (Cut("t0", 0),))
    link = CodecLink("up", 0, 0, WHOLE_MODEL, Slicer((rows,), values), RandomStreams(0), values)
    message = wire.pack_message(values, {}, WHOLE_MODEL, link.slicer, list(values))
    pattern = pick_row_pattern(None, rows.size, 0.5, torch.Generator().manual_seed(0))
    memories = {"fedbiad": {"kept": {"rows": pattern}}}
    encode, decode, size = [], [], 0
    for _ in range(times):
        link = replace(link, known={})
        start = clock()
        encoded, memories = wire.encode_message(message, codecs, memories, link)
        encoded_at = clock()
        wire.decode_message(encoded, codecs, link)
        encode.append(encoded_at - start)
        decode.append(clock() - encoded_at)
        size = encoded.nbytes
    return min(encode), min(decode), size


def build_table(size: int, times: int, clock=perf_counter) -> list[str]:
    values = make_model(size)
    full = tree.count_tree_bytes(values)
    lines = ["| codec | encode, GB/s | decode, GB/s | bytes of the model's |", "| --- | --: | --: | --: |"]
    for text in METHODS:
        encode, decode, sent = time_codecs(
            parse_method(text, find_shipped_parts(), PRESETS).codecs_for("up"), values, times, clock
        )
        lines.append(f"| {text} | {full / encode / 1e9:.2f} | {full / decode / 1e9:.2f} | {sent / full:.3%} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=int, default=10_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = build_table(args.size, args.times, process_time if args.clock == "cpu" else perf_counter)
    if args.out:
        options = f"--size {args.size} --threads {args.threads} --clock {args.clock}"
        command = f"Command: `python benchmarks/codecs.py {options}`, torch {torch.__version__}."
        head = ["# How fast codecs are", "", command, ""]
        Path(args.out).write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
