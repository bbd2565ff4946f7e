"""Engines agree: what is trained does not depend on how. (Law 2 for parts is in `shoal.testing`.)"""

import json
import logging
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.core.batch import Samples
from shoal.core.model import tree
from shoal.core.task import Engine
from shoal.core.types import SERVER
from shoal.engines.batched.cuda_graph import pick_graph_steps
from shoal.engines.batched.engine import BatchedEngine, round_up_width
from shoal.engines.batched.graph import trace_step
from shoal.engines.batched.torchscript import write_argument
from shoal.engines.serial import SerialEngine, train_device
from shoal.models import MODELS
from shoal.parts import PRESETS
from shoal.runs.build import assemble_run
from shoal.runs.engine_choice import EngineChoice, choose_engine, parse_engine_choice
from shoal.runs.recipe import Recipe
from shoal.runs.start import prepare_new_run, prepare_resumed_run
from shoal.testing.rounds import play_rounds

SMALL: dict[str, Any] = {"devices": 6, "sample": 4, "rounds": 2, "precision": "float64", "split": "dirichlet:0.3"}


def ends(engine: Engine, rounds: int = 2, **recipe: Any) -> tuple[Any, list[dict]]:
    """Everything after some rounds with this engine, and the rows."""
    assembly = assemble_run(Recipe().with_values(**SMALL | recipe))
    loop = assembly.loop
    loop.host.engine = engine
    standing, rows = play_rounds(loop, loop.start(assembly.net), 0, rounds)
    return [standing.params, standing.states], rows


def ran(recipe: dict[str, Any], **more: Any) -> shoal.Result:
    return shoal.run(**recipe | more)


def apart(a: Any, b: Any) -> float:
    pairs = zip(tree.collect_tensors(a), tree.collect_tensors(b), strict=True)
    return max((x.double() - y.double()).abs().max().item() for x, y in pairs if x.numel())


COUNTED = ("bytes_down", "bytes_up", "macs_forward", "macs_work", "sim_seconds", "devices")


def agrees(*engines: Engine, tolerance: float = 1e-9, **recipe: Any) -> None:
    expected, told = ends(SerialEngine(), **recipe)
    for engine in engines:
        found, rows = ends(engine, **recipe)
        assert apart(found, expected) <= tolerance
        assert [[row[k] for k in COUNTED] for row in rows] == [[row[k] for k in COUNTED] for row in told]
        assert [r["train_loss"] for r in rows] == pytest.approx([r["train_loss"] for r in told], abs=tolerance)


# models ---------------------------------------------------------------------------------------------------------------
LARGE_MODELS = [m for m in MODELS if m.startswith(("vgg", "resnet", "conv2cifar"))]
SMALL_MODELS = [m for m in MODELS if m not in LARGE_MODELS and m != "lstm"]


@pytest.mark.parametrize("model", [*SMALL_MODELS, *(pytest.param(m, marks=pytest.mark.whole) for m in LARGE_MODELS)])
def test_every_model_trains_alike(model):
    large = model in LARGE_MODELS
    work = {"steps": "1", "batch": 6, "sample": 2} if large else {"steps": "3", "batch": 6, "sample": 3}
    agrees(*([] if large else [BatchedEngine(1)]), BatchedEngine(2), model=model, lr=0.001, **work)


@pytest.mark.parametrize("model", [*SMALL_MODELS, pytest.param("resnet18", marks=pytest.mark.whole)])
def test_no_step_holds_more_than_what_needs_no_trace_says(model, monkeypatch):
    seen, honest = [], BatchedEngine.compute_stack_limit

    def compute_stack_limit(self, sharing_key, slot, hyperparams):
        seen.append((self.estimate_bytes(sharing_key, slot, hyperparams), slot.bound_peak_bytes()))
        return honest(self, sharing_key, slot, hyperparams)

    monkeypatch.setattr(BatchedEngine, "compute_stack_limit", compute_stack_limit)
    ends(BatchedEngine(2), model=model, rounds=1, steps="1", batch=6, sample=2)
    assert seen and all(held <= bound for held, bound in seen)


