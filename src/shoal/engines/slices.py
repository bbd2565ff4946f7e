"""Devices whose plan is one of a few levels: they train the cut-out model, on a site of its own."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.core.local.device import TrainingSetup
from shoal.core.model.flops import FlopCache
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.model.tree import Tree
from shoal.engines.base import Task


class SlicedSetups:
    """The sites of one run by what their models keep; each is made when it is first met."""

    def __init__(self, site: TrainingSetup):
        self.site = site
        self.sites: dict[tuple, TrainingSetup] = {}

    def narrow_task(self, task: Task) -> Task:
        """The same task for the smaller model; what travels is the same, since a slice is all of it."""
        plan = task.job.plan
        if not self.is_sliceable(plan):
            return task
        key = tuple((axis, *units.tolist()) for axis, units in sorted(plan.kept.items()))
        if key not in self.sites:
            kind = f"{self.site.kind} with {key}" if self.site.kind else ""
            self.sites[key] = replace(self.site, net=self.site.net.cut(plan), tally=FlopCache(), kind=kind)
        memory = {part: self.site.net.slicer.cut_tree(own, plan) for part, own in task.memory.items()}
        return Task(self.sites[key], replace(task.job, plan=WHOLE_MODEL), memory)

    def widen_memory(self, memory: dict[str, Tree], plan: Plan, before: Mapping[str, Tree]) -> dict[str, Tree]:
        """What a device remembers, at full shape again; outside of its slice it remembers what it did before."""
        if not self.is_sliceable(plan):
            return memory
        return {part: self.place_tree(own, before.get(part), plan) for part, own in memory.items()}

    def place_tree(self, small: Tree, old: Tree, plan: Plan) -> Tree:
        """A tree of the smaller model in the place that its plan gives it in one of the whole."""
        net, slicer = self.site.net, self.site.net.slicer
        if isinstance(small, (list, tuple)):
            known = old if isinstance(old, (list, tuple)) and len(old) == len(small) else [None] * len(small)
            return type(small)(self.place_tree(s, o, plan) for s, o in zip(small, known))
        if not isinstance(small, Mapping):
            return small
        known = old if isinstance(old, Mapping) else {}
        if small and slicer.names.issuperset(small):
            full = slicer.place(small, net.initial, plan)
            masks = {name: slicer.covered_mask(name, net.initial[name], plan) for name in full if name in known}
        elif small and slicer.axes.keys() >= small.keys():
            full = slicer.place_units(small, plan)
            held = {axis: slicer.axes[axis].size for axis in full if axis in known and axis in plan.kept}
            masks = {
                axis: full[axis].new_zeros(n).bool().index_fill(0, plan.kept[axis], True) for axis, n in held.items()
            }
        else:
            return {key: self.place_tree(value, known.get(key), plan) for key, value in small.items()}
        return full | {name: full[name].where(mask, known[name]) for name, mask in masks.items() if mask is not None}

    def is_sliceable(self, plan: Plan) -> bool:
        """Whether a plan is a level, and made of axes alone: rows cannot be cut out."""
        axes = {axis.name for axis in self.site.net.axes}
        return plan.level and bool(plan.kept) and not plan.masks and axes >= plan.kept.keys()
