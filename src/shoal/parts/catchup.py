"""A device that was here before is told only what changed since (the downlink of Sattler et al. 2019)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Round
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.position_codec import (
    POSITION_CODES,
    count_positions,
    pack_positions,
    refuse_message,
    unpack_positions,
)
from shoal.parts.lib.sparse_codec import check_tensor_fits, drop_entry_fields
from shoal.parts.lib.submodel_units import device_state_key


@dataclass(frozen=True)
class CatchUp(Part):
    """A device that took part before is sent only the elements of the model that changed since.

    Devices keep the model they last received. An element is sent as its new value, not as a difference, so that a
    device that has received a newer model than the server knows of still ends with the right one. `positions` is how
    the places of the elements are written: `64` or `32` bits each, `golomb`, `bitmap`, or `auto`, the smallest of
    these.
    """

    cite: ClassVar = ("sattler2019stc",)
    stage: ClassVar = "sparsify"
    directions: ClassVar = frozenset({"down"})
    codes_delta: ClassVar = False
    neutral: ClassVar = Neutral({})

    positions: str = "auto"

    def __post_init__(self):
        require(self, f"positions in {POSITION_CODES}", self.positions in POSITION_CODES)

    def init_server(self, round: Round) -> Tree:
        model = {k: round.anchor[k] for k in round.net.names_with_role("shared", "server")}
        changed = {k: torch.zeros(v.shape, dtype=torch.int32) for k, v in model.items()}
        return {"told": model, "changed": changed, "seen": torch.full((round.population,), -1, dtype=torch.int32)}

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        model = {k: round.anchor[k] for k in state["told"]}
        other = {k: (v != state["told"][k]).cpu() for k, v in model.items()}
        changed = {k: torch.where(other[k], round.number, v).to(v.dtype) for k, v in state["changed"].items()}
        return {}, state | {"told": model, "changed": changed, "partial": {}}

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        if link.plan or link.earlier or len(message.body) < len(memory.get("told", ())):
            return message, memory | {
                "partial": memory.get("partial", {}) | {device_state_key(link.device): torch.ones(())}
            }
        last = int(memory["seen"][link.device]) if memory and link.device != SERVER else -1
        if last < 0:
            return message, memory
        body = {}
        for name, entry in message.body.items():
            value = entry["value"].flatten()
            at = (memory["changed"][name].flatten() > last).nonzero().flatten()
            sparse = {"value": value[at.to(value.device)], "at": pack_positions(at, value.numel(), self.positions)}
            smaller = sparse["value"].nbytes + sparse["at"].nbytes < value.nbytes
            body[name] = entry | sparse if smaller else entry
        return replace(message, body=body), memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        cut = {k: e["at"] for k, e in message.body.items() if "at" in e}
        cut_shapes = {k: torch.Size([count_positions(at, shapes[k].numel(), self.positions)]) for k, at in cut.items()}
        return shapes | cut_shapes

    def decode(self, message: Message, link: CodecLink) -> Message:
        body, known = {}, link.memory.get("model", {})
        for name, entry in message.body.items():
            shape, dtype = link.shapes[name], link.like[name].dtype
            if "at" not in entry:
                body[name] = entry | {"value": check_tensor_fits(entry["value"], shape, dtype, name)}
                continue
            if name not in known:
                refuse_message(f"has changes of {name} for a device that does not remember it")
            k = count_positions(entry["at"], shape.numel(), self.positions)
            values = check_tensor_fits(entry["value"], torch.Size([k]), dtype, name)
            at = unpack_positions(entry["at"], shape.numel(), k, self.positions).to(values.device)
            now = known[name].to(values.device).flatten().index_copy(0, at, values)
            body[name] = drop_entry_fields(entry, "at") | {"value": now.view(shape)}
        return replace(message, body=body)

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        whole = not device.plan and not device.covered
        kept = {k: device.anchor[k] for k in device.net.names_with_role("shared", "server")}
        return params, {"model": kept} if whole else memory

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        seen, answered = state["seen"].clone(), {reply.device: reply.round for reply in round.replies}
        for device in set(round.devices) - {SERVER}:
            if device not in answered:
                seen[device] = -1
            elif device_state_key(device) not in state["partial"]:
                seen[device] = answered[device]
        return params, state | {"seen": seen}
