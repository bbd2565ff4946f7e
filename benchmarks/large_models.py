"""Steps of large models, many devices in one call: ms a device-step by the form that convolutions take.

    python benchmarks/large_models.py [--sections steps convs compiled small] [--seconds 60] [--profile]
                                      [--models resnet18-imagenet] [--precisions auto bf16] [--rules plain now grouped]
                                      [--compute cuda]

Every section ends after so many seconds; what is most important comes first. Rules: `now` is the library's; `grouped`,
`channels last`, `product`, `fold` and `separate` take that form everywhere; `mixed` takes products from 64 channels on;
with `fold apart` the filters' gradient makes its patches anew. `plain` is PyTorch alone: one device after the other,
images with channels last, torch's SGD with foreach. Data are drawn in memory. It needs torch, NumPy and safetensors
alone.
"""

import argparse
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from conv_forms import add_separate_forms, measure_compiled, measure_convolutions
from gpu_clock import OutOfTime, limit_seconds, measure_replay, print_row, time_call
from peers.turn import wait_for_turn
from torch import Tensor

import shoal
from shoal.core.task import Task
from shoal.engines.batched import gpu_conv
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.gpu_conv import ConvCase
from shoal.models import MODELS
from shoal.runs.build import assemble_run
from shoal.runs.engine_trial import make_short_tasks
from shoal.runs.recipe import Recipe

STEPS = 4
RULE_NOW = gpu_conv.pick_form


def pick_everywhere(form: str) -> Callable[[ConvCase], str]:
    """A rule that knows one form; a fold is of the input's gradient alone."""
    return lambda case: "product" if form == "fold" and case.wanted != "input gradient" else form


def pick_mixed(case: ConvCase) -> str:
    if case.channels < 64:
        return "grouped"
    return "fold" if case.wanted == "input gradient" else "product"


RULES: dict[str, Callable[[ConvCase], str]] = {
    "now": RULE_NOW,
    "mixed": pick_mixed,
    **{form: pick_everywhere(form) for form in ("grouped", "channels last", "product", "fold", "separate")},
    "fold apart": pick_everywhere("fold"),
}


class Variant(NamedTuple):
    """Something to time."""

    model: str
    precision: str = "auto"
    rule: str = "plain"
    compiled: bool = True
    devices: int = 10
    batch: int = 50


def list_large() -> Iterator[Variant]:
    """The most important first."""
    resnet, group_norm = "resnet18-imagenet", "resnet18-imagenet-gn"
    for rule in ("plain", "now", "grouped", "fold", "product", "mixed", "fold apart", "separate"):
        yield Variant(resnet, rule=rule)
    for rule in ("plain", "now", "grouped", "product", "fold"):
        yield Variant(resnet, "bf16", rule)
    for rule in ("plain", "now", "grouped", "product", "fold"):
        yield Variant(group_norm, rule=rule)
    for rule in ("grouped", "product", "channels last"):
        yield Variant(resnet, rule=rule, compiled=False)
    for rule in ("plain", "now", "grouped", "product", "fold", "mixed"):
        yield Variant("vgg11", rule=rule)
    for model in ("vit", "lstm"):
        for rule in ("plain", "now"):
            yield Variant(model, rule=rule)
        yield from (Variant(model, "bf16", rule) for rule in ("plain", "now"))
    for rule in ("plain", "now", "grouped", "product"):
        yield Variant(group_norm, "bf16", rule)
        yield Variant("vgg11", "bf16", rule)


def list_small() -> Iterator[Variant]:
    for devices in (10, 100, 30):
        for model in ("lenet", "cnn"):
            for rule in ("now", "product", "fold", "channels last", "plain"):
                yield Variant(model, rule=rule, devices=devices, batch=10)


