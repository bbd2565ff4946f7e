"""A Ray cluster: it agrees with `serial` to the last bit, and outlives whatever happens to its workers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle

import shoal
from shoal.core.model import tree
from shoal.core.session import train_jobs
from shoal.core.task import Engine, TaskResult
from shoal.core.types import Job, Outcome, Work
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.chunking import split_by_duration
from shoal.engines.workers.ray_engine import RayEngine, join_cluster
from shoal.engines.workers.tensor_pickle import pickle_with_tensors, unpickle_with_tensors, view_tensor_bytes
from shoal.runs.build import assemble_run
from shoal.runs.engine_choice import EngineChoice, build_engine, choose_engine, parse_engine_choice
from shoal.runs.engine_trial import list_candidates
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result, play_runs
from shoal.runs.start import prepare_new_run
from shoal.testing.rounds import assert_trees_close, drop_wall_seconds, play_rounds

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SMALL: dict[str, Any] = dict(devices=6, sample=6, rounds=2, split="dirichlet:0.5", fleet="tiers")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Room for two times two actors: those that stay, and those of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda process: range(4), raising=False)
        join_cluster("")
    yield
    ray.shutdown()


class PersistentRay:
    """A Ray engine whose actors stay for the next run: `close` does nothing."""

    def __init__(self):
        self.engine = RayEngine(workers=2)
        self.train = self.engine.train

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def persistent(cluster):
    found = PersistentRay()
    yield found
    found.engine.close()


def run_with(engine: Engine, **recipe: Any) -> Result:
    """The result of a whole run with this engine."""
    return play_runs([prepare_new_run(Recipe().with_values(**SMALL | recipe))], engine)[0]


def is_same_result(one: Result, other: Result) -> bool:
    rows = [[drop_wall_seconds(row) for row in result.history.rows] for result in (one, other)]
    return rows[0] == rows[1] and tree.is_same_tree(one.params, other.params)


# what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, more",
    [
        ("fedavg", {"momentum": 0.5}),
        ("scaffold", {}),
        ("feddhad", {}),
        ("fedbiad+dgc", {}),
        ("fedacd", {}),
        ("feddumap", {"model": "lenet", "server_data": "share:0.05"}),
        ("fedbr", {"model": "lenet"}),
    ],
)
def test_a_cluster_gives_the_bits_of_serial(persistent, method, more):
    assert is_same_result(run_with(persistent, method=method, **more), run_with(SerialEngine(), method=method, **more))


class Joined(torch.nn.Module):
    """A linear layer over the images and numbers of a dict, or over the two of a tuple."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4 * 4 + 3, 5)

    def forward(self, inputs: Any) -> torch.Tensor:
        image, numbers = inputs.values() if isinstance(inputs, dict) else inputs
        return self.head(torch.cat((image.flatten(1), numbers), 1))


@pytest.mark.parametrize("form", [dict, tuple])
def test_samples_of_several_tensors_reach_a_cluster(persistent, form):
    torch.manual_seed(0)
    x = {"image": torch.randn(80, 1, 4, 4), "numbers": torch.randn(80, 3)}
    data = (x if form is dict else tuple(x.values()), torch.arange(80) % 5)
    given = shoal.hand_over_objects({"data": data, "model": Joined()})
    assert is_same_result(run_with(persistent, **given), run_with(SerialEngine(), **given))


class FrozenBackbone(torch.nn.Module):
    """A frozen layer of 64 x 512 numbers and a head of 10."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(64, 512), torch.nn.Linear(512, 10)
        self.backbone.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.backbone(images.flatten(1))))


def test_frozen_tensors_reach_a_cluster_and_none_comes_back(persistent):
    torch.manual_seed(0)
    given = shoal.hand_over_objects({"model": FrozenBackbone()})
    one, other = (run_with(engine, method="scaffold", **given) for engine in (persistent, SerialEngine()))
    assert is_same_result(one, other) and set(one.params) == {"head.weight", "head.bias"}
    assert one.history.rows[0]["bytes_up"] == 6 * 2 * 4 * (512 + 1) * 10, (
        "a device sends its head and the change of c_k"
    )


def test_the_size_of_chunks_changes_no_bit(persistent):
    wanted = run_with(SerialEngine(), method="scaffold")
    for persistent.engine.width in (4, 1):
        assert is_same_result(run_with(persistent, method="scaffold"), wanted)


def test_several_devices_in_a_call_give_the_same_to_rounding():
    """The laws are of float64; the recipe's width is what the actors have."""
    wide = shoal.run("scaffold", engine="ray", width=3, precision="float64", **SMALL)
    assert wide.engine == EngineChoice("ray", 3)
    one = shoal.run("scaffold", engine="serial", precision="float64", **SMALL)
    assert_trees_close(wide.params, one.params, 1e-9, "they differ")


