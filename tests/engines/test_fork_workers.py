"""Worker processes: they agree with `serial`, with each other, and outlive whatever happens to them."""

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_parts import AskLoss, CutOnce, HalfWidth, LastTensors, Remember, ServerJoins

from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.part import Part
from shoal.core.task import Engine
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.chunking import split_into_chunks
from shoal.engines.workers.fork import PoolEngine
from shoal.engines.workers.shared_memory import SharedBuffer
from shoal.parts.fedprox import FedProx
from shoal.parts.scaffold import Scaffold
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.rounds import assert_trees_close, drop_wall_seconds, play_rounds

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks")

SIZES = (5, 3, 8, 2, 6, 4, 7)
FORK = multiprocessing.get_context("fork")


def play_tiny_run(parts: list[Part], engine: Engine, rounds: int = 2):
    """Weights, states and memories after some rounds, and the rows."""
    loop, net = build_tiny_run(compose(parts), SIZES, momentum=0.5)
    loop.host.engine = engine
    try:
        server_state, rows = play_rounds(loop, loop.start(net), 0, rounds)
    finally:
        engine.close()
    memories = [loop.host.memory.get(d) for d in range(len(SIZES))]
    return [server_state.params, server_state.states, memories], [drop_wall_seconds(row) for row in rows]


def play_first_round(part: Part, pool: PoolEngine):
    loop, net = build_tiny_run(Method((part,)), SIZES)
    loop.host.engine = pool
    server_state, [row] = play_rounds(loop, loop.start(net), 0, 1)
    return server_state, row


def has_ended(process: int) -> bool:
    """Whether a process has ended, even if nobody has waited for it yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def list_open_files(process: int) -> list[str]:
    """What the file descriptors of a process lead to."""
    names = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            names.append(os.readlink(link))
    return names


def wait_until(condition: Callable[[], bool]) -> bool:
    limit = time.monotonic() + 120
    while not condition() and time.monotonic() < limit:
        time.sleep(0.005)
    return condition()


# what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts, make_engine",
    [
        ([], SerialEngine),
        ([Scaffold()], SerialEngine),
        ([Scaffold()], lambda: BatchedEngine(3)),
        ([HalfWidth()], lambda: BatchedEngine(3)),
        ([LastTensors()], SerialEngine),
        ([AskLoss(), ServerJoins()], SerialEngine),
        ([CutOnce(), Remember()], SerialEngine),
    ],
)
def test_workers_agree_with_serial(parts, make_engine):
    wanted, rows = play_tiny_run(parts, SerialEngine())
    found, same_rows = play_tiny_run(parts, PoolEngine(2, 3, make_engine))
    assert_trees_close(found, wanted, 1e-9, "workers train to something else")
    computed = [
        [{k: row.pop(k) for k in [*row] if isinstance(row[k], float)} for row in own] for own in (rows, same_rows)
    ]
    assert same_rows == rows and computed[1] == [pytest.approx(row) for row in computed[0]]


@pytest.mark.parametrize("make_engine", [SerialEngine, lambda: BatchedEngine(2)], ids=["serial", "batched"])
def test_the_number_of_workers_changes_no_bit(make_engine):
    runs = [play_tiny_run([Scaffold()], PoolEngine(workers, 2, make_engine)) for workers in (1, 2, 3)]
    for one, other in pairwise(runs):
        assert tree.is_same_tree(one[0], other[0]) and one[1] == other[1]


def test_nobody_to_train():
    assert PoolEngine(2, 3, SerialEngine).train([]) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 6), st.integers(1, 5))
def test_every_worker_gets_as_many_chunks_of_as_many_devices(steps, width, workers):
    chunks = split_into_chunks(steps, width, workers)
    flat = [i for chunk in chunks for i in chunk]
    assert sorted(flat) == list(range(len(steps))) and all(chunks)
    assert all(steps[a] >= steps[b] for a, b in pairwise(flat))
    sizes = [len(chunk) for chunk in chunks]
    assert all(size <= width for size in sizes) and max(sizes, default=0) - min(sizes, default=0) <= 1
    assert len(steps) < workers or len(chunks) % workers == 0 or max(sizes) == 1


# what may happen --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dies(Part):
    """Kills the process in which it steps, so often; never that of the tests."""

    notes: str = ""
    times: int = 1
    parent: int = 0

    def step(self, update, state, scored, local):
        died = len(os.listdir(self.notes))
        if os.getpid() != self.parent and died < self.times:
            Path(self.notes, str(died)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return update, state


def test_a_worker_that_dies_is_replaced(tmp_path):
    wanted, rows = play_tiny_run([Scaffold()], PoolEngine(1, 2, SerialEngine))
    found, same_rows = play_tiny_run([Scaffold(), Dies(str(tmp_path), 2, os.getpid())], PoolEngine(1, 2, SerialEngine))
    assert len(os.listdir(tmp_path)) == 2 and same_rows == rows
    assert tree.is_same_tree(found[0], wanted[0])


def test_a_chunk_that_kills_three_workers_is_given_up(tmp_path):
    with pytest.raises(ShoalError, match=r"3 worker processes died .* devices 2, 6, 4, 0, .* SIGKILL") as error:
        play_first_round(Dies(str(tmp_path), 99, os.getpid()), PoolEngine(1, 4, SerialEngine))
    assert error.value.kind.name == "bug" and len(os.listdir(tmp_path)) == 3


def test_workers_that_die_between_rounds_are_replaced():
    pool = PoolEngine(2, 2, SerialEngine)
    loop, net = build_tiny_run(Method(), SIZES)
    loop.host.engine = pool
    server_state, _ = play_rounds(loop, loop.start(net), 0, 1)
    for worker in pool.workers:
        os.kill(worker.process, signal.SIGKILL)
    server_state, _ = play_rounds(loop, server_state, 1, 2)
    assert tree.is_same_tree(server_state.params, fedavg_params(2))
    pool.close()


def test_chunks_are_not_blamed_for_workers_that_died_before():
    pool = PoolEngine(4, 1, SerialEngine)
    loop, net = build_tiny_run(Method(), SIZES)
    loop.host.engine = pool
    server_state, _ = play_rounds(loop, loop.start(net), 0, 1)
    processes = [worker.process for worker in pool.workers]
    for process in processes:
        os.kill(process, signal.SIGKILL)
    assert wait_until(lambda: all(map(has_ended, processes)))
    server_state, _ = play_rounds(loop, server_state, 1, 2)
    assert tree.is_same_tree(server_state.params, fedavg_params(2))
    pool.close()


def fedavg_params(rounds: int):
    loop, net = build_tiny_run(Method(), SIZES)
    return play_rounds(loop, loop.start(net), 0, rounds)[0].params


class UnpicklableError(Exception):
    """An exception that cannot be unpickled: it needs two arguments, and keeps one."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


