"""Training of real slices: where a plan is one of a few levels, devices train the model that is cut out by it."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.core.local.device import TrainingSetup
from shoal.core.model.flops import FlopCache
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.model.tree import Tree
from shoal.core.task import Task


class SlicedSetups:
    """The training setups of one run, one for each slice of the model; each is built when it is first needed."""

    def __init__(self, setup: TrainingSetup):
        self.setup = setup
        self.sliced_setups: dict[tuple, TrainingSetup] = {}

    def narrow_task(self, task: Task) -> Task:
        """The task for the sliced model; the message is the same, since it holds the slice and nothing else."""
        plan = task.job.plan
        if not self.is_sliceable(plan):
            return task
        key = tuple((axis, *units.tolist()) for axis, units in sorted(plan.kept.items()))
        if key not in self.sliced_setups:
            kind = f"{self.setup.kind} with {key}" if self.setup.kind else ""
            self.sliced_setups[key] = replace(self.setup, net=self.setup.net.cut(plan), tally=FlopCache(), kind=kind)
        memory = {part: self.setup.net.slicer.cut_tree(tree, plan) for part, tree in task.memory.items()}
        return Task(self.sliced_setups[key], replace(task.job, plan=WHOLE_MODEL), memory)

    def widen_memory(self, memory: dict[str, Tree], plan: Plan, previous: Mapping[str, Tree]) -> dict[str, Tree]:
        """A memory of the sliced model at full shape; outside of the slice it has the values of the previous memory."""
        if not self.is_sliceable(plan):
            return memory
        return {part: self.place_tree(tree, previous.get(part), plan) for part, tree in memory.items()}

    def place_tree(self, sliced: Tree, previous: Tree, plan: Plan) -> Tree:
        """A tree of the sliced model at full shape: the slice where the plan has it, the previous values elsewhere."""
        net, slicer = self.setup.net, self.setup.net.slicer
        if isinstance(sliced, (list, tuple)):
            old_values = (
                previous
                if isinstance(previous, (list, tuple)) and len(previous) == len(sliced)
                else [None] * len(sliced)
            )
            return type(sliced)(self.place_tree(s, o, plan) for s, o in zip(sliced, old_values))
        if not isinstance(sliced, Mapping):
            return sliced
        old_values = previous if isinstance(previous, Mapping) else {}
        if sliced and slicer.names.issuperset(sliced):
            full = slicer.place(sliced, net.initial, plan)
            masks = {name: slicer.covered_mask(name, net.initial[name], plan) for name in full if name in old_values}
        elif sliced and slicer.axes.keys() >= sliced.keys():
            full = slicer.place_units(sliced, plan)
            sizes = {axis: slicer.axes[axis].size for axis in full if axis in old_values and axis in plan.kept}
            masks = {
                axis: full[axis].new_zeros(n).bool().index_fill(0, plan.kept[axis], True) for axis, n in sizes.items()
            }
        else:
            return {key: self.place_tree(value, old_values.get(key), plan) for key, value in sliced.items()}
        return full | {
            name: full[name].where(mask, old_values[name]) for name, mask in masks.items() if mask is not None
        }

    def is_sliceable(self, plan: Plan) -> bool:
        """Whether a plan is one of a few levels, and made of axes alone: rows cannot be cut out."""
        if not plan.level or not plan.kept or plan.masks:
            return False
        return {axis.name for axis in self.setup.net.axes} >= plan.kept.keys()
