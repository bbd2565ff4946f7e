"""LoRA: the model stays, linear layers learn an addition of low rank (Hu et al. 2022, arXiv:2106.09685)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.core.errors import ShoalError
from shoal.core.metric import Metric
from shoal.core.model.low_rank import Adapter, add_adapters, find_adapters, make_rank_axis
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Round
from shoal.parts.lib.adapter_layers import choose_head_role, choose_layers, set_head_role
from shoal.parts.lib.adapter_products import compute_residue, read_reply_model
from shoal.parts.lib.checks import require

ROLES = ("shared", "frozen", "personal")
RANK, ALPHA = 8, 16.0
"""Of new adapters where nothing else is said."""


@dataclass(frozen=True)
class LoRA(Part):
    """W = W0 + alpha / rank B A: only A and B of linear layers are trained and travel, W0 is frozen.

    `where` are ends of names of layers, such as "q_proj,v_proj"; empty: all linear layers but the last. `a`, `b` and
    `head` are the roles of A, of B and of the last linear layer: shared, frozen or personal. An empty `head` is shared,
    and frozen where that layer gives the next word or has an adapter. New adapters have rank 8 and alpha 16 unless
    `rank` and `alpha` say otherwise. A module that has adapters of peft keeps them: `rank`, `alpha` and `where` must
    then be theirs, or be left out.
    """

    cite: ClassVar = ("hu2022lora", "sun2024ffalora", "guo2025fedsa")
    reads: ClassVar = frozenset({"updates"})
    freezes_rest: ClassVar = True
    metrics: ClassVar = (
        Metric(
            "residue",
            "what averaging A and B apart misses",
            "share",
            "down",
            drawn=True,
            when="unless a factor is personal",
            about="how far the product of the combined factors is from the mean of the devices' products, "
            "as a share of that mean's norm, over all adapters",
        ),
    )

    rank: int = 0
    alpha: float = 0.0
    where: str = ""
    a: str = "shared"
    b: str = "shared"
    head: str = ""

    def __post_init__(self):
        require(self, "rank from 1 to 65536, or 0, and alpha >= 0", 0 <= self.rank <= 65536 and self.alpha >= 0)
        require(self, f"a and b one of {', '.join(ROLES)}", self.a in ROLES and self.b in ROLES)
        require(self, f"head one of {', '.join(ROLES)}, or none", self.head in ("", *ROLES))
        require(self, "a or b trained", not self.a == self.b == "frozen")

    def model(self, net: Net) -> Net:
        given = find_adapters(net.module)
        return self.take_adapters(net, given) if given else self.place_adapters(net)

    def place_adapters(self, net: Net) -> Net:
        """The net with new adapters, in which nothing else that was shared is trained."""
        layers, has_positions = choose_layers(net, self.where)
        adapted = add_adapters(net, layers, self.rank or RANK, self.alpha or ALPHA)
        rest = dict.fromkeys(net.names_with_role("shared"), "frozen")
        head = self.head or choose_head_role(net, layers, has_positions)
        return self.set_roles(adapted, dict(net.roles) | rest, find_adapters(adapted.module), head)

    def take_adapters(self, net: Net, given: list[Adapter]) -> Net:
        """The net with the adapters that its module has; what else it trains stays as it is."""
        ranks = {len((net.initial | net.frozen)[adapter.a]) for adapter in given}
        scales = {adapter.scale for adapter in given}
        unlike = [
            f"rank={self.rank}" if self.rank and ranks != {self.rank} else "",
            f"alpha={self.alpha:g}" if self.alpha and scales != {self.alpha / max(ranks)} else "",
            f"where={self.where!r}" if self.where else "",
        ]
        if any(unlike):
            own = f"{len(given)} adapters of rank {', '.join(map(str, sorted(ranks)))} already"
            problem = f"The model has {own}, and {', '.join(filter(None, unlike))} asks for others."
            advice = "Leave that out to train them as they are, or give the model without."
            raise ShoalError("bad-part", problem, advice)
        return self.set_roles(replace(net, module=copy_module(net)), dict(net.roles), given, self.head)

    def set_roles(self, net: Net, roles: dict[str, str], adapters: list[Adapter], head: str) -> Net:
        """The net with the roles of factors and head, and the axis of ranks where devices share both factors."""
        for role, names in ((self.a, [x.a for x in adapters]), (self.b, [x.b for x in adapters])):
            roles |= dict.fromkeys(names, role) if role != "shared" else {}
        factors = {name for x in adapters for name in (x.a, x.b)}
        made = replace(net, roles=set_head_role(net, roles, head, bool(self.head), factors))
        if not made.shared_trainable:
            problem = "With these roles of lora nothing is left that is trained and shared."
            raise ShoalError("bad-part", problem, "Write a='shared', b='shared' or head='shared'.")
        axis = make_rank_axis(made, adapters)
        return replace(made, axes=(*made.axes, axis)) if axis else made

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """||mean(BA) - B A|| / ||mean(BA)||, with the weights of the replies and the combined factors."""
        adapters, net = find_adapters(round.net.module), round.net
        personal, moving = net.names_with_role("personal"), net.names_with_role("shared")
        if round.telling.silent or any(x.a in personal or x.b in personal for x in adapters):
            return params, state
        residue = 0.0
        if any(x.a in moving and x.b in moving for x in adapters):
            models = [read_reply_model(reply, adapters, round) for reply in round.replies]
            residue = compute_residue(models, round.weights.tolist(), params, adapters, net)
        round.tell("residue", residue)
        return params, state