def draw_data(variant: Variant) -> tuple[Tensor, ...]:
    """Two batches for each device, and some samples to test on."""
    generator, count = torch.Generator().manual_seed(0), 2 * variant.devices * variant.batch
    if variant.model == "lstm":
        words = torch.randint(10_000, (count + 20, 36), generator=generator)
        words[:10_000, 0] = torch.arange(10_000)[: len(words)]
        words[0, 1] = 9_999
        x, y = words[:, :-1], words[:, 1:]
    else:
        x, y = torch.randn(count + 20, 3, 32, 32, generator=generator), torch.arange(count + 20) % 10
    return x[:count].contiguous(), y[:count].contiguous(), x[count:].contiguous(), y[count:].contiguous()


def make_tasks(variant: Variant, data: tuple[Tensor, ...], compute: str) -> list[Task]:
    values: dict[str, Any] = {"data": data, "model": variant.model, "precision": variant.precision, "split": "iid"}
    values |= {"devices": variant.devices, "sample": variant.devices, "epochs": 1, "batch": variant.batch}
    values |= {"lr": 0.001, "rounds": 1, "compute": compute}
    return make_short_tasks(
        assemble_run(Recipe().with_values(**shoal.hand_over_objects(values))), variant.devices, STEPS
    )


def measure_engine(variant: Variant, compute: str, profiled: bool = False) -> list[str]:
    """Seconds of the first call (trace, compile, record), ms a device-step, GB at the peak."""
    place = torch.device(compute)
    gpu_conv.pick_form, gpu_conv.SHARES_PATCHES = RULES[variant.rule], not variant.rule.endswith("apart")
    tasks = make_tasks(variant, draw_data(variant), compute)
    engine = BatchedEngine(variant.devices, compiled=variant.compiled)
    try:
        first = time_call(lambda: engine.train(tasks))
        wait_for_turn()
        work = STEPS * variant.devices
        if place.type == "cpu":
            return [f"{first:.1f}", f"{1e3 * time_call(lambda: engine.train(tasks)) / work:.3f}", ""]
        fell_back = variant.compiled and any(p.call == p.module.forward for p in engine.programs.values())
        (replay,) = engine.replays.values()
        step = 1e3 * measure_replay(replay.graph, 7) / work
        if profiled:
            print_kernels(replay.graph)
        peak = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" + (" (not compiled)" if fell_back else "")
        return [f"{first:.1f}", f"{step:.3f}", peak]
    finally:
        gpu_conv.pick_form, gpu_conv.SHARES_PATCHES = RULE_NOW, True
        engine.close()


def measure_plain(variant: Variant, compute: str) -> list[str]:
    """The same steps in plain PyTorch, one device after the other."""
    place = torch.device(compute)
    x, y, *_ = (t.to(place) for t in draw_data(variant))
    shape, classes = ((35,), 10_000) if variant.model == "lstm" else ((3, 32, 32), 10)
    module = MODELS[variant.model](shape, classes).module.to(place)
    images = x.dim() == 4
    if images:
        module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (no overload says it)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.001, foreach=True)
    half = variant.precision == "bf16"
    if place.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not half

    def train_devices() -> None:
        for device in range(variant.devices):
            for step in range(STEPS):
                rows = slice((2 * device + step % 2) * variant.batch, (2 * device + step % 2 + 1) * variant.batch)
                with torch.autocast(place.type, torch.bfloat16) if half else nullcontext():
                    logits = module(x[rows])
                loss = F.cross_entropy(logits.float().flatten(0, -2), y[rows].flatten())
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
        if place.type == "cuda":
            torch.cuda.synchronize()

    first = time_call(train_devices)
    wait_for_turn()
    seconds = min(time_call(train_devices) for _ in range(1 if place.type == "cpu" else 3))
    return [f"{first:.1f}", f"{1e3 * seconds / STEPS / variant.devices:.3f}", ""]


