"""The end of a round on the server: weigh -> combine -> serve -> prune, with every reply that can be used."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.aggregate import aggregate_holders
from shoal.core.compose import Method
from shoal.core.faulty_replies import NotFinite, use_without_culprits
from shoal.core.model import tree
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Tree
from shoal.core.server_state import ServerState
from shoal.core.types import SERVER, Reply, Round

log = logging.getLogger("shoal")


@dataclass(frozen=True, eq=False)
class ServerUpdate:
    """What the server made of some replies."""

    round: Round
    after: ServerState
    void: bool
    """Whether nothing could be made of them: the model and the states are those before."""


def update_with_usable(
    method: Method,
    standing: ServerState,
    round: Round,
    states: dict[str, Tree],
    rehearse: Callable[[ServerUpdate], None] | None,
) -> tuple[ServerUpdate, dict[int, str]]:
    """What becomes of the replies, and, by device, why a reply was left out that nothing could be made with.

    Where devices are elsewhere, `rehearse` raises what the next round would raise; a reply that makes it raise is
    left out too.
    """
    others = [r for r in round.replies if r.device != SERVER]
    untrusted, refused = rehearse is not None, dict[int, str]()

    def update_with(some: list[Reply]) -> ServerUpdate:
        kept = {SERVER, *(r.device for r in some)}
        return update_server(
            method, standing, replace(round, replies=[r for r in round.replies if r.device in kept]), states
        )

    def check_next_round(made: ServerUpdate) -> ServerUpdate:
        if rehearse and not made.void:
            if tree.is_tree_finite(states) and not tree.is_tree_finite(made.after.states):
                raise NotFinite("a state of the server is not finite")
            rehearse(made)
        return made

    def update_without_culprits(use: Callable[[list[Reply]], ServerUpdate]) -> ServerUpdate:
        left = [r for r in others if r.device not in refused]
        made, why = use_without_culprits(left, use, lambda reply: tree.outline_tree(reply.report), untrusted)
        refused.update({left[at].device: text for at, text in why.items()})
        return made

    try:
        made = update_without_culprits(update_with)
    except NotFinite:
        made = ServerUpdate(round, replace(standing, states=states), True)
    try:
        check_next_round(made)
    except Exception:
        with suppress(Exception):  # where no reply is to blame, the next round itself will tell what is wrong
            made = update_without_culprits(lambda some: check_next_round(update_with(some)))
    for device, why in refused.items():
        log.warning("device %d, round %d: %s", device, round.number, why)
    return made, refused


def update_server(method: Method, standing: ServerState, round: Round, states: dict[str, Tree]) -> ServerUpdate:
    """weigh -> combine -> serve -> prune."""
    weights, new_states = normalise_weights(method, round, states)
    if weights is None:
        return ServerUpdate(round, replace(standing, states=states), True)
    round = replace(round, weights=weights)
    params, new_states = method.combine(lambda: aggregate_holders(round), new_states, round)
    params, new_states = method.serve(params, new_states, round)
    if not tree.is_tree_finite(params):
        raise NotFinite("the new model is not finite")
    return ServerUpdate(round, prune_model(method, replace(standing, params=params, states=new_states), round), False)


def normalise_weights(method: Method, round: Round, states: dict[str, Tree]) -> tuple[Tensor | None, dict[str, Tree]]:
    """Weights that sum to 1, or None when nobody is left who counts."""
    if not round.replies:
        return None, states
    sizes = [0 if r.device == SERVER else r.size for r in round.replies]
    weights, states = method.weigh(torch.tensor(sizes, dtype=torch.float64), states, round)
    return (weights / weights.sum() if weights.sum() > 0 else None), states


def prune_model(method: Method, standing: ServerState, round: Round) -> ServerState:
    """A smaller model where a part asks for one; every state shaped like it is cut along."""
    plan, states = method.prune(WHOLE_MODEL, standing.states, replace(round, params=standing.params))
    if not plan:
        return replace(standing, states=states)
    net, slicer = standing.net.cut(plan), standing.net.slicer
    params, states = slicer.take(standing.params, plan), slicer.cut_tree(states, plan)
    return replace(standing, net=net, params=params, states=states, cuts=(*standing.cuts, plan))