def words(seed: int = 0) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 11, (90, 6), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@pytest.mark.parametrize("width", [1, 3])
def test_a_language_model_trains_alike(width):
    name = shoal.hand_over_objects({"data": words()})["data"]
    agrees(BatchedEngine(width), data=name, model="lstm", split="iid", steps="2", batch=4)


class Dropped(nn.Module):
    """Dropout of numbers and of channels, and batch norm, which must not see padding."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.spatial = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.3)
        self.drop, self.fc = nn.Dropout(0.4), nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.spatial(self.norm(self.conv(x)).relu()).flatten(1)))


class Recurrent(nn.Module):
    """torch's own LSTM and an embedding of its positions."""

    def __init__(self):
        super().__init__()
        self.lstm, self.place, self.fc = nn.LSTM(8, 6, batch_first=True), nn.Embedding(8, 8), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).view(len(x), 8, 8) + self.place(torch.arange(8))
        return self.fc(self.lstm(rows)[0][:, -1])


class Branching(nn.Module):
    """Looks at a number and then decides: no two devices can do that in one call."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


class Viewing(nn.Module):
    """Counts on images being laid out row by row, as `view` does."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.fc = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 3), nn.Linear(4 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.two(self.one(x).relu()).view(len(x), -1))


def own(module: nn.Module) -> str:
    return shoal.hand_over_objects({"model": module})["model"]


@pytest.mark.parametrize("width", [1, 2, pytest.param(4, marks=pytest.mark.whole)])
@pytest.mark.parametrize("made", [Dropped, Recurrent], ids=lambda m: m.__name__.lower())
def test_layers_that_mix_or_draw_train_alike(made, width):
    torch.manual_seed(0)
    agrees(BatchedEngine(width), model=own(made()), epochs="1", batch=8, lr=0.05)


def test_dropout_drops_something():
    torch.manual_seed(0)
    module = Dropped()
    with_dropout = ends(BatchedEngine(2), model=own(module), batch=8)[0]
    module.drop.p = module.spatial.p = 0.0
    assert apart(with_dropout, ends(BatchedEngine(2), model=own(module), batch=8)[0]) > 1e-4


def test_a_model_that_wants_its_images_as_they_are_gets_them(caplog):
    torch.manual_seed(0)
    engine = BatchedEngine(1)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        agrees(engine, model=own(Viewing()))
    assert engine.channels_first and not engine.unvectorisable and not caplog.records


def test_a_model_that_cannot_be_vectorised_falls_back_with_one_line(caplog):
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        agrees(BatchedEngine(3), tolerance=0.0, model=own(Branching()))
    lines = [r.getMessage() for r in caplog.records if r.name == "shoal"]
    assert len(set(lines)) == 1 and "cannot be vectorised" in lines[0] and "one after the other" in lines[0]