@dataclass(frozen=True)
class Raises(Part):
    what: str = ""

    def step(self, update, state, scored, local):
        match self.what:
            case "value":
                raise ValueError("a wrong number")
            case "shoal":
                raise ShoalError("bad-part", "It cannot be used.", "Mend it.")
            case "exit":
                sys.exit(3)
        return update, state


class RaisingEngine(SerialEngine):
    """An engine that raises by itself, with no part to blame."""

    def __init__(self, error: Exception):
        self.error = error

    def train(self, tasks):
        raise self.error


def test_an_exception_arrives_as_what_it_is():
    pool = PoolEngine(2, 2, lambda: RaisingEngine(ValueError("a wrong number")))
    with pytest.raises(ValueError, match="a wrong number") as error:
        play_first_round(FedProx(), pool)
    assert "in a worker process" in error.value.__notes__[0] and "in train" in error.value.__notes__[0]
    pool.close()
    pool = PoolEngine(2, 2, lambda: RaisingEngine(UnpicklableError("very", "odd")))
    with pytest.raises(RuntimeError, match="UnpicklableError: very odd"):
        play_first_round(FedProx(), pool)
    pool.close()


def test_a_part_that_raises_is_blamed():
    pool = PoolEngine(2, 2, SerialEngine)
    with pytest.raises(ShoalError, match="raises ValueError: a wrong number in `step`, line") as error:
        play_first_round(Raises("value"), pool)
    assert error.value.kind.name == "bad-part"
    with pytest.raises(ShoalError, match="It cannot be used. Mend it.") as other:
        play_first_round(Raises("shoal"), pool)
    assert other.value.kind.name == "bad-part"
    with pytest.raises(SystemExit):
        play_first_round(Raises("exit"), pool)
    server_state, _ = play_first_round(Raises(), pool)
    assert tree.is_same_tree(server_state.params, fedavg_params(1))
    pool.close()


def test_workers_are_idle_after_an_exception():
    pool = PoolEngine(2, 2, SerialEngine)
    with pytest.raises(ShoalError, match="a wrong number"):
        play_first_round(Raises("value"), pool)
    before = [worker.process for worker in pool.workers]
    assert all(before) and not any(map(has_ended, before)) and all(worker.chunk is None for worker in pool.workers)
    pool.close()
    assert all(map(has_ended, before))


