"""The laws of a part with other learning tasks than classification: it trains alike everywhere, or is refused."""

from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.builtin_tasks import TASKS
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.learning_task import LearningTask
from shoal.core.part import Part
from shoal.plugins.smoke_run import (
    SHARED,
    SmokeSetup,
    build_tiny_net,
    build_tiny_run,
    build_tiny_text_net,
    make_tiny_setup,
)
from shoal.testing.laws import check_engines_agree, check_padding_leaves_no_trace, list_engines


def compute_pairwise_loss(outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """The logistic loss of each sample against all of its batch with a smaller target; padding is in no pair."""
    score, value = outputs[:, 0], targets[:, 0]
    pairs = (value[:, None] > value).to(score.dtype) * weight
    return (pairs * torch.nn.functional.softplus(score - score[:, None])).sum(1)


RANK = LearningTask("rank", compute_pairwise_loss, outputs=1, mixes_batch=True)
"""A task whose loss of a batch is no mean over samples."""
OTHER_TASKS: dict[str, LearningTask] = {name: task for name, task in TASKS.items() if name != "classify"} | {
    "rank": RANK
}
"""What parts are tried with beside classification."""


def make_task_setup(task: LearningTask, *parts: Part, samples: int = sum(list_engines()[0]) + SHARED) -> SmokeSetup:
    """The tiny model that the parts can train with the outputs of a task, and random samples."""
    plain = make_tiny_setup(samples, *parts)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(samples, 2, generator=generator, dtype=torch.float64)
    outputs, is_text = task.outputs or 2, plain.net.token_inputs
    net = build_tiny_text_net(outputs, task.name != "tokens") if is_text else build_tiny_net(outputs)
    net, inputs, targets = replace(net, task=task), plain.inputs, numbers
    match task.name:
        case "tokens" if is_text:
            targets = inputs % 2
        case "tokens":
            inputs = torch.randn(samples, 3, 4, generator=generator, dtype=torch.float64)
            net, targets = replace(net, input_shape=(3, 4)), (inputs.sum(-1) > 0).long()
        case "binary":
            targets = (numbers[:, 0] > 0).double()
        case "multilabel":
            targets = (numbers > 0).double()
    return SmokeSetup(net, inputs, targets, kind=f"tiny {task.name}")


def check_part_on_task(part: Part, task: LearningTask) -> None:
    """A part trains to the same numbers on all engines and leaves padding out, or is refused by name and task."""
    setting = make_task_setup(task, part)
    try:
        loop, net = build_tiny_run(Method((part,)), setting=setting)
        loop.start(net)
    except ShoalError as error:
        assert part.name() in str(error) and error.advice, str(error)
        return
    assert task.has_class_logits or not part.needs_class_logits, f"{part} needs classes and is not refused"
    check_engines_agree(part, whole=False, setting=setting, forks=False)
    check_padding_leaves_no_trace(part, setting)