# the optimiser --------------------------------------------------------------------------------------------------------
def trained_by_torch(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> dict[str, Tensor]:
    """Where torch's own clipping and SGD take a module in so many steps on all samples at once."""
    module = deepcopy(module)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(steps):
        sgd.zero_grad()
        F.cross_entropy(module(x), y).backward()
        assert nn.utils.clip_grad_norm_(module.parameters(), 0.2) > 0.2
        sgd.step()
    return {k: v.detach() for k, v in module.state_dict().items()}


@pytest.mark.parametrize(
    "engine", [SerialEngine, lambda: BatchedEngine(1), lambda: BatchedEngine(3)], ids=["serial", "one", "batched"]
)
def test_clipping_decay_and_momentum_are_those_of_torch(engine):
    """On devices and in the server's own training: gradients are clipped, the decay that is added to them is not."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = [(3 * torch.randn(n, 5), torch.randint(0, 3, (n,))) for n in (10, 15, 25)]
    given = shoal.hand_over_objects({"model": module, "data": data})
    setting: dict[str, Any] = {"split": "owner", "devices": 3, "sample": 3, "batch": 32, "steps": "4"}
    setting |= {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "clip": 0.2, "server_data": "share:0.2"}
    assembly = assemble_run(Recipe().with_values(**SMALL | given | setting))
    loop = assembly.loop
    assert loop.server is not None
    loop.host.engine = engine()

    def by_torch(samples: Samples) -> dict[str, Tensor]:
        batch = samples.take_all()
        return trained_by_torch(module, batch.inputs, batch.targets[0][0], 4)

    alone = [by_torch(loop.host.setup.samples(device)) for device in range(3)]
    shares = (loop.sizes / loop.sizes.sum()).tolist()
    standing, _ = play_rounds(loop, loop.start(assembly.net), 0, 1)
    assert apart(standing.params, {k: sum(s * one[k] for s, one in zip(shares, alone)) for k in standing.params}) < 1e-9
    learnt = loop.host.train_on_server(assembly.net.initial, loop.work(0, SERVER), 0)
    assert apart(learnt, by_torch(loop.server)) < 1e-9


# padding, cohorts, memory ---------------------------------------------------------------------------------------------
def uneven() -> list[tuple[Tensor, Tensor]]:
    """Devices with 1, 3, 8, 17 and 30 samples."""
    generator = torch.Generator().manual_seed(3)
    sizes = (1, 3, 8, 17, 30)
    return [(torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedprox(mu=0.3)+feddyn"])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_unequal_devices_are_padded_and_gated(method, width):
    data = shoal.hand_over_objects({"data": uneven()})["data"]
    setting = {"data": data, "split": "owner", "devices": 5, "sample": 5, "batch": 8, "method": method}
    agrees(BatchedEngine(width), **setting, momentum=0.9, epochs="1-3")


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_single_precision_stays_close(method):
    agrees(BatchedEngine(4), tolerance=1e-6, precision="float32", method=method, model="lenet", steps="5")


def test_augmentation_is_the_same_for_all():
    agrees(BatchedEngine(3), model="lenet", augment="flip,crop:2", steps="3")


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_an_update_that_is_not_finite_is_dropped_alike(method):
    told = [
        ends(engine, method=method, lr=1e200, rounds=1)[1][0]
        for engine in (SerialEngine(), BatchedEngine(1), BatchedEngine(3))
    ]
    assert told[0]["dropped"] and all(row["dropped"] == told[0]["dropped"] for row in told)
    assert len({row["bytes_up"] for row in told}) == 1


def test_nobody_to_train_is_no_trouble():
    assert BatchedEngine(3).train([]) == []


@pytest.mark.parametrize("budget", [1, 3_000_000, 10**12])
def test_a_cohort_that_does_not_fit_is_split(budget, monkeypatch):
    widths: list[int] = []
    together = BatchedEngine.train_stack
    monkeypatch.setattr(
        BatchedEngine, "train_stack", lambda self, form, own, k: widths.append(len(own)) or together(self, form, own, k)
    )
    agrees(BatchedEngine(4, budget=budget), split="iid", method="scaffold")
    assert max(widths) == {1: 1, 3_000_000: 2, 10**12: 4}[budget]
    assert sum(widths) == 8


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), RuntimeError("CUDA error: out of memory")])
def test_what_runs_out_of_memory_is_halved(error, monkeypatch, caplog):
    together = BatchedEngine.train_stack

    def narrow(self, form, members, knobs):
        if len(members) > 2:
            raise error
        return together(self, form, members, knobs)

    monkeypatch.setattr(BatchedEngine, "train_stack", narrow)
    engine = BatchedEngine(4)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        agrees(engine, method="scaffold")
    assert engine.width == 2 and "do not fit into memory" in caplog.text
    monkeypatch.setattr(BatchedEngine, "train_stack", lambda *a: (_ for _ in ()).throw(error))
    with pytest.raises(shoal.ShoalError, match="One device alone does not fit"):
        ends(BatchedEngine(4), rounds=1)


FEW = ["fedavg", "feddhad"]
"""What `make test` runs of the presets on a convolutional model; laws show the parts of the others on a small one."""


@pytest.mark.parametrize("preset", [*FEW, *(pytest.param(p, marks=pytest.mark.whole) for p in PRESETS if p not in FEW)])
def test_every_preset_trains_lenet_alike(preset: str):
    agrees(BatchedEngine(3), model="lenet", method=preset, server_data="per-class:2", fleet="tiers")


def test_a_comparison_with_the_ignored_target_is_kept_where_it_is_about_something_else():
    """Only looked-up targets are known to hold no -100; whatever else a part compares with it is computed."""

    def step(carried, fixed, frame):
        return [torch.where(frame[0].ne(-100), carried[0], torch.zeros(3))], carried[0].sum()

    given = [torch.ones(3)], [], [torch.tensor([-100.0, 1.0, 2.0])]
    made, _ = trace_step(step, *given, in_place=False)(*given[0], *given[2])
    assert made[0].tolist() == [0.0, 1.0, 1.0]


def test_what_a_step_holds_is_known_before_it_is_made():
    def step(carried, fixed, frame):
        big = carried[0].expand(1000, 10) * 2
        return [carried[0] - big.sum(0)], big.sum()

    program = trace_step(step, [torch.zeros(10)], [], [torch.zeros(1)], in_place=False, fake=True)
    assert 40_000 <= program.peak <= 80_100


@pytest.mark.parametrize(
    "count, width, expected", [(10, 10, 10), (9, 10, 10), (5, 10, 5), (1, 10, 3), (3, 3, 3), (7, 4, 7)]
)
def test_widths_seldom_change(count, width, expected):
    assert round_up_width(count, width) == expected


@pytest.mark.parametrize("steps", [1, 6, 17, 25, 26, 97, 250])
@pytest.mark.parametrize("even", [True, False])
def test_a_graph_covers_the_run_with_little_idling(steps, even):
    length = pick_graph_steps(steps, even)
    idle = -steps % length
    assert 1 <= length <= 32 and (idle < length)
    assert not (even and steps in (6, 25, 250)) or idle == 0


def test_what_is_written_out_is_what_was_traced():
    """Programs run as TorchScript; the traced operations give the same bits."""
    for model in ("mlp", "lenet", "vit"):
        engine = BatchedEngine(1)
        ends(engine, rounds=1, model=model, steps="1", sample=1)
        program = next(iter(engine.programs.values()))
        assert program.call != program.module.forward, f"{model} stays in Python"


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, float("inf"), [1, 2], torch.float32, torch.device("cpu"), "none"]
)
def test_arguments_are_written_as_torchscript_reads_them(value):
    text = write_argument(value)
    typed = {bool: "bool", int: "int", float: "float", str: "str", list: "List[int]"}.get(type(value))
    if typed:
        unit = torch.jit.CompilationUnit(f"def f() -> {typed}:\n    return {text}\n")
        assert unit.f() == value
    else:
        assert text in ("None", "torch.float32", 'torch.device("cpu")')
    with pytest.raises(ValueError):
        write_argument(object())


# programs are traced once ---------------------------------------------------------------------------------------------
def test_nothing_is_traced_again_round_after_round():
    engine = BatchedEngine(4)
    ends(engine, rounds=3, method="scaffold")
    known = set(engine.programs)
    ends(engine, rounds=6, method="scaffold", seed=0)
    assert {k[1:] for k in engine.programs} == {k[1:] for k in known}


# runs side by side ----------------------------------------------------------------------------------------------------
def histories(comparison) -> list[list[dict]]:
    return [result.history.rows for own in comparison.results.values() for result in own]


def same_histories(a: list[list[dict]], b: list[list[dict]]) -> None:
    for one, two in zip(a, b, strict=True):
        for row, other in zip(one, two, strict=True):
            assert [row[k] for k in COUNTED] == [other[k] for k in COUNTED]
            for key in ("accuracy", "loss", "train_loss"):
                assert row[key] == pytest.approx(other[key], abs=1e-9)


SWEEP = dict(SMALL, rounds=3, epochs="1")
DECIDES = """
from dataclasses import dataclass
from shoal import Part

@dataclass(frozen=True)
class Decides(Part):
    mu: float = 0.1
    scale: float = 1.0

    def objective(self, inner, local):
        def score(params, batch):
            scored = inner(params, batch)
            if self.mu > 0:
                apart = sum((p - local.anchor[k]).square().sum() for k, p in params.items())
                scored = scored._replace(loss=scored.loss + self.mu / 2 * apart)
            return scored._replace(loss=scored.loss * self.scale)
        return score
"""


@pytest.mark.parametrize("engine", ["batched", "pool"])
def test_seeds_side_by_side_give_what_they_give_alone(engine):
    both = shoal.compare(["scaffold", "fedavgm"], seeds=3, engine=engine, **SWEEP)
    apart = shoal.compare(["scaffold", "fedavgm"], seeds=3, engine="serial", **SWEEP)
    same_histories(histories(both), histories(apart))


def test_sweeps_of_numbers_side_by_side_give_what_they_give_alone():
    methods = ["fedprox(mu=0.01)", "fedprox(mu=1.0)", "fedprox(mu=0.0)"]
    vary = ["lr=0.05,0.2", "weight_decay=0,0.01"]
    sweep = dict(SWEEP, momentum=0.5, clip=0.7)
    both = shoal.compare(methods, vary=vary, engine="batched", **sweep)
    apart = shoal.compare(methods, vary=vary, engine="serial", **sweep)
    assert len(both.results) == 12
    same_histories(histories(both), histories(apart))
    losses = {round(rows[-1]["train_loss"], 9) for rows in histories(both)}
    assert len(losses) == 12, "all of them must differ"


@pytest.mark.parametrize("vary", ["clip=0,0.7", "momentum=0,0.5", "weight_decay=0,0.1"])
def test_a_sweep_may_begin_at_none_at_all(vary, caplog):
    """0 is no bound and no momentum, beside other values too."""
    setting = dict(SWEEP, rounds=2)
    both = shoal.compare(["fedavg"], vary=[vary], engine="batched", **setting)
    apart = shoal.compare(["fedavg"], vary=[vary], engine="serial", **setting)
    same_histories(histories(both), histories(apart))
    assert "cannot be vectorised" not in caplog.text


def test_runs_that_differ_in_numbers_share_programs(monkeypatch):
    made: list[int] = []
    trace = trace_step
    monkeypatch.setattr("shoal.engines.batched.engine.trace_step", lambda *a, **k: made.append(1) or trace(*a, **k))
    one = len(shoal.compare(["fedprox(mu=0.1)"], engine="batched", **SWEEP).results) and len(made)
    made.clear()
    shoal.compare([f"fedprox(mu={mu})" for mu in (0.1, 0.2, 0.3)], seeds=2, engine="batched", **SWEEP)
    assert len(made) <= one + 2


def test_a_part_that_decides_on_its_own_number_trains_side_by_side_value_by_value(tmp_path, monkeypatch, caplog):
    """`if self.mu > 0` needs one value at a time: each value has calls of its own, and no device trains alone."""
    (tmp_path / "mine.py").write_text(DECIDES)
    methods = [f"decides(mu={mu}, scale={scale})" for mu in (0.0, 0.5) for scale in (1.0, 2.0)]
    sweep = dict(SWEEP, parts=[str(tmp_path / "mine.py")])
    lone: list[int] = []
    monkeypatch.setattr("shoal.engines.batched.engine.train_device", lambda task: lone.append(1) or train_device(task))
    both = shoal.compare(methods, engine="batched", seeds=2, **sweep)
    lines = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert not lone and len(lines) == 1 and "decides on the value of mu" in lines.pop()
    apart = shoal.compare(methods, engine="serial", seeds=2, **sweep)
    same_histories(histories(both), histories(apart))
    assert len({round(rows[-1]["train_loss"], 9) for rows in histories(both)[::2]}) == 4, "all of them must differ"


def test_runs_side_by_side_may_end_at_different_times():
    result = shoal.compare(
        ["fedavg"], vary=["lr=0.01,0.3"], engine="batched", **dict(SMALL, rounds=40, until_accuracy=0.3)
    )
    lengths = [len(rows) for rows in histories(result)]
    assert len(set(lengths)) == 2


def test_values_that_cannot_be_varied_are_refused():
    for vary in (["seed=1,2"], ["lr=0.1,0.1"], ["lrr=1,2"], ["lr=a,b"], ["nothing"]):
        with pytest.raises(shoal.ShoalError):
            shoal.compare(["fedavg"], vary=vary, **SMALL)


def test_a_comparison_with_varied_values_is_taken_up_again(tmp_path):
    from shoal.compare.comparison import resume_comparison

    out = tmp_path / "c"
    first = shoal.compare(["fedavg"], vary=["lr=0.05,0.2"], seeds=2, engine="batched", out=str(out), **SMALL)
    longer = resume_comparison(out, changes={"rounds": 4})
    assert list(longer.results) == ["fedavg, lr=0.05", "fedavg, lr=0.2"] == list(first.results)
    straight = shoal.compare(["fedavg"], vary=["lr=0.05,0.2"], seeds=2, engine="batched", **dict(SMALL, rounds=4))
    same_histories(histories(longer), histories(straight))


# the pick -------------------------------------------------------------------------------------------------------------
def test_the_pick_is_stored_and_a_resumed_run_keeps_it(tmp_path, monkeypatch):
    out = tmp_path / "run"
    shoal.run(out=str(out), engine="batched", **SMALL)
    stored = json.loads((out / "engine.json").read_text())
    assert stored["engine"] == "batched"
    (out / "engine.json").write_text(json.dumps(stored | {"width": 3}))
    ride = prepare_resumed_run(out, changes={"rounds": 3})
    assert ride.pick.width == 3
    assert ride.folder
    ride.folder.close()


@pytest.mark.parametrize("found", [None, {}, {"engine": "warp"}, {"engine": "batched", "width": 0}, {"x": 1}])
def test_a_stored_pick_that_makes_no_sense_is_not_used(found):
    assert parse_engine_choice(found) is None


def test_resume_is_bit_for_bit_on_every_engine(tmp_path):
    for engine in ("batched", "pool"):
        setting: dict[str, Any] = dict(SMALL, engine=engine, method="scaffold", precision="float32")
        straight = ran(setting, rounds=4)
        ran(setting, out=str(tmp_path / engine))
        resumed = shoal.resume(tmp_path / engine, rounds=4)
        assert straight.history.equals_except_wall_time(resumed.history)
        assert tree.is_same_tree(straight.params, resumed.params)


# precision ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_half_precision_trains_and_keeps_its_weights_whole(engine):
    setting: dict[str, Any] = dict(SMALL, engine=engine, model="lenet", rounds=3, lr=0.05)
    half = ran(setting, precision="bf16")
    full = ran(setting, precision="float32")
    assert all(v.dtype == torch.float32 for v in half.params.values())
    difference = apart(half.params, full.params)
    assert 0 < difference < 0.1
    assert half.history.last("loss") == pytest.approx(full.history.last("loss"), abs=0.05)


class Normed(nn.Module):
    """A convolution, a norm of its six maps, and a linear layer with a batch norm behind it."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.conv, self.norm, self.fc1 = nn.Conv2d(1, 6, 3), norm, nn.Linear(216, 16)
        self.norm1, self.fc2 = nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm1(self.fc1(self.norm(self.conv(x)).relu().flatten(1))).relu())