def test_runs_side_by_side_give_the_bits_of_serial(persistent):
    both = play_runs([prepare_new_run(Recipe().with_values(**SMALL, seed=seed)) for seed in (0, 1)], persistent)
    assert all(is_same_result(one, run_with(SerialEngine(), seed=seed)) for seed, one in enumerate(both))


def test_a_run_is_taken_up_again_on_a_cluster(tmp_path):
    first: dict[str, Any] = SMALL | {"rounds": 1, "out": str(tmp_path / "run")}
    shoal.run("scaffold", engine="ray", **first)
    assert json.loads((tmp_path / "run" / "engine.json").read_text())["engine"] == "ray"
    resumed = shoal.resume(tmp_path / "run", rounds=2)
    assert resumed.engine == EngineChoice("ray")
    assert is_same_result(resumed, shoal.run("scaffold", engine="serial", **SMALL))


def test_data_lie_in_the_store_once_and_nobody_writes_to_them(persistent):
    assembly = assemble_run(Recipe().with_values(**SMALL, server_data="share:0.05"))
    loop, local_devices = assembly.loop, assembly.loop.host
    local_devices.engine = persistent
    play_rounds(loop, loop.start(assembly.net), 0, 1)
    local_devices.train_on_server(assembly.net.initial, Work(1.0, 0, 8, 0.1), 0)
    refs = [
        ref
        for setup, (_, ref) in persistent.engine.stored_setups.items()
        if setup in (local_devices.setup, local_devices.server_setup)
    ]
    packed_setups: list[Any] = [ray.get(ref) for ref in refs]
    assert len(packed_setups) == 2 and packed_setups[0].shared_refs == packed_setups[1].shared_refs
    held = {ref: tensor for tensor, ref in persistent.engine.tensor_refs.items() if ref in packed_setups[0].shared_refs}
    assert any(tensor is local_devices.setup.samples(0).inputs for tensor in held.values())
    assert all(np.array_equal(ray.get(ref)[0], view_tensor_bytes(tensor)) for ref, tensor in held.items())


def test_answers_are_read_in_the_store_until_somebody_keeps_them():
    """Whatever is kept would hold a place there; and what devices remember is always kept."""
    assembly = assemble_run(Recipe().with_values(**SMALL | {"method": "scaffold", "model": "mlp"}))
    loop, local_devices = assembly.loop, assembly.loop.host
    local_devices.engine = engine = RayEngine(workers=2)
    server_state = loop.start(assembly.net)
    for number in range(2):
        server_state, _ = play_rounds(loop, server_state, number, number + 1)
        assert engine.zero_copy_arrays and engine.zero_copy_bytes > 0
        assert all(array() is None for array in engine.zero_copy_arrays)
    kept_outcomes = train_jobs(local_devices, loop.open_round(server_state, 2).jobs_to_train)
    assert engine.zero_copy_bytes > 0 and any(array() is not None for array in engine.zero_copy_arrays)
    more = train_jobs(local_devices, loop.open_round(server_state, 3).jobs_to_train)
    assert engine.zero_copy_bytes == 0 and not engine.zero_copy_arrays
    assert len(kept_outcomes) == len(more) == SMALL["sample"]
    engine.close()


def test_nobody_to_train():
    assert RayEngine().train([]) == []


# what may happen --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FaultyEngine(SerialEngine):
    """Something happens when device 3 trains in the first round, so often."""

    happens: Callable[[Job], Any]
    notes: str
    times: int = 10**6

    def train(self, tasks):
        for task in tasks:
            times_so_far = len(os.listdir(self.notes))
            if (task.job.device, task.job.round) == (3, 0) and times_so_far < self.times:
                Path(self.notes, str(times_so_far)).touch()
                self.happens(task.job)
        return super().train(tasks)


