"""Results in shared memory: stacks travel once, and nothing that is still in use is written over."""

import os
import signal
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.compose import Method
from shoal.core.model import tree
from shoal.core.stacked_sums import group_stacked
from shoal.core.task import JobResult, Task
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.fork import REPLY_BUFFERS, ForkTransport, PoolEngine
from shoal.engines.workers.scheduler import WorkerDeath
from shoal.engines.workers.shared_memory import ReplyBuffer, ReplyState, SharedBuffer
from shoal.parts.scaffold import Scaffold
from shoal.plugins.smoke_run import build_tiny_run

pytest.importorskip("fcntl")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks")

SIZES = (4, 4, 4, 4, 4, 4)


def make_tasks(method: Method, count: int = len(SIZES)) -> list[list[Task]]:
    """The tasks of some rounds, each of which starts at another model."""
    loop, net = build_tiny_run(method, SIZES)
    server_state, rounds = loop.start(net), []
    for number in range(count):
        pending = loop.open_round(server_state, number)
        rounds.append(loop.host.make_tasks(pending.jobs))
        server_state, _ = loop.close_round(pending, loop.host.store_results(run_jobs(pending.jobs, rounds[-1])), 0.0)
        loop.host.commit_round(number, True)
    return rounds


def run_jobs(jobs, tasks):
    return [JobResult(job, *result) for job, result in zip(jobs, SerialEngine().train(tasks))]


def list_tensors(results) -> list[torch.Tensor]:
    return tree.collect_tensors([[r.outcome.message.body, r.outcome.message.beside, r.memory] for r in results])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 6),
    shape=st.lists(st.integers(1, 5), max_size=3),
    picked=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    copy=st.booleans(),
)
def test_rows_of_a_stack_come_out_as_they_went_in(rows, shape, picked, copy):
    stack = torch.randn(rows, *shape)
    sent = [stack[number % rows] for number in picked]
    buffer = SharedBuffer()
    message = buffer.write_object({"rows": sent, "other": torch.arange(3)}, most_rows=rows)
    found = buffer.read_object(message, copy)
    assert tree.is_same_tree(found, {"rows": sent, "other": torch.arange(3)})
    assert buffer.end <= stack.nbytes + 64 + 64


def test_a_stack_is_written_once_and_its_rows_lie_in_order_again():
    stacks = [torch.randn(5, 200), torch.randn(5, 3, 7)]
    sent = [list(row) for row in zip(*(stack.unbind() for stack in stacks))]
    buffer = SharedBuffer()
    message = buffer.write_object(sent, most_rows=5)
    assert len(buffer.sizes) == 2
    for copy in (False, True):
        assert group_stacked(buffer.read_object(message, copy)) == [[0, 1, 2, 3, 4]]


def test_a_row_of_something_larger_than_the_results_travels_alone():
    """A part that sends one of a million samples must not send all of them."""
    samples, buffer = torch.randn(100, 50), SharedBuffer()
    message = buffer.write_object([samples[7]], most_rows=5)
    assert buffer.end <= 256
    torch.testing.assert_close(buffer.read_object(message, copy=True)[0], samples[7], rtol=0, atol=0)


def test_a_slice_across_two_rows_travels_alone():
    """A part may send numbers 3 to 8 of a matrix with rows of 5: no row has them all."""
    matrix, buffer = torch.randn(4, 5), SharedBuffer()
    across = matrix.view(-1)[3:8]
    assert across._base is matrix
    [found] = buffer.read_object(buffer.write_object([across], most_rows=4), copy=True)
    assert torch.equal(found, across)


def test_conjugates_of_a_row_travel_alone():
    rows, buffer = torch.randn(3, 4, dtype=torch.complex64), SharedBuffer()
    sent = [rows[1].conj(), rows[1].conj().imag]
    found = buffer.read_object(buffer.write_object(sent, most_rows=3), copy=True)
    assert all(map(torch.equal, found, sent))


def test_a_buffer_is_read_as_long_as_one_of_its_tensors_lives():
    buffer = SharedBuffer()
    message = buffer.write_object([torch.ones(100), torch.ones(2, 50)])
    copied = buffer.read_object(message, copy=True)
    assert not buffer.is_read
    first, second = buffer.read_object(message, copy=False)
    part = second[1:]
    del first, second
    assert buffer.is_read
    del part
    assert not buffer.is_read
    assert [t.sum() for t in copied] == [100, 100]