def print_kernels(graph: torch.cuda.CUDAGraph) -> None:
    """The kernels that take most of a replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    kernels = [(e.self_device_time_total, e.count, e.key) for e in profile.key_averages()]
    total = sum(time for time, *_ in kernels) or 1
    print(f"\n{sum(count for _, count, _ in kernels)} kernels, {total / STEPS:.0f} us a step of all devices\n")
    print_row("us a step", "%", "calls a step", "kernel")
    print_row("--:", "--:", "--:", "---")
    for time, count, name in sorted(kernels, reverse=True)[:15]:
        print_row(f"{time / STEPS:.0f}", f"{100 * time / total:.0f}", f"{count / STEPS:g}", f"`{name[:100]}`")
    print(flush=True)


def measure_steps(variants: Sequence[Variant], args: argparse.Namespace, profiled: bool = False) -> None:
    """Print the table of whole steps; a variant that fails or takes too long has its reason in place of numbers."""
    print_row("model", "precision", "devices x batch", "rule", "compiled", "first call, s", "ms a device-step", "GB")
    print_row("---", "---", "--:", "---", "---", "--:", "--:", "--:")
    end = perf_counter() + args.seconds
    for variant in variants:
        left = min(args.variant_seconds, end - perf_counter())
        if left < 1:
            print(f"\nout of time before {variant}", flush=True)
            return
        if args.compute == "cuda":
            torch.cuda.reset_peak_memory_stats()
        plain = variant.rule == "plain"
        try:
            with limit_seconds(left):
                cells = (
                    measure_plain(variant, args.compute) if plain else measure_engine(variant, args.compute, profiled)
                )
        except OutOfTime:
            cells = [f"more than {left:.0f} s", "", ""]
        except Exception as error:
            cells = [f"{type(error).__name__}: {str(error)[:80]}".replace("\n", " "), "", ""]
        compiled = "" if plain else "yes" if variant.compiled else "no"
        print_row(*variant[:2], f"{variant.devices} x {variant.batch}", variant.rule, compiled, *cells)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def shrink(variants: Sequence[Variant]) -> list[Variant]:
    """Few and small enough for a processor: one of each model and rule."""
    seen: dict[tuple, Variant] = {}
    for variant in variants:
        small = variant._replace(devices=2, batch=2, compiled=False)
        seen.setdefault((variant.model, variant.precision, variant.rule), small)
    return [v for v in seen.values() if v.model != "vgg11" or v.rule in ("plain", "product")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["steps", "convs", "compiled", "small"])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each section")
    parser.add_argument("--variant-seconds", type=float, default=90.0, help="of each row of whole steps")
    parser.add_argument("--models", nargs="+", help="only these, in whole steps")
    parser.add_argument("--rules", nargs="+", help="only these, in whole steps")
    parser.add_argument("--precisions", nargs="+", help="only these, in whole steps: auto (TF32 on a GPU), bf16")
    parser.add_argument("--compute", default="cuda")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step of ResNet18, grouped and product")
    args = parser.parse_args()
    place, on_cpu = torch.device(args.compute), args.compute == "cpu"
    logging.getLogger("shoal").setLevel(logging.WARNING)
    logging.basicConfig(format="%(message)s")
    warnings.simplefilter("ignore")
    add_separate_forms()
    print(f"torch {torch.__version__}, {'a processor' if on_cpu else torch.cuda.get_device_name()}", flush=True)
    if not on_cpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    pick = lambda variants: [  # noqa: E731
        v
        for v in (shrink([*variants]) if on_cpu else variants)
        if (not args.models or v.model in args.models)
        and (not args.rules or v.rule in args.rules)
        and (not args.precisions or v.precision in args.precisions)
    ]
    sections: dict[str, Callable[[], None]] = {
        "steps": lambda: measure_steps(pick(list_large()), args),
        "small": lambda: measure_steps(pick(list_small()), args),
        "convs": lambda: measure_convolutions(place, (torch.float32, torch.bfloat16)),
        "compiled": lambda: measure_compiled(place),
        "profile": lambda: measure_steps(
            [Variant("resnet18-imagenet", rule=r) for r in ("grouped", "fold")], args, True
        ),
    }
    for name in [*args.sections, *(["profile"] if args.profile else [])]:
        print(f"\n## {name}\n", flush=True)
        try:
            with limit_seconds(args.seconds) if name in ("convs", "compiled") else nullcontext():
                sections[name]()
        except OutOfTime:
            print("\nout of time", flush=True)


if __name__ == "__main__":
    main()
