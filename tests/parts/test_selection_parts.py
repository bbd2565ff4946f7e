"""Power-of-Choice and Oort: who takes part, by what devices reported before."""

from math import log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import shoal
from shoal.core.batch import Batch
from shoal.core.builtin_tasks import CLASSIFY
from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.model.tree import Tree
from shoal.core.part import Part
from shoal.parts.oort import Oort, draw_best, score_devices, slow_down, sum_squared_losses
from shoal.parts.poc import PoC
from shoal.parts.selection import Uniform, draw_cohort
from shoal.testing.toy import toy

SIZES = (5, 3, 1, 4, 2, 6)


def losses_seen(*losses: float | None) -> Tree:
    """The state of PoC; None for a device that never reported."""
    return {
        "loss": torch.tensor([loss or 0.0 for loss in losses], dtype=torch.float64),
        "seen": torch.tensor([loss is not None for loss in losses]),
    }


def select_poc(part: PoC, sample: int, *losses: float | None, number: int = 0) -> list[int]:
    run = toy(part, sizes=SIZES[: len(losses)])
    chosen, _ = part.select([], losses_seen(*losses), run.round("poc", sample=sample, number=number))
    return list(chosen)


def test_of_two_candidates_the_one_with_the_higher_loss_takes_part():
    assert all(select_poc(PoC(d=2), 1, 0.5, 4.5, number=number) == [1] for number in range(5))


def test_with_all_devices_as_candidates_the_choice_is_greedy():
    assert select_poc(PoC(d=6), 3, 0.5, 4.5, 0.1, 3.0, 2.0, 0.2) == [1, 3, 4]


def test_devices_that_never_reported_come_first_and_of_equal_ones_the_lowest_number():
    assert select_poc(PoC(d=6), 2, 9.0, None, 9.0, None, 9.0, None) == [1, 3]
    assert select_poc(PoC(d=6), 3, 2.0, 1.0, 2.0, 2.0, None, 2.0) == [0, 2, 4]


@pytest.mark.parametrize("chances", ["size", "equal"])
def test_with_as_many_candidates_as_take_part_it_is_a_draw_by_size(chances):
    part, run = PoC(d=1, chances=chances), toy(PoC(), sizes=SIZES)
    shares = np.array(SIZES) / sum(SIZES) if chances == "size" else None
    for number in range(10):
        round = run.round("poc", sample=3, number=number)
        expected = draw_cohort(np.arange(6), 3, shares, round)
        assert select_poc(part, 3, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, number=number) == expected


def test_devices_report_the_mean_loss_of_their_batches():
    run = toy(PoC(), sizes=(2, 2), lr=1e-9)
    received, (row,) = run.params, run.play()
    for device in (0, 1):
        batch = run.session.loop.host.setup.samples(device).take_all()
        logits = (batch.inputs @ received["a.weight"].T + received["a.bias"]).relu()
        expected = cross_entropy(logits @ received["b.weight"].T + received["b.bias"], batch.targets[0][0])
        assert float(run.states["poc"]["loss"][device]) == pytest.approx(float(expected), rel=1e-6)
    assert run.states["poc"]["seen"].all() and row["poc.loss"] == pytest.approx(float(run.states["poc"]["loss"].mean()))


COMMON: dict[str, Any] = dict(devices=12, sample=3, rounds=6, split="dirichlet:0.5", eval_every=100, model="mlp")


def test_power_of_choice_meets_everyone_before_it_chooses(caplog):
    caplog.set_level("INFO", "shoal")
    history = shoal.run("poc(d=12)", **COMMON).history
    assert [tuple(d) for d in history["devices"]][:4] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    assert history["poc.known"] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert "size counts twice" in caplog.text


# oort -----------------------------------------------------------------------------------------------------------------
def test_the_utility_is_samples_times_the_root_of_the_mean_squared_loss():
    # losses 1 and 3: 2 sqrt((1 + 9) / 2)
    device = toy(Oort()).device(0, "oort")
    state = {"squares": torch.tensor(10.0), "samples": torch.tensor(2.0)}
    assert float(Oort().measure({}, state, device)["utility"]) == pytest.approx(4.472136, abs=1e-6)
    # of twenty samples that were trained on, each of the five counts once
    state = {"squares": torch.tensor(100.0), "samples": torch.tensor(20.0)}
    assert float(Oort().measure({}, state, device)["utility"]) == pytest.approx(5 * sqrt(5))


