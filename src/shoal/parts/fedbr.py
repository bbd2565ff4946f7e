"""FedBR: devices receive the last blocks of the model and distil from them; a bandit (GMBS) picks how many.

Liu et al. 2023, doi:10.1109/TNET.2023.3301972: the four steps of section II-B, whose order this file follows, and
Algorithm 1, GMBS, which is in lib/gmbs.py. Its symbols:

    x^t, x_k          the global model, and the local model of device k, each of M blocks
    alpha_k           how many of the last blocks device k receives, from 1 to M - 1
    tau               the whole model is sent every tau + 1 rounds
    q_L, q_H^j        the outputs of the local path and of hybrid path j
    zeta              the local loss: zeta_L of the local path, zeta_H and zeta_KL of the hybrid ones, eq. (15)-(18)
    lambda_1, _2      the weights of zeta_H and zeta_KL;   delta: the temperature in zeta_KL
    r_k, p_k,m, n_k,m the feedback of device k, and by number of blocks m its running mean and how often it was picked
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.extras import Declaration, Extra
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Local, Round
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.gmbs import compute_block_rewards, count_pick, make_bandit, pick_block_count, reward_pick
from shoal.parts.lib.hybrid_paths import add_hybrid_paths, find_block_ends, require_blocks
from shoal.parts.lib.position_codec import refuse_message
from shoal.parts.lib.submodel_units import device_state_key

CHOICES = ("gmbs", "random", "all")


@dataclass(frozen=True)
class FedBR(Part):
    """Devices receive only the last blocks in most rounds, complete them from their last model and distil from them.

    The whole model is sent every `tau` + 1 rounds, at first contact, after a round without a reply, and to a device
    that last took part more than `max_age` rounds ago (0: never for that reason).

    `cross` is lambda_1, `distil` lambda_2, `heat` the temperature delta. `choose` is how alpha_k is picked: by `gmbs`,
    at `random`, or always `all` M - 1 blocks. `rate` is lambda of eq. (23), by which p_k,m follows the feedback.
    """

    cite: ClassVar = ("liu2023fedbr",)
    metrics: ClassVar = (
        Metric(
            "bytes_down_by_blocks",
            "bytes down, blocks counted alike",
            "bytes",
            total="sum",
            compared=True,
            label="blocks alike",
            about="the bytes of the models that went down if all blocks of a model were of one size, as the paper "
            'counts. What was really sent is `bytes_down`. Tables call the sum over rounds "bytes down, blocks counted '
            'alike"',
        ),
        Metric(
            "sent_blocks",
            "blocks sent to a device, mean",
            drawn=True,
            about="mean over devices of the number of blocks that they were sent; all M in a round that sends the "
            "whole model",
        ),
        Metric(
            "picked_blocks",
            "blocks picked for a device, mean",
            drawn=True,
            about="mean over devices of alpha_k, which GMBS picks in every round",
        ),
        Metric(
            "feedback",
            "feedback of a device, mean",
            drawn=True,
            when="where a loss is finite",
            about="mean of the feedback r_k, from which GMBS learns",
        ),
        Metric(
            "loss", "loss of the local path, mean", "", "down", drawn=True, about="mean of zeta_L in the last epoch"
        ),
    )
    reads: ClassVar = frozenset({"extras", "outcomes", "updates"})
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

    @property
    def needs_class_logits(self) -> bool:
        """What is distilled are probabilities of classes."""
        return self.distil > 0

    def model(self, net: Net) -> Net:
        require_blocks(self, net)
        return net

    def taps(self, net: Net) -> tuple[str, ...]:
        return find_block_ends(net)

    def init_server(self, round: Round) -> Tree:
        """By device: `arms` its p and n, `blocks` its alpha, `loss` its last zeta_L, `seen` its last round."""
        return {"arms": {}, "blocks": {}, "loss": {}, "seen": {}}

    # (1) model broadcast ----------------------------------------------------------------------------------------------
    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        """alpha_k (Algorithm 1, lines 4-7), drawn at a device's first time; sent as the length of a tensor of bytes.

        A length is known before anything runs, so that a device computes no path that it does not have.
        """
        most, draw, alphas = len(round.net.blocks) - 1, round.generator(), {}
        for device in round.devices:
            alpha = int(draw.integers(1, most + 1))
            if self.choose == "gmbs" and device_state_key(device) in state["arms"]:
                alpha = pick_block_count(state["arms"][device_state_key(device)], round.number)
            alphas[device_state_key(device)] = most if self.choose == "all" else alpha
        messages = {d: {"blocks": torch.ones(alphas[device_state_key(d)], dtype=torch.uint8)} for d in round.devices}
        state = state | {"blocks": alphas}
        self.tell_blocks(state, round)
        return messages, state

    def tell_blocks(self, state: Tree, round: Round) -> None:
        """Tell how many blocks were picked for devices and how many they are sent, whole models included."""
        devices = [d for d in round.devices if d != SERVER]
        sent = [self.count_sent_blocks(state, round, device) for device in devices]
        round.tell("bytes_down_by_blocks", count_bytes_by_blocks(sent, round.net))
        if devices:
            round.tell("sent_blocks", fmean(sent))
            round.tell("picked_blocks", fmean(state["blocks"][device_state_key(d)] for d in devices))

    def count_sent_blocks(self, state: Tree, round: Round, device: int) -> int:
        """How many blocks of the model a device is sent something of, as `encode` cuts them."""
        plan, blocks = round.plans[device], round.net.names_by_block
        if not (plan or self.sends_whole_model(state, device, round.number)):
            blocks = blocks[-state["blocks"][device_state_key(device)] :]
        return sum(any(plan.sent is None or name in plan.sent for name in block) for block in blocks)

    def sends_whole_model(self, state: Tree, device: int, number: int) -> bool:
        """Whether a device is sent all M blocks: when t is a multiple of tau + 1, or it has no model to complete."""
        last = state["seen"].get(device_state_key(device))
        outdated = last is not None and 0 < self.max_age < number - last
        return last is None or outdated or number % (self.tau + 1) == 0 or device == SERVER

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        """The last alpha_k blocks of x^t, or all of it; a sub-model (a plan) has no blocks and is sent plainly."""
        if not memory or link.plan or self.sends_whole_model(memory, link.device, link.round):
            return message, memory
        alpha = memory["blocks"][device_state_key(link.device)]
        sent = {name for block in link.blocks[-alpha:] for name in block}
        left_out = {name for block in link.blocks for name in block} - sent
        return replace(message, body={k: e for k, e in message.body.items() if k not in left_out}), memory

    # (2) model combination --------------------------------------------------------------------------------------------
    def decode(self, message: Message, link: CodecLink) -> Message:
        """The combined model: the first M - alpha_k blocks of the device's last model, and the received ones."""
        if link.plan or link.plan.sent is not None:
            return message
        own_model, body = link.memory.get("model", {}), dict(message.body)
        for name in (name for block in link.blocks for name in block if name not in body):
            if name not in own_model:
                refuse_message(f"lacks {name}, which the device does not remember")
            body[name] = {"value": own_model[name]}
        return replace(message, body=body)

    # (3) local updating -----------------------------------------------------------------------------------------------
    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        zero = torch.zeros((), dtype=device.net.dtype, device=device.net.place)
        return params, {"loss": zero, "steps": zero, "epoch": zero}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        """zeta = zeta_L + lambda_1 zeta_H + lambda_2 zeta_KL, eq. (18), over the hybrid paths j = 1 .. alpha_k."""
        paths = range(1, len(local.got["blocks"]) + 1)

        def score_local_path(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            return scored._replace(
                aux=scored.aux | {"fedbr loss": local.net.task.compute_mean_loss(scored.logits, batch)}
            )

        shares = local.got.get("path_shares")
        return add_hybrid_paths(score_local_path, local, paths, self.cross, self.distil, self.heat, shares)

    def pad_extras(self, got: dict, net: Net) -> dict:
        """All M - 1 paths, each with its share in the means of eq. (16) and (17), 0 for j > alpha_k."""
        alpha, most = len(got["blocks"]), len(net.blocks) - 1
        shares = (torch.arange(most) < alpha).to(net.dtype) / alpha
        return {"blocks": got["blocks"].new_ones(most), "path_shares": shares}

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        """Sums zeta_L over the steps of the present epoch: both sums start anew when the epoch changes."""
        same_epoch = (local.numbers["epoch"] <= state["epoch"]).to(state["loss"].dtype)
        sums = {"loss": same_epoch * state["loss"] + scored.aux["fedbr loss"], "steps": same_epoch * state["steps"] + 1}
        return update, sums | {"epoch": torch.maximum(state["epoch"], local.numbers["epoch"])}

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        """The device saves its local model x_k, to combine it with the blocks of its next round."""
        return params, {"model": {k: params[k] for k in device.net.names_with_role("shared", "server")}}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        """The mean zeta_L of the last epoch; Algorithm 1 needs it on the server and does not say how it gets there."""
        return {"loss": state["loss"] / state["steps"].clamp(min=1)}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"loss": Extra(about="the mean loss of the last epoch")}

    # (4) model aggregation --------------------------------------------------------------------------------------------
    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        """x^(t+1) = the plain mean of the x_k, eq. (2)."""
        return torch.ones_like(weights), state

    # GMBS: the feedback of the round (Algorithm 1, lines 3 and 8) -----------------------------------------------------
    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """n_k,m and p_k,m of the devices that replied; a loss that is not finite leaves p_k,m as it was."""
        replies = {r.device: r for r in round.replies if r.device != SERVER}
        loss = {d: float(r.report[self.name()]["loss"]) for d, r in replies.items()}
        finite = [d for d in replies if isfinite(loss[d])]
        arms, most = dict(state["arms"]), len(round.net.blocks) - 1
        feedback = self.compute_feedback(params, state, round, {d: loss[d] for d in finite})
        if feedback:
            round.tell("feedback", fmean(feedback.values()))
        for device in replies:
            name, alpha = device_state_key(device), state["blocks"][device_state_key(device)]
            arm = count_pick(arms.get(name, make_bandit(most)), alpha)
            arms[name] = reward_pick(arm, alpha, feedback[device], self.rate) if device in feedback else arm
        # what a silent device holds is unknown, so that it is sent the whole model next time
        silent = {device_state_key(d) for d in round.devices if d not in replies}
        seen = {k: v for k, v in state["seen"].items() if k not in silent} | {
            device_state_key(d): r.round for d, r in replies.items()
        }
        losses = state["loss"] | {device_state_key(d): loss[d] for d in finite}
        return params, state | {"arms": arms, "seen": seen, "loss": losses}

    def compute_feedback(
        self, params: Params, state: Tree, round: Round, loss: Mapping[int, float]
    ) -> dict[int, float]:
        """r_k of eq. (21) by device; 0 at a device's first time, when there is no zeta_L to compare with."""
        distance, link_seconds, work_seconds = {}, {}, {}
        for reply in round.replies:
            if reply.device in loss:
                x_k = {k: reply.anchor[k] + reply.delta[k] for k in round.net.shared_trainable if k in reply.delta}
                distance[reply.device] = float(sum((params[k] - v).double().square().sum() for k, v in x_k.items()))
                up = sum(v.nbytes for v in reply.delta.values())
                down = self.count_sent_bytes(state, round, reply.device)
                profile = round.fleet.get_profile(reply.device, reply.round)
                times = profile.estimate_times(down, reply.outcome.macs_work, up)
                link_seconds[reply.device], work_seconds[reply.device] = times.down + times.up, times.compute
        before = state["loss"]
        loss_drop = {
            d: before[device_state_key(d)] - now if device_state_key(d) in before else 0.0 for d, now in loss.items()
        }
        return compute_block_rewards(distance, loss_drop, link_seconds, work_seconds) if distance else {}

    def count_sent_bytes(self, state: Tree, round: Round, device: int) -> int:
        """How many bytes of the model a device was sent."""
        blocks = (
            len(round.net.blocks)
            if self.sends_whole_model(state, device, round.number)
            else state["blocks"][device_state_key(device)]
        )
        return sum(round.anchor[name].nbytes for block in round.net.names_by_block[-blocks:] for name in block)


def count_bytes_by_blocks(blocks_sent: Sequence[int], net: Net) -> int:
    """The bytes of so many blocks sent to each device, had all blocks of a model the same size."""
    whole = sum(net.initial[name].nbytes for block in net.names_by_block for name in block)
    return round(sum(whole * count / len(net.names_by_block) for count in blocks_sent))