def dies(job: Job) -> None:
    os._exit(7)


def hangs(job: Job) -> None:
    time.sleep(600)


class WithoutDevice3(SerialEngine):
    """Device 3 drops out of the first round."""

    def train(self, tasks):
        is_lost = [(task.job.device, task.job.round) == (3, 0) for task in tasks]
        dropped = Outcome(3, problem="as agreed")
        return [
            TaskResult(dropped, t.memory) if g else super(WithoutDevice3, self).train([t])[0]
            for t, g in zip(tasks, is_lost)
        ]


@pytest.mark.parametrize("width", [1, 4])
def test_a_worker_that_dies_costs_a_retry(width, tmp_path):
    found = run_with(
        RayEngine(workers=2, make_engine=partial(FaultyEngine, dies, str(tmp_path), 1), width=width), method="scaffold"
    )
    assert len(os.listdir(tmp_path)) == 1
    assert is_same_result(found, run_with(SerialEngine(), method="scaffold"))


@pytest.mark.parametrize("happens, width, task_timeout", [(dies, 4, 600.0), (hangs, 1, 4.0)])
def test_a_job_that_takes_two_workers_along_is_given_up(happens, width, task_timeout, tmp_path):
    engine = RayEngine(
        workers=2, make_engine=partial(FaultyEngine, happens, str(tmp_path)), width=width, task_timeout=task_timeout
    )
    found, wanted = run_with(engine, method="scaffold"), run_with(WithoutDevice3(), method="scaffold")
    assert len(os.listdir(tmp_path)) == 2
    reasons = [{d["device"]: d["why"] for d in row.get("dropped", [])} for row in found.history.rows]
    why = "died" if happens is dies else "did not end within 4 s"
    assert list(reasons[0]) == [3] and f"2 workers were lost with it; the last {why}" in reasons[0][3]
    assert not reasons[1]
    for row in (*found.history.rows, *wanted.history.rows):
        row.pop("dropped", None)
    assert is_same_result(found, wanted)


BOOM = """
from dataclasses import dataclass
import os
from shoal import Part

@dataclass(frozen=True)
class Boom(Part):
    parent: int = 0

    def step(self, update, state, scored, local):
        if os.getpid() != self.parent:
            raise ValueError("a wrong number")
        return update, state
"""


