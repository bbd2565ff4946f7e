"""FedDST: devices exchange the weakest of their few weights for others (Bibikar et al. 2022, arXiv:2112.09824)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import cos, pi
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.extras import Declaration, Extra
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Round
from shoal.core.wire import REQUEST, CodecLink, Entry, Message, pack_bits, unpack_bits
from shoal.parts.lib.checks import require
from shoal.parts.lib.loss_gradient import compute_loss_gradient
from shoal.parts.lib.position_codec import refuse_message
from shoal.parts.lib.weight_masks import (
    apply_masks,
    compute_erk_counts,
    init_mask_state,
    list_prunable_weights,
    mask_strongest,
    mask_top_elements,
    note_known_masks,
    plan_masked_training,
    replace_masks,
)

MANY = 10**9


@dataclass(frozen=True)
class FedDST(Part):
    """Devices train few weights and exchange the smallest of them for others with large gradients.

    Only the share 1 - `sparsity` of all weights is ever trained, the more of a layer the smaller it is (ERK).

    Every `every` rounds each device, after training, exchanges the share `alpha` of what it keeps of each layer: the
    smallest weights for as many others with the largest gradients, which start at 0. The share falls as half a cosine,
    to 0 in round `until`. The server averages over the devices that hold a weight and keeps as many weights as before.
    """

    cite: ClassVar = ("bibikar2022feddst",)
    reads: ClassVar = frozenset({"extras"})
    sets: ClassVar = frozenset({"plan"})
    stage: ClassVar = "rows"
    codes_delta: ClassVar = False
    neutral: ClassVar = Neutral({"sparsity": 0.0})

    sparsity: float = 0.8
    alpha: float = 0.01
    every: int = 15
    until: int = 200

    def __post_init__(self):
        require(self, "0 <= sparsity < 1 and 0 <= alpha <= 1", 0 <= self.sparsity < 1 and 0 <= self.alpha <= 1)
        require(self, "every and until from 1 up", 0 < self.every < MANY and 0 < self.until < MANY)

    def init_server(self, round: Round) -> Tree:
        """Layers that keep all their weights have no mask; both ends know them from the shapes."""
        counts = compute_erk_counts(
            {k: round.anchor[k].shape for k in list_prunable_weights(self, round.net)}, self.sparsity
        )
        fewer = {k: count for k, count in counts.items() if count < round.anchor[k].numel()}
        return init_mask_state(mask_strongest(round.anchor, fewer), round)

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        return plan_masked_training(plans, state), state

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        due = any(self.count_exchanges(mask, round.number) for mask in state["masks"].values())
        return {d: {"exchange": REQUEST} for d in round.devices} if due else {}, state

    def count_exchanges(self, mask: Tensor, number: int) -> int:
        """How many elements of a tensor a device exchanges in a round; as many as there are others at most."""
        if (number + 1) % self.every or number + 1 >= self.until:
            return 0
        kept, share = int(mask.sum()), self.alpha / 2 * (1 + cos(pi * (number + 1) / self.until))
        return min(round(share * kept), mask.numel() - kept)

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        """Which elements change places, a bit each; what comes in is 0, so that its value need not travel."""
        if not device.has_request("exchange"):
            return {}
        slopes, exchanges = compute_loss_gradient(device.net, params, device.samples), {}
        for name, mask in device.plan.masks.items():
            count = self.count_exchanges(mask, device.round)
            if count:
                out = mask_top_elements(count, torch.where(mask, -params[name].abs(), -torch.inf))
                into = mask_top_elements(count, torch.where(mask, -1, slopes[name].abs()))
                exchanges[f"exchanged {name}"] = pack_bits(out | into)
        return exchanges

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        bits = {k: Extra("bits", length=mask.numel(), when="exchange", optional=True) for k, mask in plan.masks.items()}
        about = "which elements of it change places"
        return {f"exchanged {name}": replace(extra, about=about) for name, extra in bits.items()}

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        gone = find_pruned_elements(message.beside.get(self.name(), {}), link.plan)
        return message.with_values(**{k: message.body[k]["value"][~own] for k, own in gone.items()}), memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        """Half of what changed places was given up, so that the shapes follow without the masks."""
        report, cut_shapes = message.beside.get(self.name(), {}), dict(shapes)
        for name, shape in shapes.items():
            packed = read_exchange_bits(report, name)
            if packed is not None:
                left = shape.numel() - int(unpack_bits(packed, torch.Size([8 * len(packed)])).sum()) // 2
                cut_shapes[name] = torch.Size([max(0, left)])
        return cut_shapes

    def decode(self, message: Message, link: CodecLink) -> Message:
        body: dict[str, Entry] = dict(message.body)
        for name, gone in find_pruned_elements(message.beside.get(self.name(), {}), link.plan).items():
            value = body[name]["value"] if name in body else torch.empty(0)
            if value.shape != (len(gone) - int(gone.sum()),):
                refuse_message(f"has values of shape {tuple(value.shape)} in {name}, which do not fit")
            held = ~gone.to(value.device)
            body[name] = body[name] | {"value": value.new_zeros(len(gone)).masked_scatter(held, value), "covered": held}
        return replace(message, body=body)

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        state, params = note_known_masks(state, round), apply_masks(params, state["masks"])
        weighted = zip(round.weights.tolist(), round.replies, strict=True)
        reports = [(w, r.report[self.name()]) for w, r in weighted if w > 0 and self.name() in r.report]
        if reports:
            state = replace_masks(
                state, {k: readjust_mask(params[k], k, m, reports) for k, m in state["masks"].items()}
            )
        return apply_masks(params, state["masks"]), state

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return {name: apply_masks(own, state["masks"]) for name, own in judged.items()}


def readjust_mask(
    value: Tensor, name: str, mask: Tensor, reports: Sequence[tuple[float, Mapping[str, Tensor]]]
) -> Tensor:
    """As many elements as before: the largest that anybody holds, of those at 0 the ones that most hold."""
    votes = torch.zeros_like(value, dtype=torch.float64)
    for weight, report in reports:
        packed = read_exchange_bits(report, name)
        held = mask if packed is None else mask ^ unpack_bits(packed, mask.shape).to(mask.device)
        votes = votes + weight * held
    return mask_top_elements(int(mask.sum()), torch.where(votes > 0, value.abs(), -1), votes)


def find_pruned_elements(report: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """By tensor, which of the elements that a plan keeps a device does not hold any more."""
    pruned = {}
    for name, mask in plan.masks.items():
        packed = read_exchange_bits(report, name)
        if packed is None:
            continue
        if len(packed) != -(-mask.numel() // 8):
            refuse_message(f"has {len(packed)} bytes for the {mask.numel()} elements of {name}")
        changed = unpack_bits(packed, mask.shape)
        pruned[name] = changed[mask.to(changed.device)]
        if 2 * int(pruned[name].sum()) != int(changed.sum()) or not torch.equal(pack_bits(changed), packed):
            refuse_message(f"gives up more or fewer elements of {name} than it takes in")
    return pruned


def read_exchange_bits(report: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The bits of the elements of a tensor that changed places; None where none did."""
    packed = report.get(f"exchanged {name}")
    if packed is not None and not (isinstance(packed, Tensor) and packed.dtype == torch.uint8 and packed.dim() == 1):
        refuse_message(f"has no bits where those of {name} belong")
    return packed
