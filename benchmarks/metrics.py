"""What metrics cost beside plain accuracy and loss: the time of one evaluation, and of a round with one.

    python benchmarks/metrics.py [--samples 10000] [--repeats 20] [--out benchmarks/results/metrics.md]

The model is `mlp` on 28 x 28 pixels and ten classes, with a test set of this many samples. A round trains five devices
of 60 samples; its time with an evaluation after it is that evaluation's and its own. Every time is the median of the
repeats, one thread, in turns, so that what else the machine does meets all alike.
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from shoal.core.builtin_tasks import CLASSIFY
from shoal.core.library_metrics import LibraryMetric
from shoal.core.measures.evaluate import Evaluator
from shoal.core.model.net import Net
from shoal.core.round import Loop
from shoal.data.dataset import Dataset
from shoal.runs.build import assemble_run
from shoal.runs.given_objects import hand_over_objects
from shoal.runs.recipe import Recipe
from shoal.testing.rounds import play_rounds

PLAIN = "accuracy, loss"
LIBRARY = [metric.name for metric in CLASSIFY.metrics if isinstance(metric.make, LibraryMetric)]
CASES: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "top3": ("top3",),
    "confusion": ("confusion",),
    "log_loss": ("log_loss",),
    **{name: (name,) for name in LIBRARY},
    "all of torchmetrics": tuple(LIBRARY),
}


def build_evaluators(samples: int) -> dict[str, tuple[Evaluator, Net, Loop]]:
    """By case the evaluator of a run on random pictures, and its net and loop."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(samples + 600, 1, 28, 28, generator=generator), torch.arange(samples + 600) % 10
    data = Dataset("noise", x[samples:], y[samples:], x[:samples], y[:samples], 10)
    found = {}
    for name, metrics in CASES.items():
        values = hand_over_objects({"data": data, "devices": 10, "sample": 5, "split": "iid", "metrics": metrics})
        assembly = assemble_run(Recipe().with_values(**values))
        found[name] = assembly.evaluator, assembly.net, assembly.loop
    return found


def measure(samples: int, repeats: int) -> dict[str, tuple[float, float]]:
    """By case the seconds of an evaluation, and those of a round with its evaluation."""
    cases = build_evaluators(samples)
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
    states = {name: loop.start(net) for name, (_, net, loop) in cases.items()}
    for number in range(repeats + 1):
        for name, (evaluator, net, loop) in cases.items():
            start = perf_counter()
            evaluator(net, net.initial)
            evaluated = perf_counter() - start
            start = perf_counter()
            states[name], _ = play_rounds(loop, states[name], number, number + 1)
            if number:  # the first warms up
                seconds[name][0].append(evaluated)
                seconds[name][1].append(perf_counter() - start)
    return {name: (median(own[0]), median(own[1])) for name, own in seconds.items()}


def write_table(times: dict[str, tuple[float, float]], samples: int, repeats: int) -> str:
    plain = times[PLAIN]
    lines = [
        "# Metrics",
        "",
        f"Command: `python benchmarks/metrics.py --samples {samples} --repeats {repeats}`, torch {torch.__version__}.",
        "",
        f"One evaluation of {samples:,} samples, and a round of five devices with one; milliseconds.",
        "",
        "| metrics | evaluation | beside plain | round | beside plain |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, (alone, whole) in times.items():
        cells = [f"{alone * 1e3:.1f}", f"{alone / plain[0]:.2f}x", f"{whole * 1e3:.1f}", f"{whole / plain[1]:.2f}x"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = write_table(measure(given.samples, given.repeats), given.samples, given.repeats)
    print(table)
    if given.out:
        given.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
