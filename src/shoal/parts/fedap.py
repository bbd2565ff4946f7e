"""FedAP: filters are pruned once, as many in each layer as curvature and weights allow.

Liu et al. 2024, arXiv:2408.05678: section 3.4 and Algorithm 3. Its symbols:

    p_k*, p*  the pruning rate that the curvature on device k allows (k = 0: the server), and their mean, formula (15)
    V, p_l*   the threshold on absolute weights, and the rate of layer l: the share of its weights below V
    R_l       the ranks of the feature maps of the filters in layer l
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.extras import Declaration
from shoal.core.measures.divergence import measure_label_degree
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Round
from shoal.core.wire import REQUEST
from shoal.parts.lib.checks import require, require_axes, require_curvature
from shoal.parts.lib.curvature import PRUNING_RATE, RULES, FlatLoss, estimate_pruning_rate
from shoal.parts.lib.filter_choice import choose_kept_filters, compute_layer_rates, list_filter_axes
from shoal.parts.lib.label_counts import LABEL_COUNTS, collect_label_counts, compute_known_degrees, count_labels
from shoal.parts.lib.unit_scores import UNIT_SCORES, average_neuron_scores, score_neurons

MANY = 10**9


@dataclass(frozen=True)
class FedAP(Part):
    """In one round filters are pruned for good, as many of each layer as curvature and weights allow.

    That is round `at`, the first being 1. Devices and the server report the rate that the curvature of their loss
    allows; its mean sets a threshold on weights, the threshold a rate for each layer, and of each layer the filters
    whose maps have the lowest rank go.

    `rule` is how a rate is found: `slq_plateau` and `eigen_gap` from the curvature on `samples` samples, after `steps`
    Lanczos steps, and `fixed` is p* = `rate`. `epsilon` is that of formula (15): the larger, the less the degree of a
    device's labels counts. Ranks are taken over `images` samples.
    """

    needs_server_model: ClassVar = True
    cite: ClassVar = ("liu2024feddumap",)
    needs_class_logits: ClassVar = True
    metrics: ClassVar = (
        Metric(
            "pruned_share",
            "share of the model that is pruned",
            "share",
            drawn=True,
            about="share of the parameters of the first model that this part has pruned",
        ),
    )
    reads: ClassVar = frozenset({"cards", "extras", "sizes"})
    neutral: ClassVar = Neutral({"rule": "fixed", "rate": 0.0})

    at: int = 30
    rule: str = "slq_plateau"
    rate: float = 0.378
    epsilon: float = 0.01
    samples: int = 100
    images: int = 500
    steps: int = 50

    def __post_init__(self):
        require(self, f"rule one of {', '.join(RULES)}", self.rule in RULES)
        require(self, "0 <= rate < 1 and epsilon > 0", 0 <= self.rate < 1 and self.epsilon > 0)
        counts = (self.at, self.samples, self.images, self.steps)
        require(self, "at, samples, images and steps from 1 up", all(0 < n < MANY for n in counts))

    def enrol(self, card: dict[str, Tensor], samples: Samples, net: Net) -> dict[str, Tensor]:
        return card | {"labels": count_labels(samples, net.classes)}

    def declare_card(self, net: Net) -> Declaration:
        return {"labels": LABEL_COUNTS}

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, list_filter_axes(round.net))
        if self.rule != "fixed":
            require_curvature(self, round.net)
        return {"done": False, "labels": collect_label_counts({}, round)}

    def is_pruning_due(self, state: Tree, round: Round) -> bool:
        """Whether this round prunes; a round that could not, because nobody replied, leaves it to the next one."""
        return not state["done"] and round.number + 1 >= self.at

    # Algorithm 3, lines 2-4: the rates p_k* ---------------------------------------------------------------------------
    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        """A request for p_k* in the round that prunes, and for ranks where the server has no samples."""
        requests = {} if self.rule == "fixed" else {"rate": REQUEST}
        requests |= {} if round.server is not None else {"scores": REQUEST}
        return ({d: dict(requests) for d in round.devices} if self.is_pruning_due(state, round) else {}), state

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        report: dict = {}
        if device.has_request("scores"):
            batch = device.samples.take_batch(device.samples.index[: self.images])
            report["scores"] = score_neurons(device.net, device.anchor, batch.inputs)
        if device.has_request("rate"):
            share = self.propose_rate(device.net, device.anchor, params, device.samples, device.generator("probe"))
            report |= {} if share is None else {"rate": torch.tensor(share, device=device.net.place)}
        return report

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"scores": UNIT_SCORES, "rate": PRUNING_RATE}

    def propose_rate(
        self, net: Net, start: Params, end: Params, samples: Samples, generator: torch.Generator
    ) -> float | None:
        """p_k*: the share of the model that the curvature on these samples lets go; None if that is not finite."""
        loss = FlatLoss(net, end, samples.take_batch(samples.index[: self.samples]))
        return estimate_pruning_rate(self.rule, loss, start, end, self.steps, generator)

    # lines 5-16: the threshold, the rates of the layers, the filters that stay ----------------------------------------
    def prune(self, plan: Plan, state: Tree, round: Round) -> tuple[Plan, Tree]:
        state = state | {"labels": collect_label_counts(state["labels"], round)}
        p_star = (
            self.average_proposed_rates(state, round) if self.is_pruning_due(state, round) and not plan.kept else None
        )
        ranks = None if p_star is None else self.score_filters(round)
        if p_star is None or ranks is None:
            round.tell("pruned_share", state.get("pruned", 0.0))
            return plan, state
        rates = compute_layer_rates(round.net, round.params, p_star)
        kept = choose_kept_filters(round.net, round.params, ranks, rates)
        plan = replace(plan, kept=dict(plan.kept) | kept)
        left = round.net.slicer.take(round.params, plan)
        pruned = 1 - count_elements(left) / count_elements(round.params)
        round.tell("pruned_share", pruned)
        return plan, state | {"done": True, "pruned": pruned}

    def average_proposed_rates(self, state: Tree, round: Round) -> float | None:
        """p* = sum_k a_k p_k* / sum_k a_k, a_k = n_k / (D(P_k) + epsilon), formula (15); None without any p_k*.

        The sums run over the devices of this round and the server; the others would have to be sent the model first.
        """
        if self.rule == "fixed":
            return self.rate
        reports = [(r, r.report.get(self.name(), {})) for r in round.replies if r.device != SERVER]
        rates = [(r.device, r.size, float(report["rate"])) for r, report in reports if "rate" in report]
        labels = state["labels"]
        degrees = compute_known_degrees(labels, [device for device, _, _ in rates])[0]
        if round.server is not None:
            generator = torch.Generator().manual_seed(int(round.generator("server").integers(2**62)))
            share = self.propose_rate(round.net, round.anchor, round.params, round.server, generator)
            if share is not None:
                server_labels = count_labels(round.server, round.net.classes).double().numpy()
                all_labels = sum((counts.cpu().numpy() for counts in labels.values()), np.zeros(len(server_labels)))
                rates.append((SERVER, len(round.server), share))
                degrees.append(measure_label_degree(server_labels, all_labels))
        weights = [size / (degree + self.epsilon) for (_, size, _), degree in zip(rates, degrees)]
        return sum(w * p for w, (_, _, p) in zip(weights, rates)) / sum(weights) if rates else None

    def score_filters(self, round: Round) -> dict[str, Tensor] | None:
        """R_l of each layer (line 12): on the server's samples, or the mean over devices; None without either."""
        if round.server is not None:
            inputs = round.server.take_batch(round.server.index[: self.images]).inputs
            return score_neurons(round.net, round.params, inputs)
        reports = [(r, r.report.get(self.name(), {})) for r in round.replies]
        scores = [(r.size, report["scores"], r.plan) for r, report in reports if "scores" in report]
        return average_neuron_scores(scores, {}) if scores else None


def count_elements(params: Params) -> int:
    return sum(value.numel() for value in params.values())
