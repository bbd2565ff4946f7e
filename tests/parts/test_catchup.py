"""The way down in pieces: a device that was here before is told what changed, and nothing of it gets lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.core import wire
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.plan import WHOLE_MODEL, Slicer
from shoal.core.session import train_jobs
from shoal.core.streams import RandomStreams
from shoal.core.wire import CodecLink, Message
from shoal.parts.catchup import CatchUp
from shoal.parts.stc import STC
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.rounds import play_rounds


def ran(method: str, sample: int = 3) -> shoal.Result:
    return shoal.run(method=method, rounds=6, devices=8, sample=sample, engine="serial", eval_every=6)


def bytes_down(run: shoal.Result) -> list[int]:
    return [row["bytes_down"] for row in run.history.rows]


@pytest.mark.parametrize("method", ["fedavg", "stc(ratio=0.05, down=True)", "feddrop(rate=0.5)", "scaffold"])
def test_devices_end_with_the_model_that_they_would_have_received_whole(method):
    plain = ran(method)
    short = ran("catchup" if method == "fedavg" else f"{method}+catchup")
    assert all(torch.equal(v, short.params[k]) for k, v in plain.params.items())
    assert all(b <= a for a, b in zip(bytes_down(plain), bytes_down(short)))


def test_little_travels_down_once_the_servers_change_is_ternary():
    plain = bytes_down(ran("stc(ratio=0.01, down=True)", sample=8))
    short = bytes_down(ran("stc(ratio=0.01, down=True)+catchup", sample=8))
    assert short[0] == plain[0] == 8 * 4 * 9610
    told = 82 + 2 + 13 + 1
    assert all(8 * 4 * told < b < 8 * (8 * told + 4 * 6) for b in short[1:])


def test_what_the_server_leaves_out_is_owed():
    loop, net = build_tiny_run(Method((STC(0.3, down=True),)))
    free, _ = build_tiny_run(Method((STC(0.3),)))
    with_debt, _ = play_rounds(loop, loop.start(net), 0, 1)
    without, _ = play_rounds(free, free.start(net), 0, 1)
    owed = with_debt.states["stc"]["owed"]
    torch.testing.assert_close(tree.add_params(with_debt.params, owed), without.params)
    change = tree.subtract_params(with_debt.params, net.initial)
    for value in change.values():
        sizes = value.abs()[value != 0]
        torch.testing.assert_close(sizes, sizes[:1].expand(sizes.shape))


def test_a_device_that_did_not_answer_is_sent_everything():
    loop, net = build_tiny_run(compose([STC(0.3, down=True), CatchUp()]), (5, 3, 4))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    asked = loop.open_round(standing, 1)
    outcomes = train_jobs(loop.host, [job for job in asked.jobs if job.device != 1])
    standing, _ = loop.close_round(asked, outcomes, 0.0)
    sizes = {job.device: job.message.bytes_by["model"] for job in loop.open_round(standing, 2).jobs}
    assert sizes[1] == tree.count_tree_bytes(net.initial) and sizes[0] == sizes[2] < sizes[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=5), st.data())
def test_any_history_of_changes_is_caught_up_with(rounds, data):
    """A device that saw round v, or a later one than the server thinks, decodes the newest model."""
    models = [torch.arange(9.0)]
    changed = torch.zeros(9, dtype=torch.int32)
    for number, touched in enumerate(rounds, 1):
        models.append(torch.where(torch.tensor(touched), models[-1] + 10, models[-1]))
        changed = torch.where(torch.tensor(touched), number, changed).to(torch.int32)
    thought = data.draw(st.integers(0, len(rounds)))
    saw = data.draw(st.integers(thought, len(rounds)))
    link = CodecLink("down", 0, len(rounds), WHOLE_MODEL, Slicer((), ("w",)), RandomStreams(0), {"w": models[-1]})
    state = {"catchup": {"changed": {"w": changed}, "seen": torch.tensor([thought], dtype=torch.int32)}}
    coded, _ = wire.encode_message(Message({"w": {"value": models[-1]}}), [CatchUp()], state, link)
    back = wire.decode_message(coded, [CatchUp()], link, {"catchup": {"model": {"w": models[saw]}}})
    assert torch.equal(back.body["w"]["value"], models[-1])
    assert coded.nbytes <= models[-1].nbytes


def test_changes_for_a_device_that_remembers_nothing_are_refused():
    link = CodecLink("down", 0, 1, WHOLE_MODEL, Slicer((), ("w",)), RandomStreams(0), {"w": torch.zeros(40)})
    state = {"catchup": {"changed": {"w": torch.zeros(40, dtype=torch.int32)}, "seen": torch.tensor([0])}}
    coded, _ = wire.encode_message(Message({"w": {"value": torch.zeros(40)}}), [CatchUp()], state, link)
    with pytest.raises(ShoalError, match="does not remember"):
        wire.decode_message(coded, [CatchUp()], link)
