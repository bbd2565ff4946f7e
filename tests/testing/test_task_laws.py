"""The laws over learning tasks: every part meets a task that is no classification, and all that parts do all tasks."""

import pytest
from covering import choose_few, list_traits

from shoal.core.part import Part
from shoal.parts import find_shipped_parts
from shoal.testing.task_laws import OTHER_TASKS, check_part_on_task

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