def test_a_part_that_raises_is_blamed(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(BOOM)
    with pytest.raises(
        shoal.ShoalError, match="boom cannot be used: it raises ValueError: a wrong number in `step`, l"
    ):
        shoal.run(f"scaffold+boom(parent={os.getpid()})", parts=[str(file)], engine="ray", **SMALL)


def test_an_exception_arrives_as_what_it_is(tmp_path):
    def careless(job: Job) -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there") as error:
        run_with(RayEngine(workers=2, make_engine=partial(FaultyEngine, careless, str(tmp_path))))
    assert "in a worker process" in error.value.__notes__[0] and len(os.listdir(tmp_path)) == 1


def test_actors_that_cannot_start_are_told_of():
    def broken() -> Engine:
        raise OSError("no such thing here")

    with pytest.raises(
        shoal.ShoalError, match="cannot be started .OSError: no such thing here.. Every machine needs the same Python"
    ):
        run_with(RayEngine(workers=2, make_engine=broken))


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_where_nobody_listens_it_is_told_at_once(address):
    with pytest.raises(
        shoal.ShoalError, match=f"no Ray cluster that can be joined at '{address}' .*Connection refused"
    ):
        join_cluster(address)


def test_chunks_are_few_and_keep_everybody_busy():
    def sizes(seconds: list[float], workers: int, width: int = 1) -> list[int]:
        found = split_by_duration(seconds, 1.0, workers, width)
        assert sorted(i for chunk in found for i in chunk) == list(range(len(seconds)))
        return [len(chunk) for chunk in found]

    assert sizes([0.003] * 100, 2) == [25] * 4, "two for everybody"
    assert sizes([0.001] * 100, 2) == [50] * 2, "but not very short ones"
    assert sizes([0.003] * 100, 2, width=10) == [30, 30, 30, 10], "calls are full"
    assert sizes([0.003] * 100, 2, width=100) == [50] * 2, "but nobody is left out"
    assert sizes([0.02] * 100, 2) == [10] * 10, "of 0.2 s at most"
    assert sizes([0.4] * 5, 2) == [1] * 5
    assert sizes([0.001] * 6, 2) == [3, 3], "nobody is left out"
    assert sizes([0.001] * 3, 4) == [1] * 3
    assert split_by_duration([0.1, 0.3, 0.2], 1.0, 1, 1) == [[1], [2], [0]], "the longest first"


def test_who_shares_a_call_does_not_depend_on_the_pace():
    """Else neither a second run nor a resumed one would have the same bits."""
    steps = [float(1 + i % 7) for i in range(25)]
    found = set()
    for seconds_per_step in (0.0, 1e-6, 1e-3, 0.02, 1.0):
        chunks = split_by_duration(steps, seconds_per_step, 3, 4)
        found.add(tuple(tuple(chunk[at : at + 4]) for chunk in chunks for at in range(0, len(chunk), 4)))
    assert len(found) == 1


# the command line and the pick ------------------------------------------------------------------------------------


FALLS = """
from dataclasses import dataclass
from pathlib import Path
import os, ray
from shoal import Part

@dataclass(frozen=True)
class Falls(Part):
    note: str = ""

    def end(self, params, state, memory, device):
        if ray.is_initialized() and not Path(self.note).exists():
            Path(self.note).touch()
            print("I fall")
            os._exit(1)
        return params, memory
"""


def test_ray_keeps_quiet_even_when_a_worker_dies(tmp_path):
    (tmp_path / "own.py").write_text(FALLS)
    method = ["--parts", str(tmp_path / "own.py"), "--method", f"falls(note='{tmp_path / 'note'}')"]
    flags = "--engine ray --devices 3 --sample 3 --rounds 2 --steps 2 --json".split()
    command = [sys.executable, "-m", "shoal.cli", "run", *method, *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and (tmp_path / "note").exists(), ran.stderr
    assert [json.loads(line)["round"] for line in ran.stdout.splitlines()] == [0, 1]
    assert ran.stderr.startswith("warning: A worker that trained the devices 0 died") and ran.stderr.count("\n") == 1


def test_where_ray_is_missing_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "shoal.engines.workers.ray_engine", None)
    with pytest.raises(shoal.ShoalError, match=r'Ray is not installed. Run: pip install "shoal\[ray\]".') as error:
        build_engine(EngineChoice("ray"))
    assert error.value.kind.name == "missing-extra"


def test_an_address_needs_the_engine():
    with pytest.raises(shoal.ShoalError, match="engine is pool, which knows no cluster. Add --engine ray"):
        choose_engine(assemble_run(Recipe().with_values(engine="pool", address="auto")))
    pick = choose_engine(assemble_run(Recipe().with_values(engine="ray", address="ray://far:10001")))
    assert pick == EngineChoice("ray", address="ray://far:10001") == parse_engine_choice(pick.to_dict())
    assert str(pick) == "ray, the cluster at ray://far:10001, one device in a call"
    assert str(EngineChoice("ray", 4)) == "ray, on this machine, 4 devices in a call"
    assert parse_engine_choice({"engine": "ray", "address": 3}) is None


def test_auto_never_picks_a_cluster():
    net = assemble_run(Recipe()).net
    assert "ray" not in {pick.engine for pick in list_candidates(net, 8, 100)}


# the way there and back -------------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_tensors_come_out_as_they_went_in(dtype):
    made = [torch.arange(n).remainder(2).to(dtype) for n in (0, 1, 7, 5000)]
    made += [made[3].view(50, 100).t(), made[3][::2], made[1].reshape(())]
    far = ray.get(ray.put([view_tensor_bytes(made[3])]))
    for copy in (True, False):
        packed = pickle_with_tensors({"all": made, "again": made[3]}, lambda t: ("far", 0) if t is made[3] else None)
        found = unpickle_with_tensors(ray.get(ray.put(packed)), [far], copy=copy)
        assert tree.is_same_tree(found["all"], made) and found["again"] is found["all"][3]
        assert all(t.data_ptr() % 64 == 0 for t in found["all"] if t.numel())
