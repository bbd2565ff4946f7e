"""What a pass through a model costs as a function of its widths: no layer multiplies more than two of them.

So a few counts of cut-out models give the cost of every other one without cutting it. It is looked at before it is
trusted: where it does not give the costs that were counted, it is not used.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from shoal.core.model.module_copy import copy_module
from shoal.core.model.plan import Plan

if TYPE_CHECKING:
    from shoal.core.model.net import Net


class FlopsByWidth:
    """Multiply-accumulates of one sample, as a polynomial of the second degree around the full widths."""

    def __init__(self, net: "Net"):
        self.net = replace(net, module=copy_module(net).to("meta"))
        self.full = self.count_cut_model({})
        sizes = {axis.name: axis.size for axis in net.axes}
        self.slopes = {a: self.full - self.count_cut_model({a: 1}) for a in sizes if sizes[a] > 1}
        self.bends = {
            a: self.full - 2 * self.count_cut_model({a: 1}) + self.count_cut_model({a: 2})
            for a in sizes
            if sizes[a] > 2
        }
        self.pairs = {
            (a, b): self.count_cut_model({a: 1, b: 1}) - self.full + self.slopes[a] + self.slopes[b]
            for a, b in combinations(self.slopes, 2)
        }

    def count_cut_model(self, less: Mapping[str, int]) -> int:
        """The cost with so many units less of some axes, by cutting the model."""
        kept = {a.name: torch.arange(a.size - less[a.name]) for a in self.net.axes if a.name in less}
        return self.net.cut(Plan(kept)).macs_forward if kept else self.net.macs_forward

    def predict_macs(self, widths: Mapping[str, int]) -> int:
        """The cost with these widths, the others being full."""
        less = {a.name: a.size - widths.get(a.name, a.size) for a in self.net.axes}
        total = self.full - sum(slope * less[a] for a, slope in self.slopes.items())
        total += sum(bend * (less[a] * (less[a] - 1) // 2) for a, bend in self.bends.items())
        return total + sum(both * less[a] * less[b] for (a, b), both in self.pairs.items())


def count_models_to_cut(axes: int) -> int:
    """How many models are cut to find the polynomial."""
    return 1 + 2 * axes + axes * (axes - 1) // 2
