"""Schedules of the learning rate: numbers by hand, and those of torch.optim.lr_scheduler."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shoal.core.errors import ShoalError
from shoal.core.lr_schedule import LrSchedule
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_optimiser import make_round_lr, parse_lr_schedule

T = 12


def list_torch_factors(make, steps: int = T) -> list[float]:
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, factors = make(sgd), []
    for _ in range(steps):
        factors.append(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    return factors


def warm_up(sgd, after, steps: int = 4):
    rise = lr_scheduler.LinearLR(sgd, 1 / steps, 1.0, steps - 1)
    return lr_scheduler.SequentialLR(sgd, [rise, after(sgd)], [steps])


@pytest.mark.parametrize(
    "schedule, make",
    [
        (LrSchedule("cosine"), lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, T)),
        (LrSchedule("cosine", end=0.1), lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, T, 0.1)),
        (LrSchedule("linear", end=0.2), lambda sgd: lr_scheduler.LinearLR(sgd, 1.0, 0.2, T)),
        (LrSchedule("linear", 5, 0.2), lambda sgd: lr_scheduler.LinearLR(sgd, 1.0, 0.2, 5)),
        (LrSchedule("step", 5, 0.1), lambda sgd: lr_scheduler.StepLR(sgd, 5, 0.1)),
        (
            LrSchedule("cosine", warmup=4),
            lambda sgd: warm_up(sgd, lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, T - 4)),
        ),
        (
            LrSchedule("linear", 10, 0.5, 4),
            lambda sgd: warm_up(sgd, lambda sgd: lr_scheduler.LinearLR(sgd, 1.0, 0.5, 10 - 4)),
        ),
        (
            LrSchedule("step", 3, 0.5, 4),
            lambda sgd: warm_up(sgd, lambda sgd: lr_scheduler.StepLR(sgd, 3, 0.5)),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, LrSchedule) else "torch",
)
def test_factors_are_those_of_torch(schedule, make):
    assert schedule.list_factors(T) == pytest.approx(list_torch_factors(make), abs=1e-12)


@pytest.mark.parametrize(
    "schedule, factors",
    [
        (LrSchedule(), [1, 1, 1, 1]),
        (LrSchedule("linear"), [1, 0.75, 0.5, 0.25]),
        (LrSchedule("linear", 2, 0.5), [1, 0.75, 0.5, 0.5]),
        (LrSchedule("cosine"), [1, 0.5 + 0.5**0.5 / 2, 0.5, 0.5 - 0.5**0.5 / 2]),
        (LrSchedule("cosine", 2, 0.1), [1, 0.55, 0.1, 0.1]),
        (LrSchedule("step", 2, 0.1), [1, 1, 0.1, 0.1]),
        (LrSchedule(warmup=2), [0.5, 1, 1, 1]),
        (LrSchedule("linear", warmup=2), [0.5, 1, 1, 0.5]),
        (LrSchedule("cosine", warmup=9), [1 / 9, 2 / 9, 3 / 9, 4 / 9]),
    ],
    ids=str,
)
def test_factors_by_hand(schedule, factors):
    assert schedule.list_factors(4) == pytest.approx(factors)
    assert schedule.sum_factors(4) == pytest.approx(sum(factors))


def test_a_schedule_in_tensors_is_the_one_in_numbers():
    schedule = LrSchedule("cosine", end=0.1, warmup=2)
    numbers = {"lr": torch.tensor(0.5), "steps": torch.tensor(6.0)}
    rates = [float(schedule.scale_lr(numbers | {"step": torch.tensor(float(s))})["lr"]) for s in range(6)]
    assert rates == pytest.approx([0.5 * f for f in schedule.list_factors(6)])
    assert schedule.scale_lr(numbers | {"step": torch.tensor(0.0)})["lr"].shape == ()


def test_learning_rates_over_rounds():
    plain = make_round_lr(Recipe(lr=0.5, lr_decay=0.1))
    assert [plain(r) for r in range(3)] == [0.5, 0.5 * 0.1, 0.5 * 0.1**2]
    cosine = make_round_lr(Recipe(lr=0.5, lr_schedule="cosine:4:0.1", rounds=2))
    assert [cosine(r) for r in (0, 2, 4, 9)] == pytest.approx([0.5, 0.5 * 0.55, 0.05, 0.05])
    both = make_round_lr(Recipe(lr=1.0, lr_decay=0.5, lr_schedule="step:2:0.1", lr_warmup=1))
    assert [both(r) for r in range(4)] == pytest.approx([1.0, 0.5, 0.25, 0.125 * 0.1])


def test_texts_of_schedules():
    assert parse_lr_schedule("local_lr_schedule", "cosine") == LrSchedule("cosine")
    assert parse_lr_schedule("lr_schedule", "linear: 20 :0.5", 3) == LrSchedule("linear", 20, 0.5, 3)
    assert parse_lr_schedule("lr_schedule", "") == LrSchedule()
    with pytest.raises(ShoalError, match="no schedule"):
        LrSchedule("step")


def test_schedules_change_the_fingerprint_and_their_absence_does_not():
    assert Recipe(lr_schedule="cosine:5").fingerprint() != Recipe().fingerprint()
    assert Recipe(optimiser="adamw").fingerprint() != Recipe().fingerprint()
