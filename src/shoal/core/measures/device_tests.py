"""Metrics of models on the devices' own test samples: one model for all, or each device's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from shoal.core.batch import Samples
from shoal.core.learning_task import LearningTask
from shoal.core.measures.evaluate import choose_chunk_size
from shoal.core.metric import DEVICE_TESTS, Metric
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.tree import Params

MAX_STACKED_DEVICES = 64
MAX_STACKED_BYTES = 2**29
"""How many models, and bytes of them, are judged in one call."""


@dataclass(frozen=True, eq=False)
class DeviceScores:
    """How devices did on their own test samples: by device the sum of a metric, of the loss, and what they are over."""

    devices: tuple[int, ...]
    sums: np.ndarray
    counts: np.ndarray
    """Over how many targets `sums` are: samples, or positions of sequences."""
    losses: np.ndarray
    samples: np.ndarray
    better: str = "up"

    @property
    def values(self) -> np.ndarray:
        """One mean per device."""
        return self.sums / np.maximum(self.counts, 1)

    def summarise(self) -> dict[str, float]:
        """The columns of a row: means over devices and over samples, the worst tenth, the spread, the loss."""
        if not len(self.devices):
            return {}
        ranked = np.sort(self.values) if self.better == "up" else -np.sort(-self.values)
        ranked = np.roll(ranked, np.isnan(ranked).sum())  # sorted to the end, and worse than any number
        return {
            "personal_mean": float(ranked.mean()),
            "personal_pooled": float(self.sums.sum() / max(self.counts.sum(), 1)),
            "personal_worst": float(ranked[: max(1, len(ranked) // 10)].mean()),
            "personal_spread": float(ranked.std()),
            "personal_loss": float(self.losses.sum() / max(self.samples.sum(), 1)),
            "personal_devices": len(self.devices),
        }


def find_judged_metric(task: LearningTask) -> Metric:
    """What devices are judged by: the headline of the task where it is a mean over samples, else the loss."""
    metric = next(m for m in task.metrics if m.name == task.headline)
    is_mean = metric.judge is not None or (metric.name == "accuracy" and task.predict_classes is not None)
    return metric if is_mean else next(m for m in task.metrics if m.name == "loss")


def list_device_test_metrics(task: LearningTask) -> dict[str, Metric]:
    """The metrics of devices' own tests by column, with the unit and the direction that the task gives them."""
    judged, found = find_judged_metric(task), {}
    for metric in DEVICE_TESTS:
        if metric.name in ("personal_loss", "personal_devices"):
            found[metric.name] = metric
            continue
        title = metric.title.replace("accuracy", judged.title.removeprefix("test "))
        better = "down" if metric.name == "personal_spread" else judged.better
        found[metric.name] = replace(metric, title=title, unit=judged.unit, better=better)
    return found


