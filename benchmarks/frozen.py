"""A frozen backbone beside a trained one: memory, messages and checkpoint of one round of 50 devices in one call.

    python benchmarks/frozen.py [--devices 50] [--width 1024] [--compute cpu] [--out benchmarks/results/frozen.md]

The model is a backbone of three linear layers of this width and a head of ten classes. All devices of the round train
in one vectorised call of the engine `batched`. Each row is a process of its own; its memory is what the process takes
at its peak beyond what it takes when model and data are there, on a GPU what torch has allocated.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import Tensor, nn

import shoal
from shoal.core.model.tree import count_tree_bytes
from shoal.engines.batched.engine import BatchedEngine
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.runs.store import RunFolder
from shoal.testing.rounds import play_rounds

CASES = ("frozen", "trained")


class Backboned(nn.Module):
    def __init__(self, width: int, frozen: bool):
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.backbone = nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU()).requires_grad_(not frozen)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def measure(case: str, devices: int, width: int, compute: str) -> dict[str, float]:
    """Bytes and seconds of one round, after which a checkpoint is written."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(8 * devices, 1, 28, 28, generator=generator), torch.arange(8 * devices) % 10
    model = Backboned(width, case == "frozen")
    with TemporaryDirectory() as folder:
        values = {"model": model, "data": (x, y, x[:10], y[:10]), "devices": devices, "sample": devices}
        more = {"split": "iid", "batch": 4, "compute": compute, "lr": 0.01, "out": f"{folder}/run"}
        recipe = Recipe().with_values(**shoal.hand_over_objects(values | more))
        assembly = assemble_run(recipe)
        whole = count_tree_bytes([assembly.net.initial, assembly.net.frozen])
        assembly.loop.host.engine = BatchedEngine(devices, budget=1 << 50)
        state, before, start = assembly.loop.start(assembly.net), read_memory(compute), perf_counter()
        state, [row] = play_rounds(assembly.loop, state, 0, 1)
        seconds, peak = perf_counter() - start, read_memory(compute) - before
        with RunFolder.create(recipe) as run_folder:
            run_folder.append_row(row)
            run_folder.save_checkpoint(recipe, state, 1, assembly.memory)
            checkpoint = run_folder.checkpoint_file.stat().st_size
    return {
        "model": whole,
        "peak": peak,
        "message": row["bytes_up"] / devices,
        "checkpoint": checkpoint,
        "seconds": seconds,
    }


def read_memory(compute: str) -> int:
    """The most bytes so far: of the process, or of torch on a GPU."""
    if compute.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def format_table(found: dict[str, dict[str, float]]) -> str:
    """The two cases and their ratio, in Markdown."""
    columns = {"peak": "memory of the round", "message": "message of a device", "checkpoint": "checkpoint file"}
    lines = [f"| backbone | {' | '.join(columns.values())} | seconds |", f"|---|{'--:|' * (len(columns) + 1)}"]
    for case in CASES:
        sizes = " | ".join(f"{found[case][key] / 1e6:,.2f} MB" for key in columns)
        lines.append(f"| {case} | {sizes} | {found[case]['seconds']:.1f} |")
    ratios = {key: found["trained"][key] / found["frozen"][key] for key in (*columns, "seconds")}
    lines.append(f"| trained / frozen | {' | '.join(f'{ratio:,.1f}' for ratio in ratios.values())} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=50)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--compute", default="cpu")
    parser.add_argument("--case", choices=CASES, help="measure one row, and print it as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = ["--devices", str(args.devices), "--width", str(args.width), "--compute", args.compute]
    if args.case:
        print(json.dumps(measure(args.case, args.devices, args.width, args.compute)))
        return
    found = {}
    for case in CASES:
        command = [sys.executable, __file__, *options, "--case", case]
        found[case] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    table = format_table(found)
    head = f"{args.devices} devices in one call, a model of {found['frozen']['model'] / 1e6:.1f} MB, on {args.compute}."
    print(f"{head}\n\n{table}")
    if args.out:
        command = f"python benchmarks/frozen.py {' '.join(options)}"
        text = f"# A frozen backbone\n\nCommand: `{command}`, torch {torch.__version__}.\n\n{head}\n\n{table}\n"
        args.out.write_text(text)


if __name__ == "__main__":
    main()