@dataclass(frozen=True)
class Sleeps(Part):
    parent: int = 0

    def step(self, update, state, scored, local):
        if os.getpid() != self.parent:
            time.sleep(900)
        return update, state


def test_ctrl_c_ends_the_workers_at_once_and_the_pool_can_go_on():
    pool, seen = PoolEngine(2, 2, SerialEngine), []

    def interrupt():
        assert wait_until(lambda: all(worker.chunk is not None for worker in pool.workers))
        seen.extend(worker.process for worker in pool.workers)
        for process in (*seen, os.getpid()):
            os.kill(process, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    began = time.monotonic()
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        play_first_round(Sleeps(os.getpid()), pool)
    thread.join()
    assert len(seen) == 2 and all(map(has_ended, seen)) and time.monotonic() - began < 300
    server_state, _ = play_first_round(Raises(), pool)
    assert tree.is_same_tree(server_state.params, fedavg_params(1))
    pool.close()


def test_workers_die_with_their_parent_and_do_not_hold_its_files(tmp_path):
    near_end, far_end = FORK.Pipe()

    def parent():
        lock = open(tmp_path / ".lock", "wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        pool = PoolEngine(3, 2, SerialEngine)
        play_first_round(Raises(), pool)
        threading.Thread(target=play_first_round, args=(Sleeps(os.getpid()), pool), daemon=True).start()
        assert wait_until(lambda: all(worker.chunk is not None and worker.process for worker in pool.workers))
        far_end.send([worker.process for worker in pool.workers])
        time.sleep(900)

    process = FORK.Process(target=parent)
    process.start()
    workers = near_end.recv()
    assert len(workers) == 3 and not any(map(has_ended, workers))
    assert wait_until(lambda: not any(".lock" in name for worker in workers for name in list_open_files(worker)))
    assert all(any("memfd:shoal" in name for name in list_open_files(worker)) for worker in workers)
    process.kill()
    process.join()
    with open(tmp_path / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert wait_until(lambda: all(map(has_ended, workers)))


def test_a_pool_that_is_forgotten_ends_its_workers():
    pool = PoolEngine(2, 2, SerialEngine)
    play_first_round(Raises(), pool)
    processes = [worker.process for worker in pool.workers]
    del pool
    assert wait_until(lambda: gc.collect() >= 0 and all(map(has_ended, processes)))


def test_a_pool_that_nobody_closes_ends_with_the_interpreter():
    script = """
from shoal.engines.workers.fork import PoolEngine
from shoal.engines.serial import SerialEngine
from shoal.core.compose import Method
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.rounds import play_rounds
loop, net = build_tiny_run(Method())
loop.host.engine = PoolEngine(2, 2, SerialEngine)
play_rounds(loop, loop.start(net), 0, 1)
print(*[worker.process for worker in loop.host.engine.workers])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    assert len(ran.stdout.split()) == 2 and all(has_ended(int(process)) for process in ran.stdout.split())


def test_a_daemon_may_have_workers():
    process = FORK.Process(
        target=lambda: sys.exit(bool(play_tiny_run([], PoolEngine(2, 2, SerialEngine))) * 7), daemon=True
    )
    process.start()
    process.join()
    assert process.exitcode == 7


def test_what_parts_print_is_not_lost(capfd):
    @dataclass(frozen=True)
    class Prints(Part):
        def end(self, params, state, memory, device):
            print(f"device {device.id}.")
            return params, memory

    pool = PoolEngine(2, 2, SerialEngine)
    play_first_round(Prints(), pool)
    pool.close()
    output = capfd.readouterr().out
    assert all(output.count(f"device {d}.") == 1 for d in range(len(SIZES)))


def test_where_workers_cannot_be_the_sentence_says_what_to_use(monkeypatch):
    pool = PoolEngine(2, 2, SerialEngine)
    with pytest.raises(ShoalError, match="cannot train on cuda:1. Use --engine batched"):
        pool.register_setups([Mock(**{"net.place": torch.device("cuda:1")})])
    with monkeypatch.context() as patch, pytest.raises(ShoalError, match="cannot fork safely. Use --engine") as error:
        patch.setattr("sys.platform", "darwin")
        play_first_round(Raises(), pool)
    assert error.value.kind.name == "no-device"
    with monkeypatch.context() as patch, pytest.raises(ShoalError, match="could not be started .*Resource"):
        patch.setattr("os.fork", Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable")))
        play_first_round(Raises(), pool)
    with monkeypatch.context() as patch, pytest.raises(ShoalError, match="shared memory .* No space left"):
        patch.setattr("os.posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
        play_first_round(Raises(), pool)
    with monkeypatch.context() as patch, pytest.raises(ShoalError, match="beside a GPU"):
        patch.setattr("torch.autograd.grad", Mock(side_effect=RuntimeError("Unable to handle autograd's threading")))
        play_first_round(Raises(), pool)
    server_state, _ = play_first_round(Raises(), pool)
    assert tree.is_same_tree(server_state.params, fedavg_params(1))
    pool.close()


# the way there and back -------------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]
DTYPES += [torch.bool, torch.complex64]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor = (tensor * draw(st.integers(1, 100))).to(draw(st.sampled_from(DTYPES)))
    match draw(st.sampled_from(["plain", "turned", "expanded", "part", "last", "learned"])):
        case "turned":
            return tensor.t() if tensor.dim() == 2 else tensor.transpose(0, -1) if tensor.dim() else tensor
        case "expanded":
            return tensor.expand(3, *tensor.shape)
        case "part":
            return tensor[..., ::2] if tensor.dim() else tensor
        case "last" if tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        case "learned" if tensor.is_floating_point():
            return tensor.requires_grad_()
    return tensor


things = st.recursive(
    tensors() | st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(things, max_size=3))
def test_trees_come_out_of_an_arena_as_they_went_in(contents):
    buffer = SharedBuffer()
    for content in contents:
        pickled = buffer.write_object(content)
        for copy in (False, True):
            assert tree.is_same_tree(buffer.read_object(pickled, copy), content)
    buffer.write_object([torch.ones(1000)])


def test_a_tensor_met_twice_is_written_once_and_is_one_again():
    buffer, model, twin = SharedBuffer(), torch.randn(1000), torch.empty(0)
    pickled = buffer.write_object([{"a": model}, [model, model.view(10, 100), twin, torch.empty(0)]])
    assert buffer.end == 2 * 4032 + 2 * 64 and len(pickled) < 50
    one, (two, view, *empty) = buffer.read_object(pickled, copy=True)
    assert one["a"] is two and view is not two and empty[0] is not empty[1]


def test_copies_are_kept_and_the_rest_is_the_arenas_own():
    buffer = SharedBuffer()
    pickled = buffer.write_object(torch.ones(5))
    copied, view = buffer.read_object(pickled, copy=True), buffer.read_object(pickled, copy=False)
    assert copied.data_ptr() % 64 == view.data_ptr() % 64 == 0
    buffer.write_object(torch.zeros(5))
    assert copied.tolist() == [1] * 5 and view.tolist() == [0] * 5


def test_a_pickle_lets_go_of_its_tensors_and_keeps_arrays_inside():
    """Nothing waits for the garbage collector: results are large, and rounds are many."""
    buffer, sent = SharedBuffer(), torch.ones(1000)
    gone = weakref.ref(sent)
    array = np.arange(1000)
    gc.disable()
    try:
        pickled = buffer.write_object([sent, array])
        del sent
        assert gone() is None
        found, same_array = buffer.read_object(pickled, copy=True)
        gone = weakref.ref(found)
        del found
        assert gone() is None
    finally:
        gc.enable()
    assert np.array_equal(same_array, array) and same_array.flags.writeable


def test_an_arena_grows_on_both_sides_of_a_fork():
    requests, replies = SharedBuffer(), SharedBuffer()
    near_end, far_end = FORK.Pipe()

    def echo():
        while request := far_end.recv_bytes():
            far_end.send_bytes(replies.write_object([2 * t for t in requests.read_object(request, copy=False)]))

    process = FORK.Process(target=echo, daemon=True)
    process.start()
    exchanged = []
    for size in (10, 100_000, 3_000_000, 50):
        sent = [torch.full((size,), float(size)), torch.arange(size)]
        near_end.send_bytes(requests.write_object(sent))
        exchanged.append((sent, replies.read_object(near_end.recv_bytes(), copy=True)))
    near_end.send_bytes(b"")
    process.join()
    for sent, found in exchanged:
        assert tree.is_same_tree(found, [2 * t for t in sent])


def test_what_cannot_be_sent_is_told_and_leaves_the_pool_usable():
    pool = PoolEngine(2, 2, SerialEngine)

    @dataclass(frozen=True)
    class Local(Part):
        def end(self, params, state, memory, device):
            return params, {"what": lambda: 0}

    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        play_first_round(Local(), pool)
    server_state, _ = play_first_round(Raises(), pool)
    assert tree.is_same_tree(server_state.params, fedavg_params(1))
    pool.close()
