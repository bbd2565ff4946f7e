"""The cost of a forward pass as a polynomial of the widths, so that not every submodel has to be cut and counted.

A layer multiplies at most two widths, so the degree is 2, and a few cut models give the coefficients. `FlopCache` uses
the polynomial only where it agrees with all costs that were counted.
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

    def count_cut_model(self, removed: Mapping[str, int]) -> int:
        """The multiply-accumulates of the model with so many units removed from some axes, by cutting it."""
        kept = {a.name: torch.arange(a.size - removed[a.name]) for a in self.net.axes if a.name in removed}
        return self.net.cut(Plan(kept)).macs_forward if kept else self.net.macs_forward

    def predict_macs(self, widths: Mapping[str, int]) -> int:
        """Multiply-accumulates with these widths, by axis; axes that are not named have full width."""
        removed = {a.name: a.size - widths.get(a.name, a.size) for a in self.net.axes}
        total = self.full - sum(slope * removed[a] for a, slope in self.slopes.items())
        total += sum(bend * (removed[a] * (removed[a] - 1) // 2) for a, bend in self.bends.items())
        return total + sum(product * removed[a] * removed[b] for (a, b), product in self.pairs.items())


def count_models_to_cut(axes: int) -> int:
    """How many models have to be cut to find the polynomial for this number of axes."""
    return 1 + 2 * axes + axes * (axes - 1) // 2
