"""HetLoRA: numbers worked out by hand, truncation, padding and ranks that fall."""

import pytest
import torch
from adapted_models import make_product_net
from torch import Tensor

from shoal.core.batch import BatchScore
from shoal.core.errors import ShoalError
from shoal.core.model.plan import Plan
from shoal.core.types import Reply
from shoal.parts.hetlora import HetLoRA, count_ranks_left
from shoal.parts.lora import LoRA
from shoal.testing.toy import Toy, toy


def start(part: HetLoRA) -> Toy:
    """One weight with an adapter of rank 2 and scale 1, and two devices."""
    net = make_product_net(rank=2, scale=1.0)
    y = torch.zeros(8, 1).double()
    return toy([LoRA(), part], sizes=(2, 2), net=net, inputs=torch.ones_like(y), targets=y, lr=0.05)


def answer(run: Toy, device: int, a: list[float], b: list[float]) -> Reply:
    """The reply of a device that ends with these factors, and has no other ranks."""
    rank, like = len(a), run.params
    plan = Plan({"rank": torch.arange(rank)}) if rank < 2 else Plan()
    values = {"0.lora_A": torch.tensor(a).double()[:, None], "0.lora_B": torch.tensor([b]).double()}
    small = {k: v - run.net.slicer.take({k: like[k]}, plan)[k] for k, v in values.items()}
    delta = run.net.slicer.place(small, like, plan)
    masks = {k: run.net.slicer.covered_mask(k, like[k], plan) for k in delta}
    covered = {k: mask for k, mask in masks.items() if mask is not None}
    return run.reply(device, delta, covered=covered, plan=plan)


def answer_of_two(run: Toy) -> list[Reply]:
    return [answer(run, 0, [2.0], [1.0]), answer(run, 1, [1.0, 1.0], [3.0, 3.0])]


def combine(part: HetLoRA) -> tuple[list[float], list[float], Tensor]:
    """The combined A and B of the two replies, and their weights."""
    run = start(part)
    round = run.round("hetlora", answer_of_two(run))
    weights, _ = part.weigh(torch.tensor([2.0, 2.0]).double(), {}, round)
    weights = weights / weights.sum()
    made, _ = part.combine(round.replies, {}, run.round("hetlora", round.replies, weights.tolist()))
    return made["0.lora_A"].flatten().tolist(), made["0.lora_B"].flatten().tolist(), weights


def test_replies_weigh_by_the_norm_of_their_product():
    """|B A| = 2 and 3 + 3 = 6."""
    assert combine(HetLoRA())[2].tolist() == pytest.approx([0.25, 0.75])
    assert combine(HetLoRA(weights="size"))[2].tolist() == pytest.approx([0.5, 0.5])


def test_padding_shrinks_the_ranks_that_few_have():
    """A = (1/4 2 + 3/4, 3/4), B = (1/4 + 3/4 3, 3/4 3): B A = 3.125 + 1.6875."""
    a, b, _ = combine(HetLoRA())
    assert a == pytest.approx([1.25, 0.75]) and b == pytest.approx([2.5, 2.25])
    assert sum(x * y for x, y in zip(a, b)) == pytest.approx(4.8125)


def test_the_mean_over_holders_does_not():
    a, b, _ = combine(HetLoRA(padded=False))
    assert a == pytest.approx([1.25, 1.0]) and b == pytest.approx([2.5, 3.0])
    assert sum(x * y for x, y in zip(a, b)) == pytest.approx(6.125)


def test_all_norms_zero_is_all_weights_equal_and_a_rank_that_nobody_has_stays():
    run, part = start(HetLoRA()), HetLoRA()
    replies = [answer(run, 0, [2.0], [0.0]), answer(run, 1, [3.0], [0.0])]
    round = run.round("hetlora", replies, [0.5, 0.5])
    assert part.weigh(torch.ones(2).double(), {}, round)[0].tolist() == [1.0, 1.0]
    made, _ = part.combine(replies, {}, round)
    assert made["0.lora_A"].flatten().tolist() == [2.5, 1.0]


def test_the_loss_has_the_norms_of_the_tail():
    """gamma 1/2 of rank 2 leaves one: 0.1 |B_2| |A_2| = 0.1 * 3 * 5."""
    part = HetLoRA(rates="1", gamma=0.5, lam=0.1)
    run = start(part)
    local = run.local(0, "hetlora")
    assert local.state["tail"]["rank"].tolist() == [0.0, 1.0]
    params = {"0.lora_A": torch.tensor([[7.0], [5.0]]).double(), "0.lora_B": torch.tensor([[7.0, 3.0]]).double()}
    nothing = torch.zeros(1).double()
    inner = lambda params, batch: BatchScore(torch.tensor(2.0).double(), nothing, nothing, {}, {}, {})  # noqa: E731
    assert float(part.objective(inner, local)(params, run.batch(0)).loss) == pytest.approx(2 + 1.5)


def test_a_rank_falls_where_its_tail_became_smaller():
    part = HetLoRA(rates="1", gamma=0.5, lam=0.1)
    run = start(part)
    run.params["0.lora_B"].fill_(1.0)
    replies = [answer(run, 0, [9.0, 1.0], [9.0, 0.9]), answer(run, 1, [0.1, 1.0], [0.1, 1.1])]
    _, state = part.serve(run.params, {"ranks": {}}, run.round("hetlora", replies))
    assert state == {"ranks": {"device 0": 1}}
    plans, _ = part.plan({0: Plan(), 1: Plan()}, state, run.round("hetlora"))
    assert [plan.kept["rank"].tolist() for plan in plans.values()] == [[0], [0, 1]]
    later = [answer(run, 0, [0.1], [0.1])]
    assert part.serve(run.params, state, run.round("hetlora", later))[1] == state
    assert [count_ranks_left(rank, 0.99) for rank in (1, 8, 50, 101)] == [1, 8, 50, 100]


def test_devices_keep_their_rank_and_small_ones_are_sent_less():
    run = toy("lora(rank=8)+hetlora(rates='1,0.5,0.125')", sizes=(2,) * 12)
    rows = run.play(2)
    part = run.session.loop.method.parts[1]
    plans, _ = part.plan({d: Plan() for d in range(12)}, run.states["hetlora"], run.round("hetlora"))
    ranks = [len(plan.kept["rank"]) for plan in plans.values()]
    assert set(ranks) == {1, 4, 8} and rows[0]["hetlora.mean_rank"] == sum(ranks) / 12
    head, per_rank = 2 * 3 + 2, 4 + 3
    assert rows[1]["bytes_by"]["down"] == {"model": 8 * sum(head + per_rank * rank for rank in ranks)}


def test_it_is_refused_without_adapters():
    for method in ("hetlora", "hetlora+fedprox"):
        with pytest.raises(ShoalError, match="this model has no adapters") as error:
            toy_without_adapters(method)
        assert "lora(...)+hetlora(...)" in error.value.advice


def toy_without_adapters(method: str) -> None:
    import shoal

    shoal.run(method, rounds=1, devices=2, sample=2)
