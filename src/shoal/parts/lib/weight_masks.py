"""Masks of single weights: which are kept, which devices know the masks, and zeros for the rest on the server."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import floor

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import SERVER, Round
from shoal.parts.lib.submodel_units import count_units_left


def list_prunable_weights(part: Part, net: Net) -> list[str]:
    """The weights that can lose elements: matrices and filters, but no biases, norms or statistics."""
    names = [name for name in net.shared_trainable if net.initial[name].dim() >= 2]
    if not names:
        problem = f"{part.name()} prunes matrices and filters, and this model has none that devices train and share."
        raise ShoalError("bad-part", problem, "Use another model, or leave it out.")
    return names


def mask_top_elements(count: int, *scores: Tensor) -> Tensor:
    """A mask of exactly `count` elements, those with the highest scores; later scores break ties, then the order."""
    order = torch.arange(scores[0].numel(), device=scores[0].device)
    for own in reversed(scores):
        order = order[own.flatten()[order].argsort(descending=True, stable=True)]
    return torch.zeros_like(scores[0], dtype=torch.bool).flatten().index_fill(0, order[:count], True).view_as(scores[0])


def mask_strongest(params: Mapping[str, Tensor], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """By tensor, a mask of `counts[name]` elements, those of the largest absolute value."""
    return {name: mask_top_elements(count, params[name].abs()) for name, count in counts.items()}


def mask_strongest_overall(params: Mapping[str, Tensor], names: Sequence[str], count: int) -> dict[str, Tensor]:
    """Masks of `count` elements of all tensors together, the largest in absolute value; at least one in each."""
    sizes = [params[name].abs().flatten() for name in names]
    firsts = [own.index_fill(0, own.argmax(), torch.inf) for own in sizes]
    masks = mask_top_elements(max(count, len(names)), torch.cat(firsts)).split([len(own) for own in sizes])
    return {name: own.view_as(params[name]) for name, own in zip(names, masks)}


def compute_erk_counts(shapes: Mapping[str, torch.Size], sparsity: float) -> dict[str, int]:
    """How many elements each tensor keeps: in proportion to the sum of its sides, and of all together an exact number.

    So small layers are denser (Erdos-Renyi kernel). No tensor keeps more than it has, and each at least one.
    """
    sizes = {k: shape.numel() for k, shape in shapes.items()}
    total, full, scale = count_units_left(sum(sizes.values()), sparsity), set[str](), 0.0
    while len(full) < len(shapes):
        rest = [k for k in shapes if k not in full]
        scale = (total - sum(sizes[k] for k in full)) / sum(sum(shapes[k]) for k in rest)
        over = {k for k in rest if scale * sum(shapes[k]) >= sizes[k]}
        if not over:
            break
        full |= over
    wanted = {k: sizes[k] if k in full else scale * sum(shapes[k]) for k in shapes}
    counts = {k: max(1, floor(n)) for k, n in wanted.items()}
    nearest = sorted((k for k in shapes if k not in full), key=lambda k: counts[k] - wanted[k])
    return counts | {k: counts[k] + 1 for k in nearest[: max(0, total - sum(counts.values()))]}


def apply_masks(params: Params, masks: Mapping[str, Tensor]) -> Params:
    """The same parameters with 0 for all that is not kept."""
    return params | {k: torch.where(mask, params[k], 0) for k, mask in masks.items()}


def init_mask_state(masks: Mapping[str, Tensor], round: Round) -> Tree:
    """The server state before the first round: masks, how often they changed, and which of them each device knows."""
    return {
        "masks": drop_full_masks(masks),
        "version": 0,
        "seen": torch.full((round.population,), -1, dtype=torch.int32),
    }


def replace_masks(state: Tree, masks: Mapping[str, Tensor]) -> Tree:
    """The state with new masks, which no device knows yet; the same state where they did not change."""
    old, new = state["masks"], drop_full_masks(masks)
    if old.keys() == new.keys() and all(torch.equal(old[k], mask) for k, mask in new.items()):
        return state
    return state | {"masks": new, "version": state["version"] + 1}


def drop_full_masks(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks, or none at all where none of them leaves anything out."""
    return {} if all(bool(mask.all()) for mask in masks.values()) else dict(masks)


def plan_masked_training(plans: Mapping[int, Plan], state: Tree) -> dict[int, Plan]:
    """Plans by which every device trains the kept weights; the masks are sent to those that do not know them."""
    masks, version, seen = state["masks"], state["version"], state["seen"]
    if not masks:
        return dict(plans)
    return {d: replace(p, masks=masks, known=d == SERVER or int(seen[d]) == version) for d, p in plans.items()}


def note_known_masks(state: Tree, round: Round) -> Tree:
    """The state after a round: devices that replied know the masks they were sent; of the others that is unknown."""
    devices = torch.tensor([r.device for r in round.replies if r.device != SERVER], dtype=torch.long)
    seen = state["seen"]
    return state | {"seen": seen.index_fill(0, devices.to(seen.device), state["version"])}
