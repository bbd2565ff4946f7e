"""FedAP: one pruning of filters, as deep in each layer as curvature and weights allow (Liu et al. 2024, 2408.05678)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.measures.divergence import measure_label_degree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Round, Samples
from shoal.core.wire import REQUEST
from shoal.parts.lib.checks import require, require_axes, require_curvature
from shoal.parts.lib.curvature import RULES, FlatLoss, estimate_pruning_rate
from shoal.parts.lib.filter_choice import choose_kept_filters, compute_layer_rates, list_filter_axes
from shoal.parts.lib.label_counts import collect_label_counts, compute_known_degrees, count_labels
from shoal.parts.lib.unit_scores import average_neuron_scores, score_neurons

MANY = 10**9


@dataclass(frozen=True)
class FedAP(Part):
    """In round `at` filters go for good, as many as curvature and weights allow.

    Devices and the server say which share of the model the curvature of their loss lets go; the mean of these, by
    samples and likeness of labels, sets a threshold on weights, the threshold a rate for each layer, and of each layer
    the filters with maps of the lowest rank go.
    """

    cite: ClassVar = ("liu2024feddumap",)
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

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, list_filter_axes(round.net))
        if self.rule != "fixed":
            require_curvature(self, round.net)
        return {"done": False, "labels": collect_label_counts({}, round)}

    def is_pruning_due(self, state: Tree, round: Round) -> bool:
        return not state["done"] and round.number + 1 >= self.at

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        asked = {} if self.rule == "fixed" else {"rate": REQUEST}
        asked |= {} if round.server is not None else {"scores": REQUEST}
        return ({d: dict(asked) for d in round.devices} if self.is_pruning_due(state, round) else {}), state

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        found: dict = {}
        if device.has_request("scores"):
            batch = device.samples.take_batch(device.samples.index[: self.images])
            found["scores"] = score_neurons(device.net, device.anchor, batch.inputs)
        if device.has_request("rate"):
            share = self.propose_rate(device.net, device.anchor, params, device.samples, device.generator("probe"))
            found |= {} if share is None else {"rate": torch.tensor(share, device=device.net.place)}
        return found

    def propose_rate(
        self, net: Net, start: Params, end: Params, samples: Samples, generator: torch.Generator
    ) -> float | None:
        """How much of a model the loss on these samples says can go; None where it says nothing."""
        loss = FlatLoss(net, end, samples.take_batch(samples.index[: self.samples]))
        return estimate_pruning_rate(self.rule, loss, start, end, self.steps, generator)

    def prune(self, plan: Plan, state: Tree, round: Round) -> tuple[Plan, Tree]:
        state = state | {"labels": collect_label_counts(state["labels"], round)}
        wanted = (
            self.average_proposed_rates(state, round) if self.is_pruning_due(state, round) and not plan.kept else None
        )
        ranks = None if wanted is None else self.score_filters(round)
        if wanted is None or ranks is None:
            return plan, state
        rates = compute_layer_rates(round.net, round.params, wanted)
        kept = choose_kept_filters(round.net, round.params, ranks, rates)
        return replace(plan, kept=dict(plan.kept) | kept), state | {"done": True}

    def average_proposed_rates(self, state: Tree, round: Round) -> float | None:
        """The rate of all who told one, weighed by samples over the degree of their labels; None where nobody did."""
        if self.rule == "fixed":
            return self.rate
        told = [(r, r.report.get(self.name(), {})) for r in round.replies if r.device != SERVER]
        known = [(r.device, r.size, float(own["rate"])) for r, own in told if "rate" in own]
        labels = state["labels"]
        degrees = compute_known_degrees(labels, [device for device, _, _ in known])[0]
        if round.server is not None:
            generator = torch.Generator().manual_seed(int(round.generator("server").integers(2**62)))
            share = self.propose_rate(round.net, round.anchor, round.params, round.server, generator)
            if share is not None:
                own = count_labels(round.server, round.net.classes).double().numpy()
                everybody = sum((theirs.cpu().numpy() for theirs in labels.values()), np.zeros(len(own)))
                known.append((SERVER, len(round.server), share))
                degrees.append(measure_label_degree(own, everybody))
        weights = [size / (degree + self.epsilon) for (_, size, _), degree in zip(known, degrees)]
        return sum(w * own for w, (_, _, own) in zip(weights, known)) / sum(weights) if known else None

    def score_filters(self, round: Round) -> dict[str, Tensor] | None:
        """How much each unit's maps say: on the server's samples, or as devices report it."""
        if round.server is not None:
            inputs = round.server.take_batch(round.server.index[: self.images]).inputs
            return score_neurons(round.net, round.params, inputs)
        told = [(r, r.report.get(self.name(), {})) for r in round.replies]
        reports = [(r.size, own["scores"], round.plans[r.device]) for r, own in told if "scores" in own]
        return average_neuron_scores(reports, {}) if reports else None