NORMS = [nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False), nn.BatchNorm2d(6, track_running_stats=False)]
NORMS += [nn.InstanceNorm2d(6, affine=True), nn.GroupNorm(2, 6), nn.LayerNorm([6, 6, 6])]


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("split", ["iid", "dirichlet:0.3"])
def test_norms_are_vectorised_in_half_precision(norm, split, caplog):
    """With and without padding; what is left between engines is the rounding of bfloat16."""
    torch.manual_seed(0)
    setting: dict[str, Any] = {"model": own(Normed(norm)), "split": split, "steps": "3", "precision": "bf16"}
    (one, _), _ = ends(SerialEngine(), rounds=1, **setting)
    (beside, _), _ = ends(BatchedEngine(4), rounds=1, **setting)
    (whole, _), _ = ends(SerialEngine(), rounds=1, **setting | {"precision": "float32"})
    assert "cannot be vectorised" not in caplog.text
    assert all(v.dtype == torch.float32 for v in beside.values() if v.is_floating_point())
    assert apart(beside, one) < 0.02 and 0 < apart(beside, whole) < 0.02


@pytest.mark.whole
def test_a_resnet_is_vectorised_in_half_precision(caplog):
    setting: dict[str, Any] = {"model": "resnet18", "steps": "1", "batch": 4, "lr": 0.01, "precision": "bf16"}
    (one, _), _ = ends(SerialEngine(), rounds=1, **setting)
    (beside, _), _ = ends(BatchedEngine(4), rounds=1, **setting)
    assert "cannot be vectorised" not in caplog.text
    assert apart(beside, one) < 0.05


