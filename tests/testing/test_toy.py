"""`shoal.testing.toy`: hand-worked numbers of a part, without rebuilding the loop."""

import torch

import shoal
from shoal.parts.fednova import FedNova
from shoal.parts.fedprox import FedProx
from shoal.testing import toy


def test_a_round_of_replies_is_averaged_by_their_weights():
    run = toy("fedavg")
    replies = [run.reply(0, 1.0), run.reply(1, 5.0)]
    params = shoal.average_replies(run.round(replies=replies, weights=[0.25, 0.75]))
    for name, start in run.params.items():
        torch.testing.assert_close(params[name], start + 4.0)


def test_fedprox_pulls_towards_the_anchor():
    run = toy(FedProx(mu=0.5))
    local, batch = run.local(0, "fedprox"), run.batch(0)
    moved = {name: value + 2.0 for name, value in local.anchor.items()}

    def plain(params, batch):
        return shoal.BatchScore(torch.zeros(()), torch.zeros(2, 2), torch.zeros(2, 3), {}, {}, {})

    scored = FedProx(mu=0.5).objective(plain, local)(moved, batch)
    count = sum(value.numel() for value in local.anchor.values())
    assert float(scored.loss) == 0.5 / 2 * 4.0 * count


def test_objects_are_those_of_the_run():
    run = toy("scaffold", sizes=(5, 3, 4))
    assert [len(run.device(d).samples) for d in range(3)] == [5, 3, 4]
    assert run.round().number == 0 and len(run.batch(0).inputs) == 2
    rows = run.play(2)
    assert [row["round"] for row in rows] == [0, 1] and run.round().number == 2
    assert set(run.memory(0)) == {"scaffold"} and run.local(1, "scaffold").got["c"]
    reply = run.reply(2, steps=7)
    assert (reply.round, reply.size, reply.outcome.steps, reply.outcome.samples) == (2, 4, 7, 4)
    assert all(torch.equal(reply.anchor[name], run.params[name]) for name in reply.anchor)


def test_parts_of_any_form():
    assert str(toy((FedProx(), FedNova())).session.loop.method) == str(toy("fedprox+fednova").session.loop.method)


def test_a_step_knows_the_objective_of_all_parts():
    seen = []

    class Looks(shoal.Part):
        def step(self, update, state, scored, local):
            moved = {name: value + 1.0 for name, value in local.anchor.items()}
            seen.append((local.loss_at(local.anchor), scored.loss, local.loss_at(moved)))
            return update, state

    toy((FedProx(mu=2.0), Looks()), sizes=(2,)).play(1)
    at_anchor, of_batch, at_moved = seen[0]
    assert torch.equal(at_anchor, of_batch) and float(at_moved - at_anchor) != 0
