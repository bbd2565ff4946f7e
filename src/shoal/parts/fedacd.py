"""FedACD: local models are trained to serve all classes equally well, and count by how far they do.

Zhou et al. 2025, "Enhancing the Performance of Global Model by Improving the Adaptability of Local Models in Federated
Learning". Its symbols:

    p, q     the prediction for a sample, and the one with the same p_y whose other classes are alike, eq. (7)
    P, Delta the class matrix (P_ij: mean probability of class j for samples of class i), and Delta_yi = P_yi / P_iy
    L_1, L_2 the terms of the local loss, eq. (7) and (8); L = L_1 + lambda L_2, eq. (9)
    Q, V     the template matrix (tau on its diagonal, the rest alike), and the weight of a reply, eq. (10)
"""

from dataclasses import dataclass, replace
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.errors import ShoalError
from shoal.core.extras import Declaration, Extra
from shoal.core.measures.confusion import (
    average_class_rows,
    compute_class_matrix,
    encode_one_hot,
    measure_class_divergence,
    sum_by_class,
)
from shoal.core.metric import Metric
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.checks import require

CADENCES = ("epoch", "batch_ema", "round")


@dataclass(frozen=True)
class FedACD(Part):
    """The local loss makes all classes err alike, and a reply counts by its adaptability V.

    L_1 spreads the probability of the wrong classes evenly. L_2 asks for a larger margin from a class y to a class i
    for which y is mistaken more often than i for y.

    `lam` is lambda. `cadence` is when the class matrix is renewed: after each `epoch`, in every batch as a moving
    average that keeps the share `ema` (`batch_ema`), or once a `round`. `missing` is Delta_yi for a class i that the
    device does not have. `tau` is the diagonal of Q, `reduce` whether the divergence from Q is the `mean` or the `sum`
    over classes. `weights` are V (`adaptability`) or all alike (`uniform`).
    """

    cite: ClassVar = ("zhou2025fedacd",)
    needs_class_logits: ClassVar = True
    metrics: ClassVar = (
        Metric(
            "v",
            "adaptability V, mean over devices",
            drawn=True,
            when="unless `weights` is `uniform`",
            about="mean of V over the devices that replied, from 1/2 to 1",
        ),
    )
    reads: ClassVar = frozenset({"extras"})
    sets: ClassVar = frozenset({"weigh"})
    replaces_loss: ClassVar = True
    mixes_batch: ClassVar = True

    lam: float = 1.0
    cadence: str = "epoch"
    ema: float = 0.9
    missing: float = 1e-3
    tau: float = 1 - 1e-5
    reduce: str = "mean"
    weights: str = "adaptability"

    def __post_init__(self):
        require(self, "lam >= 0 and 0 <= ema <= 1", self.lam >= 0 and 0 <= self.ema <= 1)
        require(self, "0 < missing and 0 < tau < 1", self.missing > 0 and 0 < self.tau < 1)
        require(self, f"cadence in {CADENCES}", self.cadence in CADENCES)
        require(self, "reduce in ('mean', 'sum')", self.reduce in ("mean", "sum"))
        known = ("adaptability", "uniform")
        require(self, f"weights in {known}", self.weights in known)

    def model(self, net: Net) -> Net:
        has_positions = net.forward(net.initial, net.make_example_inputs(1))[0].dim() > 2
        if net.token_inputs or has_positions or net.classes < 2:
            found = "words" if net.token_inputs else "several targets per sample" if has_positions else "one class"
            problem = f"fedacd compares every class with every other one, and the task has {found}."
            raise ShoalError("bad-part", problem, "Use it to tell two or more classes apart, or leave it out.")
        return replace(net, module=copy_module(net))  # of the module that was called, other parts see no parameters

    # on a device: the local loss, eq. (7)-(9) -------------------------------------------------------------------------
    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        """P of the received model, and which classes the device has."""
        matrix, counts = compute_class_matrix(device.net, params, device.samples)
        zero = torch.zeros_like(counts[0])
        state = {"matrix": matrix, "there": counts > 0, "epoch": zero}
        return params, state | {"sums": torch.zeros_like(matrix), "counts": torch.zeros_like(counts)}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        """L = L_1 + lambda L_2, eq. (9); L_2 is the cross-entropy of the logits f_i + log Delta_yi, eq. (8)."""
        margins = self.compute_margins(roll_class_matrix(local.state, local)["matrix"], local.state["there"])

        def score_with_margins(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            total = torch.zeros_like(scored.loss)
            for targets, weight in batch.targets:
                l2 = local.net.task.compute_sample_losses(scored.logits + margins[targets], targets)
                losses = compute_evenness_loss(scored.logits, targets) + self.lam * l2
                total = total + batch.mean(losses if weight is None else losses * weight)
            sums, counts = sum_by_class(scored.logits, batch)
            return scored._replace(loss=total, aux=scored.aux | {"fedacd sums": sums, "fedacd counts": counts})

        return score_with_margins

    def compute_margins(self, matrix: Tensor, there: Tensor) -> Tensor:
        """log Delta_yi = log(P_yi / P_iy), row y and column i; log(`missing`) for a class i that the device has not.

        Probabilities below 1e-6 and logarithms beyond 8 are clamped: they come from few samples and would drown the
        logits.
        """
        logs = matrix.clamp(1e-6, 1).log()
        small = (logs.new_ones(()) * self.missing).log()
        between = torch.where(there, (logs - logs.T).clamp(-8, 8), small)
        return between * (1 - torch.eye(len(logs), dtype=logs.dtype, device=logs.device))

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        """P renewed as `cadence` says, from the outputs that training computes anyway."""
        sums, counts = scored.aux["fedacd sums"], scored.aux["fedacd counts"]
        if self.cadence == "round":
            return update, state
        if self.cadence == "batch_ema":
            new = average_class_rows(sums, counts, state["matrix"])
            return update, state | {"matrix": self.ema * state["matrix"] + (1 - self.ema) * new}
        state = roll_class_matrix(state, local)
        return update, state | {"sums": state["sums"] + sums, "counts": state["counts"] + counts}

    # the weight of a reply, eq. (10) and (11) -------------------------------------------------------------------------
    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        """V of the trained model."""
        if self.weights == "uniform":
            return {}
        matrix, counts = compute_class_matrix(device.net, params, device.samples)
        return {"v": compute_adaptability(measure_class_divergence(matrix, counts, self.tau, self.reduce))}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        score = Extra(low=0, high=1, about="how well the trained model serves all classes alike")
        return {} if self.weights == "uniform" else {"v": score}

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        """V_m / sum V_k, eq. (11), whatever the numbers of samples."""
        scores = [reply.report.get(self.name(), {}).get("v", 1.0) for reply in round.replies]
        return torch.tensor([float(v) for v in scores], dtype=weights.dtype), state


def roll_class_matrix(state: Tree, local: Local) -> Tree:
    """The state at the start of this step: in the first one of an epoch, the last epoch's outputs are the matrix."""
    new = local.numbers["epoch"] > state["epoch"]
    matrix = torch.where(new, average_class_rows(state["sums"], state["counts"], state["matrix"]), state["matrix"])
    kept = {k: torch.where(new, torch.zeros_like(state[k]), state[k]) for k in ("sums", "counts")}
    return state | kept | {"matrix": matrix, "epoch": torch.maximum(state["epoch"], local.numbers["epoch"])}


def compute_evenness_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """L_1 of each sample, eq. (7): KL(p || q) = sum over i != y of p_i log(p_i (C - 1) / (1 - p_y)), from logits.

    log(1 - p_y) as a sum over the other classes stays finite when p_y comes to 1.
    """
    classes = logits.shape[-1]
    true = encode_one_hot(targets, classes)
    rest = logits.masked_fill(true, -torch.inf).logsumexp(-1, keepdim=True)
    wrong = logits.softmax(-1).masked_fill(true, 0)
    return (wrong * (logits - rest + log(classes - 1))).sum(-1)


def compute_adaptability(distance: Tensor) -> Tensor:
    """V = sigmoid(1 / KL(P || Q)), eq. (10), between 1/2 and 1; the clamp keeps 1 / KL finite."""
    return torch.sigmoid(1 / distance.clamp(min=1e-6))