def test_tf32_is_refused_where_there_is_none():
    with pytest.raises(shoal.ShoalError, match="only a GPU"):
        shoal.run(precision="tf32", rounds=1)


def test_engines_on_a_processor_have_widths_by_the_model():
    def found(**recipe: Any) -> EngineChoice:
        return choose_engine(assemble_run(Recipe().with_values(**recipe)))

    assert found(engine="batched", model="lenet").width == 1
    assert found(engine="batched", sample=15).width == 10
    assert found(engine="serial") == EngineChoice("serial")
    assert found(engine="pool").workers >= 1
    assert found(engine="batched", model="lenet", width=3).width == found(engine="pool", width=3).width == 3


@pytest.mark.parametrize("engine, why", [("auto", "finds its own"), ("serial", "trains one device at a time")])
def test_a_width_needs_an_engine_that_has_one(engine, why):
    with pytest.raises(shoal.ShoalError, match=f"width is 3, and engine is {engine}, which {why}. Add --engine b"):
        choose_engine(assemble_run(Recipe().with_values(engine=engine, width=3)))
    assert choose_engine(assemble_run(Recipe().with_values(engine="serial", width=1))) == EngineChoice("serial")


def test_a_ride_that_cannot_begin_lets_go_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.runs.start.choose_engine", lambda assembly: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_new_run(replace(Recipe(), out=str(tmp_path / "r")))


@dataclass(frozen=True)
class LeavesNothing(shoal.Part):
    """data: no samples from the third round on."""

    def data(self, samples: Samples, memory: Any, device: shoal.Device) -> Samples:
        return replace(samples, index=samples.index[:0]) if device.round >= 2 else samples


@pytest.mark.parametrize("engine", ["serial", "batched", "pool"])
def test_a_part_that_leaves_a_device_no_samples_is_named(engine):
    with pytest.raises(shoal.ShoalError, match="leavesnothing leaves device . no samples to train on in round 2"):
        shoal.run([LeavesNothing()], rounds=3, engine=engine, devices=4, sample=2)