def judge_samples(task: LearningTask, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each sample: the sum of what it is judged by over its targets, how many those are, and the loss."""
    metric, losses = find_judged_metric(task), task.compute_sample_losses(outputs, targets).double()
    if metric.judge is not None:
        values, counted = metric.judge(outputs, targets), torch.ones_like(targets, dtype=torch.bool)
    elif metric.name == "accuracy" and task.predict_classes:
        labels = targets.long()
        values, counted = task.predict_classes(outputs) == labels, torch.ones_like(labels, dtype=torch.bool)
        if task.skips_padding:
            counted = labels >= 0
    else:
        return losses, torch.ones_like(losses), losses
    by_sample = len(targets), -1
    sums = (values.double() * counted).reshape(by_sample).sum(1)
    return sums, counted.double().reshape(by_sample).sum(1), losses


@torch.no_grad()
def score_one_model(net: Net, params: Params, tests: Mapping[int, Samples]) -> DeviceScores:
    """One model on the test samples of all devices, which are judged together."""
    if net.task.mixes_batch or not tests:
        return score_one_by_one(net, dict.fromkeys(tests, params), tests)
    samples = next(iter(tests.values()))
    index = torch.cat([own.index for own in tests.values()])
    sizes = torch.tensor([len(own) for own in tests.values()])
    owners = torch.repeat_interleave(torch.arange(len(tests)), sizes).to(net.place)
    totals = torch.zeros(3, len(tests), dtype=torch.float64, device=net.place)
    chunk = choose_chunk_size(replace(samples, index=index), net)
    for rows, owner in zip(index.split(chunk), owners.split(chunk)):
        batch = samples.take_batch(rows)
        judged = judge_samples(net.task, net.forward(params, batch.inputs)[0], batch.targets[0][0])
        totals.index_add_(1, owner, torch.stack(judged))
    return make_scores(net.task, tests, totals)


def score_own_models(net: Net, make_params: Callable[[int], Params], tests: Mapping[int, Samples]) -> DeviceScores:
    """Every device's own model on its test samples, many of them in one call where that pays and the model allows."""
    size = max(1, tree.count_tree_bytes(net.initial))
    width = min(MAX_STACKED_DEVICES, MAX_STACKED_BYTES // size) if can_stack(net) else 1
    if width < 2:
        return score_one_by_one(net, {device: make_params for device in tests}, tests)
    totals, devices = {}, sorted(tests, key=lambda d: len(tests[d]))
    for start in range(0, len(devices), width):
        group = devices[start : start + width]
        params, own = [make_params(device) for device in group], [tests[device] for device in group]
        try:
            judged = judge_stack(net, params, own)
        except RuntimeError:  # an operation that cannot be vectorised, or too little memory
            judged = torch.stack([judge_alone(net, p, samples) for p, samples in zip(params, own)], 1)
        totals |= dict(zip(group, judged.unbind(1)))
    return make_scores(net.task, tests, torch.stack([totals[device] for device in tests], 1))


def can_stack(net: Net) -> bool:
    """Whether models are judged side by side: convolutions of several models are slow on a processor."""
    slow = (_ConvNd, nn.RNNBase) if net.place.type == "cpu" else (nn.RNNBase,)
    return not net.task.mixes_batch and not any(isinstance(m, slow) for m in net.module.modules())


@torch.no_grad()
def judge_stack(net: Net, params: Sequence[Params], tests: Sequence[Samples]) -> Tensor:
    """Sums, counts and losses of models on a test each, in one call for a chunk of all; tests are padded."""
    stacked = {k: torch.stack([own[k] for own in params]) for k in params[0]}
    longest, totals = max(map(len, tests)), torch.zeros(3, len(params), dtype=torch.float64, device=net.place)
    chunk = max(1, choose_chunk_size(tests[0], net) // len(params)) if net.place.type != "cpu" else 64
    padded = torch.stack([torch.cat([t.index, t.index[:1].expand(longest - len(t))]) for t in tests])
    live = torch.arange(longest) < torch.tensor([len(t) for t in tests]).unsqueeze(1)
    run_models = torch.func.vmap(lambda own, inputs: net.forward(own, inputs)[0])
    try:
        for rows, counted in zip(padded.split(chunk, 1), live.split(chunk, 1)):
            batch, shape = tests[0].take_batch(rows.flatten()), rows.shape
            inputs = tree.map_tensors(lambda t: t.unflatten(0, shape), batch.inputs)
            judged = judge_samples(net.task, run_models(stacked, inputs).flatten(0, 1), batch.targets[0][0])
            counts = counted.to(net.place)
            totals += torch.stack([(value.unflatten(0, shape) * counts).sum(1) for value in judged])
    finally:
        net.reset_slots()
    return totals


def score_one_by_one(
    net: Net, models: Mapping[int, Params | Callable[[int], Params]], tests: Mapping[int, Samples]
) -> DeviceScores:
    """Every device by itself; a model may be made when its turn comes."""
    judged = []
    for device, samples in tests.items():
        params = models[device]
        judged.append(judge_alone(net, params(device) if callable(params) else params, samples))
    return make_scores(net.task, tests, torch.stack(judged, 1) if judged else torch.zeros(3, 0))


@torch.no_grad()
def judge_alone(net: Net, params: Params, samples: Samples) -> Tensor:
    """Sum, count and loss of one model on one test."""
    totals = torch.zeros(3, dtype=torch.float64, device=net.place)
    for rows in samples.index.split(choose_chunk_size(samples, net)):
        batch = samples.take_batch(rows)
        judged = judge_samples(net.task, net.forward(params, batch.inputs)[0], batch.targets[0][0])
        totals += torch.stack(judged).sum(1)
    return totals


def make_scores(task: LearningTask, tests: Mapping[int, Samples], totals: Tensor) -> DeviceScores:
    """The scores from their totals: sums, counts and losses, a column for each device."""
    sums, counts, losses = totals.cpu().numpy()
    samples = np.array([len(own) for own in tests.values()])
    return DeviceScores(tuple(tests), sums, counts, losses, samples, find_judged_metric(task).better)
