"""Adapters beside the whole model: bytes of a round, memory by number of devices, tokens per second beside a loop.

    python benchmarks/adapters.py [--compute cuda] [--devices 20] [--out benchmarks/results/adapters.md]

The model is a Llama of transformers with random weights, 20 million numbers unless the sizes say otherwise; devices
hold unequal numbers of random texts and make one pass over them with SGD. Each case is a process of its own:

bytes     one round of FedAvg, of `lora`, and of `lora` with uneven ranks, one device after the other
memory    one round of `lora` with so many devices in one call; what the process, or torch on a GPU, takes at its peak
          beyond what model and data take
speed     rounds of `lora` in one call of `batched` and, in turn with them, the same rounds as a plain loop over devices
          with adapters of peft (or, where it is not installed, the same layers by hand); medians

It needs torch, transformers, numpy and safetensors alone.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from peers.turn import wait_for_turn
from torch import Tensor, nn

import shoal
from shoal.core.model.low_rank import apply_factors
from shoal.core.model.tree import count_tree_bytes
from shoal.core.task import Engine
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.models.transformers_model import TransformersModel
from shoal.runs.build import Assembly, assemble_run
from shoal.runs.recipe import Recipe
from shoal.testing.rounds import play_rounds

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
METHODS = {
    "FedAvg, the whole model": "fedavg",
    "`lora`": "lora(rank={rank}, where='{where}')",
    "`lora+hetlora(rates='1,0.5,0.25')`": "lora(rank={rank}, where='{where}')+hetlora(rates='1,0.5,0.25')",
}


def make_model(args: argparse.Namespace) -> Any:
    """A Llama of this size with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = dict(vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.hidden * 8 // 3)
    heads: Any = dict(num_attention_heads=args.hidden // 64 or 1, num_key_value_heads=args.hidden // 64 or 1)
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=args.layers, max_position_embeddings=args.length)
    return LlamaForCausalLM(config)


def make_texts(args: argparse.Namespace) -> tuple[dict[str, Tensor], Tensor]:
    """Random words, and the word after each."""
    shape = (args.texts * args.devices + 8, args.length + 1)
    words = torch.randint(0, args.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    words[0, -1] = args.vocabulary - 1  # there are as many classes as the last word says
    tokens = words[:, :-1].contiguous()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, words[:, 1:].contiguous()


def assemble(args: argparse.Namespace, method: str, engine: Engine) -> Assembly:
    """A run in which all devices take part in every round, and which evaluates nothing."""
    (inputs, targets), test = make_texts(args), slice(0, 8)
    data = (inputs, targets, {name: value[test] for name, value in inputs.items()}, targets[test])
    given = {"model": make_model(args), "data": data, "task": "tokens", "lr": 0.01, "batch": args.batch}
    more = {"method": method.format(rank=args.rank, where=",".join(TARGETS)), "split": args.split}
    many = {"devices": args.devices, "sample": args.devices, "compute": args.compute, "precision": args.precision}
    assembly = assemble_run(Recipe().with_values(**shoal.hand_over_objects(given | more | many)))
    assembly.loop.host.engine = engine
    return replace(assembly, loop=replace(assembly.loop, evaluates=lambda row: False))


def measure_bytes(args: argparse.Namespace, method: str) -> dict[str, float]:
    """What travels in one round with one step on each device."""
    assembly = assemble(args, method, SerialEngine())
    one_step = lambda number, device: replace(assembly.loop.work(number, device), steps=1)  # noqa: E731
    loop = replace(assembly.loop, work=one_step)
    _, [row] = play_rounds(loop, loop.start(assembly.net), 0, 1)
    return {"down": row["bytes_down"], "up": row["bytes_up"]}


def measure_memory(args: argparse.Namespace) -> dict[str, float]:
    """The peak of one round in one call, beyond what model and data take."""
    assembly = assemble(args, METHODS["`lora`"], BatchedEngine(args.devices, budget=1 << 50))
    state, before = assembly.loop.start(assembly.net), read_memory(args.compute)
    play_rounds(assembly.loop, state, 0, 1)
    backbone = count_tree_bytes(assembly.net.frozen)
    return {
        "peak": read_memory(args.compute) - before,
        "backbone": backbone,
        "adapters": count_tree_bytes(state.params),
    }


def read_memory(compute: str) -> int:
    """The most bytes so far: of the process, or of torch on a GPU."""
    if compute.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# speed ---------------------------------------------------------------------------------------------------------------
class ByHand(nn.Module):
    """A linear layer with an adapter, as anybody would write it."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + apply_factors(x, self.lora_A, self.lora_B, self.scale)


def add_plain_adapters(model: Any, rank: int) -> Any:
    """The model with adapters of peft, or with those by hand where it is not installed."""
    if find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM"))
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in TARGETS:
                setattr(parent, name, ByHand(layer, rank, 16.0))
    return model


def make_plain_round(args: argparse.Namespace, assembly: Assembly) -> Callable[[], float]:
    """One round as a plain loop over devices, with the samples, batches and steps of the other; returns its loss."""
    place = torch.device(args.compute)
    model = TransformersModel(add_plain_adapters(make_model(args), args.rank)).to(place).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = sum(p.numel() for p in trained.values())
    assert total == sum(p.numel() for p in assembly.net.initial.values()), "the plain loop trains something else"
    texts, words = make_texts(args)
    inputs, targets = {name: value.to(place) for name, value in texts.items()}, words.to(place)
    held = [assembly.loop.host.setup.samples(device).index for device in range(args.devices)]
    server = {name: p.detach().clone() for name, p in trained.items()}
    everyone = sum(len(index) for index in held)

    def play() -> float:
        means, losses = {name: torch.zeros_like(v) for name, v in server.items()}, []
        for index in held:
            with torch.no_grad():
                for name, p in trained.items():
                    p.copy_(server[name])
            optimiser = torch.optim.SGD(trained.values(), lr=0.01)
            for rows in index[torch.randperm(len(index))].to(place).split(args.batch):
                with torch.autocast(place.type, torch.bfloat16, enabled=args.precision == "bf16"):
                    logits = model({name: value[rows] for name, value in inputs.items()})
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets[rows].flatten())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            losses.append(loss.detach())
            for name, p in trained.items():
                means[name].add_(p.detach(), alpha=len(index) / everyone)
        server.update(means)
        return float(torch.stack(losses).mean())

    return play


def measure_speed(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both ways, in turn, after a round that does not count."""
    assembly = assemble(args, METHODS["`lora`"], BatchedEngine(args.width or args.devices, budget=1 << 50))
    loop, session = assembly.loop, {"state": assembly.loop.start(assembly.net), "number": 0}
    plain = make_plain_round(args, assembly)
    tokens = args.length * int(loop.sizes.sum())

    def play_batched() -> None:
        session["state"], _ = play_rounds(loop, session["state"], session["number"], session["number"] + 1)
        session["number"] += 1

    seconds: dict[str, list[float]] = {"batched": [], "plain": []}
    for number in range(args.rounds + 1):
        if number == 1:
            wait_for_turn()
        for name, play in (("batched", play_batched), ("plain", plain)):
            if args.compute.startswith("cuda"):
                torch.cuda.synchronize()
            start = perf_counter()
            play()
            if args.compute.startswith("cuda"):
                torch.cuda.synchronize()
            seconds[name] += [perf_counter() - start] if number else []
    rates = {name: tokens / median(taken) for name, taken in seconds.items()}
    return rates | {"tokens": tokens, "seconds": seconds, "peft": find_spec("peft") is not None}


# the cases -----------------------------------------------------------------------------------------------------------
def run_case(case: str, args: argparse.Namespace, **other: Any) -> dict[str, Any]:
    """A case in a process of its own."""
    options = {key: value for key, value in vars(args).items() if key not in ("case", "out")} | other
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, __file__, *words, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_report(args: argparse.Namespace) -> str:
    """All cases, as Markdown."""
    traffic = {title: run_case(f"bytes:{title}", args) for title in METHODS}
    counts = [n for n in (1, 2, 5, 10, 20, 50, 100) if n <= args.devices]
    memory = {n: run_case("memory", args, devices=n, split="iid") for n in counts}
    speed = run_case("speed", args)
    model = memory[counts[0]]["backbone"]
    first = traffic["FedAvg, the whole model"]
    plain = "peft" if speed["peft"] else "adapters by hand"
    lines = [
        f"{args.devices} devices, a Llama of {model / 4e6:.1f} million numbers ({model / 1e6:.0f} MB), texts of "
        f"{args.length} words in batches of {args.batch}, adapters of rank {args.rank} on {', '.join(TARGETS)}, "
        f"{args.precision} on {args.compute}.",
        "",
        "| a round of | MB down | MB up | FedAvg's, times |",
        "|---|--:|--:|--:|",
    ]
    for title, found in traffic.items():
        lines.append(
            f"| {title} | {found['down'] / 1e6:,.2f} | {found['up'] / 1e6:,.2f} | {first['up'] / found['up']:,.0f} |"
        )
    lines += ["", "| devices in one call | MB beyond model and data | MB for each device |", "|--:|--:|--:|"]
    for n, found in memory.items():
        lines.append(f"| {n} | {found['peak'] / 1e6:,.0f} | {found['peak'] / 1e6 / n:,.1f} |")
    lines += [
        "",
        "| way | tokens per second |",
        "|---|--:|",
        f"| `batched` | {speed['batched']:,.0f} |",
        f"| plain loop over devices, {plain} | {speed['plain']:,.0f} |",
        f"| ratio | {speed['batched'] / speed['plain']:.2f} |",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "devices": 20,
        "texts": 8,
        "length": 64,
        "batch": 4,
        "rank": 8,
        "rounds": 3,
        "width": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"hidden": 384, "layers": 8, "vocabulary": 8192}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of the model")
    parser.add_argument("--split", default="quantity:2", help="how many texts devices hold")
    parser.add_argument("--precision", default="float32", help="float32 or bf16; tf32 on a GPU")
    parser.add_argument("--compute", default="cpu")
    parser.add_argument("--case", help="measure one case, and print it as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.case:
        kind, _, title = args.case.partition(":")
        cases = {"bytes": lambda: measure_bytes(args, METHODS[title]), "memory": lambda: measure_memory(args)}
        print(json.dumps((cases | {"speed": lambda: measure_speed(args)})[kind]()))
        return
    text = write_report(args)
    print(text)
    if args.out:
        words = " ".join(
            f"--{k} {v}" for k, v in vars(args).items() if k not in ("case", "out") and v != parser.get_default(k)
        )
        command = f"python benchmarks/adapters.py {words}".strip()
        args.out.write_text(f"# Adapters\n\nCommand: `{command}`, torch {torch.__version__}.\n\n{text}\n")


if __name__ == "__main__":
    main()