def test_a_buffer_for_replies_has_one_state_and_is_read_once():
    buffer, states = ReplyBuffer(), []
    for step in (buffer.ask_reply, buffer.accept_reply):
        states.append(buffer.state)
        step()
    states.append(buffer.state)
    message = buffer.write_object([torch.ones(3)])
    found = buffer.read_object(message, copy=False)
    assert [*states, buffer.state] == list(ReplyState)
    for copy in (False, True):
        with pytest.raises(AssertionError):
            buffer.read_object(message, copy)
    with pytest.raises(AssertionError):
        buffer.ask_reply()
    del found
    assert buffer.state is ReplyState.FREE


@pytest.mark.parametrize("width", [1, 3])
def test_results_that_are_kept_stay_what_they_were(width):
    """More rounds than there are buffers, and a worker that is ended between two: no result is written over."""
    rounds = make_tasks(Method(()), REPLY_BUFFERS + 4)
    expected = [[t.clone() for t in list_tensors(BatchedEngine(width).train(tasks))] for tasks in rounds]
    pool = PoolEngine(2, width, lambda: BatchedEngine(width))
    try:
        kept = []
        for number, tasks in enumerate(rounds):
            kept.append(pool.train(tasks))
            if number == 2:
                pool.workers[0].terminate()
    finally:
        pool.close()
    for results, wanted in zip(kept, expected, strict=True):
        for found, tensor in zip(list_tensors(results), wanted, strict=True):
            torch.testing.assert_close(found, tensor, rtol=1e-6, atol=1e-7)


def test_results_that_are_let_go_free_their_buffers_and_memories_do_not_hold_them():
    rounds = make_tasks(Method((Scaffold(),)), 3)
    pool = PoolEngine(1, 6, lambda: BatchedEngine(6))
    try:
        memories = [[result.memory for result in pool.train(tasks)] for tasks in rounds]
        assert tree.collect_tensors(memories)
        assert len(pool.workers[0].list_free_buffers()) == REPLY_BUFFERS
        results = pool.train(rounds[0])
        assert len(pool.workers[0].list_free_buffers()) == REPLY_BUFFERS - 1
        del results
        assert len(pool.workers[0].list_free_buffers()) == REPLY_BUFFERS
    finally:
        pool.close()


def test_a_worker_that_died_with_a_chunk_is_not_started_for_the_next_one():
    """Else the results of the second chunk would be taken for those of the first."""
    (tasks,) = make_tasks(Method(()), 1)
    pool = PoolEngine(1, 1, SerialEngine)
    try:
        expected = list_tensors(pool.train(tasks))
        worker, transport = pool.workers[0], ForkTransport(pool)
        transport.send_chunk(worker, tasks[:1])
        worker.pending.append([0])
        process = worker.process
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        transport.send_chunk(worker, tasks[1:2])
        worker.pending.append([1])
        assert worker.process == process
        assert isinstance(receive_last(transport, worker), WorkerDeath)
        worker.pending.clear()
        for found, wanted in zip(list_tensors(pool.train(tasks)), expected, strict=True):
            assert torch.equal(found, wanted)
    finally:
        pool.close()


def test_a_reply_that_nobody_reads_frees_its_buffer_when_the_pool_is_closed():
    """As after an interrupt between its arrival and its decoding."""
    (tasks,) = make_tasks(Method(()), 1)
    pool = PoolEngine(1, 6, SerialEngine)
    try:
        pool.train(tasks)
        worker, transport = pool.workers[0], ForkTransport(pool)
        transport.send_chunk(worker, tasks)
        transport.receive_reply(worker)
        assert len(worker.list_free_buffers()) == REPLY_BUFFERS - 1
        pool.close()
        assert len(worker.list_free_buffers()) == REPLY_BUFFERS
    finally:
        pool.close()


def receive_last(transport, worker):
    """The last that comes from a worker: the first chunk may have been answered before it was killed."""
    reply = transport.receive_reply(worker)
    return reply if isinstance(reply, WorkerDeath) else transport.receive_reply(worker)
