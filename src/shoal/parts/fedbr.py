"""FedBR: devices are sent the last blocks and distil from them; a bandit picks how many (Liu et al. 2023)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.local.step import compute_mean_loss
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Batch, BatchScore, Device, Local, Round, Scorer
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.gmbs import compute_block_rewards, count_pick, make_bandit, pick_block_count, reward_pick
from shoal.parts.lib.hybrid_paths import add_hybrid_paths, find_block_ends, require_blocks
from shoal.parts.lib.position_codec import refuse_message
from shoal.parts.lib.submodel_units import device_state_key

CHOICES = ("gmbs", "random", "all")


@dataclass(frozen=True)
class FedBR(Part):
    """A device keeps the model it trained last; in most rounds it is sent the last blocks only and completes them from
    its own. Hybrid paths through the received blocks, which do not move, hold the local ones to them.

    The whole model travels every `tau` + 1 rounds, at first contact, after a round without an answer, and to a device
    that was last here more than `max_age` rounds ago (0: never for that reason).
    """

    cite: ClassVar = ("liu2023fedbr",)
    sets: ClassVar = frozenset({"weigh"})
    carries: ClassVar = "values"
    neutral: ClassVar = Neutral({"tau": 0, "cross": 0.0, "distil": 0.0}, equal_devices=True)
    stage: ClassVar = "rows"
    directions: ClassVar = frozenset({"down"})
    codes_delta: ClassVar = False

    tau: int = 1
    cross: float = 1.0
    distil: float = 1.0
    heat: float = 1.0
    choose: str = "gmbs"
    rate: float = 0.5
    max_age: int = 0

    def __post_init__(self):
        require(self, "cross and distil >= 0, heat > 0", min(self.cross, self.distil) >= 0 and self.heat > 0)
        require(self, f"choose in {CHOICES} and 0 <= rate <= 1", self.choose in CHOICES and 0 <= self.rate <= 1)
        require(self, "tau and max_age from 0 up", all(0 <= n < 10**9 for n in (self.tau, self.max_age)))

    def model(self, net: Net) -> Net:
        require_blocks(self, net)
        return net

    def taps(self, net: Net) -> tuple[str, ...]:
        return find_block_ends(net)

    def init_server(self, round: Round) -> Tree:
        return {"arms": {}, "blocks": {}, "loss": {}, "seen": {}}

    # downwards --------------------------------------------------------------------------------------------------------
    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        """How many blocks a device distils from, as so many bytes: the same number is the same program."""
        most, draw, blocks = len(round.net.blocks) - 1, round.generator(), {}
        for device in round.devices:
            count = int(draw.integers(1, most + 1))
            if self.choose == "gmbs" and device_state_key(device) in state["arms"]:
                count = pick_block_count(state["arms"][device_state_key(device)], round.number)
            blocks[device_state_key(device)] = most if self.choose == "all" else count
        told = {d: {"blocks": torch.ones(blocks[device_state_key(d)], dtype=torch.uint8)} for d in round.devices}
        return told, state | {"blocks": blocks}

    def sends_whole_model(self, state: Tree, device: int, number: int) -> bool:
        """Whether a device is sent the whole model."""
        last = state["seen"].get(device_state_key(device))
        old = last is not None and 0 < self.max_age < number - last
        return last is None or old or number % (self.tau + 1) == 0 or device == SERVER

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        if not memory or link.plan or self.sends_whole_model(memory, link.device, link.round):
            return message, memory
        blocks = memory["blocks"][device_state_key(link.device)]
        kept = {name for block in link.blocks[-blocks:] for name in block}
        left_out = {name for block in link.blocks for name in block} - kept
        return replace(message, body={k: e for k, e in message.body.items() if k not in left_out}), memory

    def decode(self, message: Message, link: CodecLink) -> Message:
        if link.plan or link.plan.sent is not None:
            return message
        kept, body = link.memory.get("model", {}), dict(message.body)
        for name in (name for block in link.blocks for name in block if name not in body):
            if name not in kept:
                refuse_message(f"lacks {name}, which the device does not remember")
            body[name] = {"value": kept[name]}
        return replace(message, body=body)

    # on the device ----------------------------------------------------------------------------------------------------
    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        zero = torch.zeros((), dtype=device.net.dtype, device=device.net.place)
        return params, {"loss": zero, "steps": zero, "epoch": zero}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        ways = range(1, len(local.got["blocks"]) + 1)

        def score_local_path(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            return scored._replace(aux=scored.aux | {"fedbr loss": compute_mean_loss(scored.logits, batch)})

        return add_hybrid_paths(score_local_path, local, ways, self.cross, self.distil, self.heat)

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        """The mean loss of the local path in the present epoch."""
        goes_on = (local.numbers["epoch"] <= state["epoch"]).to(state["loss"].dtype)
        told = {"loss": goes_on * state["loss"] + scored.aux["fedbr loss"], "steps": goes_on * state["steps"] + 1}
        return update, told | {"epoch": torch.maximum(state["epoch"], local.numbers["epoch"])}

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"model": {k: params[k] for k in device.net.names_with_role("shared", "server")}}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"loss": state["loss"] / state["steps"].clamp(min=1)}

    # on the server ----------------------------------------------------------------------------------------------------
    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        return torch.ones_like(weights), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        replies = {r.device: r for r in round.replies if r.device != SERVER}
        loss = {d: float(r.report[self.name()]["loss"]) for d, r in replies.items()}
        sound = [d for d in replies if isfinite(loss[d])]
        arms, most = dict(state["arms"]), len(round.net.blocks) - 1
        paid = self.compute_rewards(params, state, round, {d: loss[d] for d in sound})
        for device in replies:
            name, blocks = device_state_key(device), state["blocks"][device_state_key(device)]
            arm = count_pick(arms.get(name, make_bandit(most)), blocks)
            arms[name] = reward_pick(arm, blocks, paid[device], self.rate) if device in paid else arm
        gone = {device_state_key(d) for d in round.devices if d not in replies}
        seen = {k: v for k, v in state["seen"].items() if k not in gone} | {
            device_state_key(d): round.number for d in replies
        }
        told = state["loss"] | {device_state_key(d): loss[d] for d in sound}
        return params, state | {"arms": arms, "seen": seen, "loss": told}

    def count_sent_bytes(self, state: Tree, round: Round, device: int) -> int:
        """How many bytes of the model a device was sent."""
        blocks = (
            len(round.net.blocks)
            if self.sends_whole_model(state, device, round.number)
            else state["blocks"][device_state_key(device)]
        )
        return sum(round.anchor[name].nbytes for block in round.net.names_by_block[-blocks:] for name in block)

    def compute_rewards(self, params: Params, state: Tree, round: Round, loss: Mapping[int, float]) -> dict[int, float]:
        """What the round was worth to each device whose loss is known from before as well."""
        far, link, work = {}, {}, {}
        for reply in round.replies:
            if reply.device in loss:
                now = {k: round.anchor[k] + reply.delta[k] for k in round.net.shared_trainable if k in reply.delta}
                far[reply.device] = float(sum((params[k] - v).double().square().sum() for k, v in now.items()))
                up = sum(v.nbytes for v in reply.delta.values())
                down = self.count_sent_bytes(state, round, reply.device)
                profile = round.fleet.get_profile(reply.device, round.number)
                times = profile.estimate_times(down, reply.outcome.macs_work, up)
                link[reply.device], work[reply.device] = times.down + times.up, times.compute
        before = state["loss"]
        better = {
            d: before[device_state_key(d)] - own if device_state_key(d) in before else 0.0 for d, own in loss.items()
        }
        return compute_block_rewards(far, better, link, work) if far else {}
