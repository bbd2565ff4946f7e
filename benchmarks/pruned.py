"""How much faster a pruned model really is: steps of the pruned VGG11 beside those of the whole one, in one run.

    python benchmarks/pruned.py [--rate 0.72] [--batch 10] [--repeats 30] [--out benchmarks/results/pruned.md]

The model is pruned as FedAP prunes it, with the paper's mean rate for VGG11; its first weights stand for trained
ones, so layers are pruned more evenly than after training. The two take turns, and a ratio is that of the medians.
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from shoal.core.batch import Batch, BatchScore
from shoal.core.builtin_tasks import CLASSIFY
from shoal.core.local.step import compute_autograd_gradient
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.models import build_model
from shoal.parts.lib.filter_choice import choose_kept_filters, compute_layer_rates
from shoal.parts.lib.unit_scores import score_neurons

SHAPE = (3, 32, 32)


def prune_net(net: Net, rate: float) -> Net:
    """The net that FedAP leaves."""
    images = torch.rand(16, *SHAPE, generator=torch.Generator().manual_seed(0))
    ranks = score_neurons(net, net.initial, images)
    return net.cut(Plan(choose_kept_filters(net, net.initial, ranks, compute_layer_rates(net, net.initial, rate))))


def get_buffers(net: Net) -> dict[str, torch.Tensor]:
    return {k: net.initial[k] for k in net.buffers}


def time_step(net: Net, batch: Batch) -> float:
    """Seconds of one pass forward and back."""

    def score(params, batch) -> BatchScore:
        logits, features, taps, buffers = net.forward(get_buffers(net) | params, batch.inputs, training=True)
        return BatchScore(CLASSIFY.compute_mean_loss(logits, batch), logits, features, taps, buffers, {})

    start = perf_counter()
    compute_autograd_gradient(score, {k: net.initial[k] for k in net.trainable}, batch)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.72)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        "| model | whole, M MACs | pruned | whole, ms a step | pruned | faster |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for model in ("vgg11", "cnn", "resnet18"):
        whole = build_model(model, SHAPE, 10, 0)
        pruned_net = prune_net(whole, args.rate)
        batch = Batch(torch.rand(args.batch, *SHAPE), ((torch.arange(args.batch) % 10, None),))
        for net in (whole, pruned_net):
            time_step(net, batch)
        times = [(time_step(whole, batch), time_step(pruned_net, batch)) for _ in range(args.repeats)]
        before, after = (median(seconds) for seconds in zip(*times))
        macs = [f"{net.macs_forward / 1e6:.1f}" for net in (whole, pruned_net)]
        lines.append(
            f"| {model} | {' | '.join(macs)} | {before * 1e3:.1f} | {after * 1e3:.1f} | {before / after:.2f} |"
        )
        print(lines[-1], flush=True)
    if args.out:
        command = f"python benchmarks/pruned.py --rate {args.rate} --batch {args.batch} --repeats {args.repeats}"
        head = [
            "# How much faster a pruned model is",
            "",
            f"Command: `{command}`, torch {torch.__version__}, {torch.get_num_threads()} threads.",
            "",
        ]
        args.out.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
