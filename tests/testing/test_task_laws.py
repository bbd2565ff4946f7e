"""The laws over learning tasks: every part meets a task that is no classification, and all that parts do all tasks."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from covering import choose_few, list_traits

from shoal.core import compose
from shoal.core.part import Part
from shoal.parts import find_shipped_parts
from shoal.testing.task_laws import OTHER_TASKS, check_part_on_task, compute_pairwise_loss

PARTS = [cls() for cls in find_shipped_parts().values()]


def cover_tasks() -> list[tuple[Part, str]]:
    """So few pairs of a part and a task that every part is in one, and every trait of a part meets every task."""

    def list_meetings(part: Part, task: str) -> set:
        refused = part.needs_class_logits and not OTHER_TASKS[task].has_class_logits
        if refused:
            return {(part.name(), "refused")}
        return {part.name(), *((trait, task) for trait in list_traits(part))}

    return choose_few(((part, task), list_meetings(part, task), 1) for part in PARTS for task in OTHER_TASKS)


def try_pair(part: Part, task: str) -> None:
    try:
        check_part_on_task(part, OTHER_TASKS[task])
    except Exception as error:
        raise AssertionError(f"{part} with the task {task}") from error


@pytest.mark.parametrize("task", OTHER_TASKS)
def test_tasks_that_cover(task: str):
    for part, chosen in cover_tasks():
        if chosen == task:
            try_pair(part, task)


@pytest.mark.whole
@pytest.mark.parametrize("task", OTHER_TASKS)
def test_every_task(task: str):
    for part in PARTS:
        try_pair(part, task)


# the laws bite --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CountsPadding(Part):
    """Takes the plain mean of the outputs of a batch, which padding changes."""

    replaces_loss: ClassVar = True

    def objective(self, inner, local):
        def score(params, batch):
            scored = inner(params, batch)
            return scored._replace(loss=scored.logits.square().mean())

        return score


@dataclass(frozen=True)
class TakesTargetsForClasses(Part):
    """Works on a logit for each class, and does not say so."""

    def objective(self, inner, local):
        def score(params, batch):
            scored, targets = inner(params, batch), batch.targets[0][0]
            return scored._replace(loss=scored.loss + torch.nn.functional.cross_entropy(scored.logits, targets))

        return score


@pytest.mark.parametrize("task", OTHER_TASKS)
def test_padding_that_counts_is_found_with_every_task(task: str):
    with pytest.raises(AssertionError, match="padding"):
        check_part_on_task(CountsPadding(), OTHER_TASKS[task])


def test_a_part_that_needs_classes_and_does_not_say_so_is_found():
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        check_part_on_task(TakesTargetsForClasses(), OTHER_TASKS["binary"])


def test_a_part_that_is_not_refused_is_found(monkeypatch):
    monkeypatch.setattr(compose, "refuse_task", lambda *_: None)
    with pytest.raises(AssertionError, match="needs classes and is not refused"):
        check_part_on_task(find_shipped_parts()["balanced_softmax"](), OTHER_TASKS["regress"])


def test_devices_with_a_loss_that_counts_padding_train_without_any(caplog):
    task = replace(OTHER_TASKS["rank"], loss=lambda o, t, weight: compute_pairwise_loss(o, t, torch.ones_like(weight)))
    check_part_on_task(find_shipped_parts()["fedprox"](), task)
    assert "the loss of a sample depends on the batch that it is in" in caplog.text
