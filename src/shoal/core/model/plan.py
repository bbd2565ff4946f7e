"""Submodels: axes (widths that can shrink), plans (what of a model a device trains), and the slicer that cuts tensors.

Nothing here depends on a particular model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.core.model.tree import Params, Tree
from shoal.core.short_repr import make_short_repr


@dataclass(frozen=True)
class Cut:
    """The indices of a tensor that belong to an axis: unit `u` has `span` adjacent ones of `dim`, in each of `copies`.

    A flattened 5x5 map has span 25; the four stacked gates of an LSTM are four copies. `reads` marks columns that take
    the output of a unit as input; the other cuts produce that output.
    """

    tensor: str
    dim: int
    span: int = 1
    copies: int = 1
    reads: bool = False


@dataclass(frozen=True)
class Axis:
    """A width that can shrink (filters, hidden units, heads), and every tensor dimension that shrinks with it."""

    name: str
    size: int
    cuts: tuple[Cut, ...]
    tap: str = ""
    """Where the feature maps of the units (filters, heads) can be seen: the name of a module for its output, or
    `into NAME` for its input; empty where a unit outputs a single number."""


@dataclass(frozen=True)
class Block:
    """One stage of a model: the names of the children that it runs, in order; their tensors belong to it."""

    name: str
    children: tuple[str, ...]

    def owns(self, tensor: str) -> bool:
        """Whether the tensor of this name belongs to the block."""
        return any(tensor == child or tensor.startswith(f"{child}.") for child in self.children)


@dataclass(frozen=True, eq=False)
class Plan:
    """What of the model one device is sent and trains; by default all of it.

    `kept` lists the units kept of an axis, in order; `masks` keeps single elements where no axis fits;
    `sent` names the tensors that travel down when they are not all of them; `known` says that the device knows the
    plan already, so that it need not travel; `level` says that it is one of a few that are used again and again, so
    that a simulation trains the cut-out model instead of the masked one.
    """

    kept: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    sent: frozenset[str] | None = None
    known: bool = False
    level: bool = False

    def __repr__(self) -> str:
        return make_short_repr(self)

    def __bool__(self) -> bool:
        """Whether less than the whole model is trained."""
        return bool(self.kept or self.masks)


WHOLE_MODEL = Plan()


class Slicer:
    """Applies plans to trees of parameters, following the axes of one model."""

    def __init__(self, axes: tuple[Axis, ...], names: Iterable[str]):
        self.names = frozenset(names)
        self.axes = {axis.name: axis for axis in axes}
        self.cuts: dict[str, list[tuple[Cut, Axis]]] = {}
        for axis in axes:
            for cut in axis.cuts:
                self.cuts.setdefault(cut.tensor, []).append((cut, axis))

    def take(self, params: Mapping[str, Tensor], plan: Plan) -> Params:
        """The smaller tensors that a plan keeps; a tensor with an element mask becomes the list of its kept values."""
        return {name: self._take_tensor(name, value, plan) if plan else value for name, value in params.items()}

    def place(self, small: Mapping[str, Tensor], like: Mapping[str, Tensor], plan: Plan) -> Params:
        """The inverse of `take`: tensors of full shape, `small` where the plan keeps and 0 elsewhere."""
        return {name: self._place_tensor(name, value, like[name], plan) for name, value in small.items()}

    def covered_mask(self, name: str, like: Tensor, plan: Plan) -> Tensor | None:
        """A boolean mask of the elements of a tensor that a plan keeps; None when it keeps all."""
        if not plan:
            return None
        mask = plan.masks.get(name)
        for dim, line in self.find_kept_lines(name, like, plan).items():
            line = line.to(like.device).view([-1 if d == dim else 1 for d in range(like.dim())])
            mask = line.expand(like.shape) if mask is None else mask & line
        return mask

    def cut_tree(self, tree: Tree, plan: Plan) -> Tree:
        """A state or memory cut like the model: all dicts in it that are keyed by tensor names, or by axis names."""
        if isinstance(tree, Mapping):
            if tree and self.names.issuperset(tree):
                return self.take(tree, plan)
            if tree and self.axes.keys() >= tree.keys():
                return self.take_units(tree, plan)
            return {k: self.cut_tree(v, plan) for k, v in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.cut_tree(v, plan) for v in tree)
        return tree

    def take_units(self, units: Mapping[str, Tensor], plan: Plan) -> Params:
        """Vectors with one element per unit, by axis, cut to the units that a plan keeps."""
        kept = {name: numbers.to(units[name].device) for name, numbers in plan.kept.items() if name in units}
        return {name: v[kept[name]] if name in kept else v for name, v in units.items()}

    def place_units(self, small: Mapping[str, Tensor], plan: Plan) -> Params:
        """The inverse of `take_units`: 0 for the units that a plan leaves out."""
        placed = dict(small)
        for name, units in plan.kept.items():
            if name in small:
                full = small[name].new_zeros(self.axes[name].size, *small[name].shape[1:])
                placed[name] = full.index_copy(0, units.to(full.device), small[name])
        return placed

    def scale_unit_outputs(self, params: Mapping[str, Tensor], units: Mapping[str, Tensor]) -> Params:
        """Parameters with which the outputs of units count `units` times: the columns that read them are multiplied."""
        return self._multiply_cuts(params, units, [(a, cut) for a in units for cut in self.axes[a].cuts if cut.reads])

    def scale_unit_weights(self, params: Mapping[str, Tensor], units: Mapping[str, Tensor]) -> Params:
        """Parameters of which those that make a unit are multiplied by its factor in `units`."""
        return self._multiply_cuts(
            params, units, [(a, cut) for a in units for cut in self.axes[a].cuts if not cut.reads]
        )

    def mask_units(self, values: Mapping[str, Tensor], units: Mapping[str, Tensor]) -> Params:
        """Values multiplied by the factor of each unit they belong to, in all cuts; factors of 0 and 1 make a mask."""
        return self._multiply_cuts(values, units, [(a, cut) for a in units for cut in self.axes[a].cuts])

    def _multiply_cuts(
        self, values: Mapping[str, Tensor], units: Mapping[str, Tensor], cuts: list[tuple[str, Cut]]
    ) -> Params:
        scaled = dict(values)
        for axis, cut in cuts:
            if cut.tensor in scaled:
                line = units[axis].repeat_interleave(cut.span).repeat(cut.copies)
                shape = [-1 if d == cut.dim else 1 for d in range(scaled[cut.tensor].dim())]
                scaled[cut.tensor] = scaled[cut.tensor] * line.view(shape)
        return scaled

    def find_kept_lines(self, name: str, like: Tensor, plan: Plan) -> dict[int, Tensor]:
        """By dimension, a boolean vector of the indices that a plan keeps; where axes meet, those all of them keep."""
        lines: dict[int, Tensor] = {}
        for cut, axis in self.cuts.get(name, ()):
            if axis.name in plan.kept:
                index = expand_unit_indices(plan.kept[axis.name].cpu(), axis, cut)
                line = torch.zeros(like.shape[cut.dim], dtype=torch.bool, device="cpu").index_fill(0, index, True)
                lines[cut.dim] = lines[cut.dim] & line if cut.dim in lines else line
        return lines

    def _take_tensor(self, name: str, value: Tensor, plan: Plan) -> Tensor:
        if name in plan.masks:
            covered = self.covered_mask(name, value, plan)
            assert covered is not None
            return value[covered]
        for dim, line in self.find_kept_lines(name, value, plan).items():
            value = value.index_select(dim, line.nonzero().flatten().to(value.device))
        return value

    def _place_tensor(self, name: str, small: Tensor, like: Tensor, plan: Plan) -> Tensor:
        covered = self.covered_mask(name, like, plan)
        if covered is None:
            return small
        full = torch.zeros(like.shape, dtype=small.dtype, device=small.device)
        full[covered] = small.flatten()
        return full


def expand_unit_indices(units: Tensor, axis: Axis, cut: Cut) -> Tensor:
    """The indices along a cut's dimension that belong to `units`, in the order of the tensor."""
    inner = (units[:, None] * cut.span + torch.arange(cut.span, device=units.device)).flatten()
    outer = torch.arange(cut.copies, device=units.device)[:, None] * (axis.size * cut.span)
    return (outer + inner).flatten()


def count_row_units(rows: Axis, params: Params) -> int:
    """How many units `rows` has in tensors of these shapes."""
    cut = rows.cuts[0]
    return params[cut.tensor].shape[cut.dim] // (cut.span * cut.copies)


def make_output_rows(layer: str, classes: int, bias: bool = True) -> Axis:
    """The rows of the last layer as an axis: one unit for each class."""
    keys = ("weight", "bias") if bias else ("weight",)
    return Axis(f"{layer}:output", classes, tuple(Cut(f"{layer}.{key}", 0) for key in keys))