def test_squared_losses_leave_padding_out():
    # logits 0 and log 3: the losses are log(4 / 3) and log 4
    logits = torch.tensor([[0.0, log(3)], [0.0, log(3)], [5.0, 5.0]])
    batch = Batch(logits, ((torch.tensor([1, 0, 0]), None),), torch.tensor([1.0, 1.0, 0.0]))
    squares, samples = sum_squared_losses(CLASSIFY, logits, batch)
    assert float(squares) == pytest.approx(log(4 / 3) ** 2 + log(4) ** 2) and float(samples) == 2


def test_scores_by_hand():
    # utilities 1 and 9, round 10, last seen in rounds 5 and 10: (1 - 0.999) / 8.001 and 1, plus the bonus
    scores = score_devices(np.array([1.0, 9.0]), np.array([5.0, 10.0]), 10, clip=1.0)
    assert scores == pytest.approx([0.001 / 8.001 + 0.214597, 1 + sqrt(0.01 * log(10))], abs=1e-6)
    assert slow_down(np.array([5.0, 10.0, 20.0]), 10.0, 2.0).tolist() == [1.0, 1.0, 0.25]
    assert slow_down(np.array([5.0]), np.inf, 2.0).tolist() == [1.0], "nothing is known of times"


def test_doubling_all_times_changes_no_score():
    seconds = np.array([3.0, 8.0, 21.0])
    assert slow_down(2 * seconds, 16.0, 2.0) == pytest.approx(slow_down(seconds, 8.0, 2.0))


def test_the_largest_utilities_are_cut():
    scores = score_devices(np.array([1.0, 2.0, 3.0, 1000.0]), np.ones(4), 1, clip=0.5)
    assert scores[1:] == pytest.approx([(2 - 0.999) / 1.501, 1, 1]), "the median is 2.5"


def test_known_devices_are_drawn_from_those_near_the_score_that_would_do():
    scores = np.array([1.0, 0.9, 0.75, 0.6, 0.1])
    drawn = {tuple(sorted(draw_best(np.arange(5), scores, 2, np.random.default_rng(i), 0.7))) for i in range(60)}
    # 0.7 * 0.9 = 0.63
    assert drawn == {(0, 1), (0, 2), (1, 2)}
    assert sorted(draw_best(np.arange(5), scores, 9, np.random.default_rng(0), 0.7)) == [0, 1, 2, 3, 4]
    assert draw_best(np.arange(5), scores, 0, np.random.default_rng(0)) == []
    best = {d for i in range(60) for d in draw_best(np.arange(5), scores, 1, np.random.default_rng(i), among=3)}
    assert best == {0, 1, 2}


@pytest.mark.parametrize(
    "now, number, expected",
    [(100.0, 40, 15.0), (95.0, 40, 15.0), (150.0, 40, 10.0), (700.0, 40, 5.0), (100.0, 20, 10.0)],
)
def test_the_pace_follows_what_known_devices_gain(now, number, expected):
    state = {"gained": now, "gained_before": 100.0, "percentile": 10.0}
    assert Oort().set_pace(state, number) == {"gained": 0.0, "gained_before": now, "percentile": expected}


def test_oort_explores_first_and_then_chooses_less_of_the_new():
    common: dict[str, Any] = COMMON | {"rounds": 12}
    history = shoal.run("oort(explore=0.6, decay=0.5)", fleet="tiers:4:1:0.25", **common).history
    new = history["oort.new"]
    assert new[0] == 1.0 and new[-1] < 0.5 and all(len(devices) == 3 for devices in history["devices"])
    seconds = [value for value in history["oort.preferred_seconds"] if value is not None]
    assert len(seconds) == 11 and all(value > 0 for value in seconds)


def test_oort_prefers_quick_devices():
    common = COMMON | {"rounds": 25, "split": "iid", "devices": 9, "sample": 3}
    slow = [
        shoal.run(f"oort(alpha={a}, least=0.0)", fleet="tiers:4:0.25", **common).history["sim_seconds"]
        for a in (2.0, 0.0)
    ]
    assert sum(slow[0][10:]) < sum(slow[1][10:])


@pytest.mark.parametrize("part", [PoC(), Oort()], ids=str)
def test_two_that_select_are_refused(part: Part):
    with pytest.raises(ShoalError, match="which devices take part"):
        compose([part, Uniform()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: PoC(d=0),
        lambda: PoC(chances="loss"),
        lambda: Oort(alpha=-1.0),
        lambda: Oort(pace=0),
        lambda: Oort(clip=2.0),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="needs"):
        make()
