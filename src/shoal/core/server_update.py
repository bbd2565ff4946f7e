"""The server's update of the global model (sift to observe) from every reply that can be used."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.aggregate import average_replies
from shoal.core.compose import Method
from shoal.core.faulty_replies import NotFinite, use_without_culprits
from shoal.core.model import tree
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Tree
from shoal.core.phases import in_phase
from shoal.core.server_state import MissingEnrolment, ServerState
from shoal.core.types import SERVER, Reply, Round

log = logging.getLogger("shoal")


@dataclass(frozen=True, eq=False)
class ServerUpdate:
    """The server state after a round, and the round with the replies and weights that led to it."""

    round: Round
    after: ServerState
    void: bool
    """Whether no reply could be used: the model and the states are those before the round."""


@in_phase("combine")
def update_with_usable(
    method: Method,
    server_state: ServerState,
    round: Round,
    states: dict[str, Tree],
    rehearse: Callable[[ServerUpdate], None] | None,
) -> tuple[ServerUpdate, dict[int, str]]:
    """The update from all usable replies, and, by device, why a reply was left out.

    Where devices are untrusted, `rehearse` raises what the next round would raise; a reply that makes it raise is left
    out too. None where devices are trusted.
    """
    device_replies = [r for r in round.replies if r.device != SERVER]
    untrusted, refused = rehearse is not None, dict[int, str]()

    def update_with(replies: list[Reply]) -> ServerUpdate:
        used = {SERVER, *(r.device for r in replies)}
        return update_server(
            method,
            server_state,
            replace(round, replies=[r for r in round.replies if r.device in used], telling=round.telling.copy()),
            states,
        )

    def check_next_round(update: ServerUpdate) -> ServerUpdate:
        if rehearse and not update.void:
            if tree.is_tree_finite(states) and not tree.is_tree_finite(update.after.states):
                raise NotFinite("a state of the server is not finite")
            rehearse(update)
        return update

    def update_without_culprits(use: Callable[[list[Reply]], ServerUpdate]) -> ServerUpdate:
        while True:
            remaining = [r for r in device_replies if r.device not in refused]
            try:
                update, reasons = use_without_culprits(
                    remaining, use, lambda reply: tree.outline_tree(reply.report), untrusted
                )
                break
            except MissingEnrolment as error:
                strangers = {r.device for r in remaining} & {*error.devices}
                if not strangers:
                    raise
                refused.update(dict.fromkeys(strangers, "it did not introduce itself as declared"))
        refused.update({remaining[position].device: text for position, text in reasons.items()})
        return update

    try:
        update = update_without_culprits(update_with)
    except NotFinite:
        update = ServerUpdate(round, replace(server_state, states=states), True)
    try:
        check_next_round(update)
    except Exception:
        with suppress(Exception):  # where no reply is to blame, the next round itself will tell what is wrong
            update = update_without_culprits(lambda replies: check_next_round(update_with(replies)))
    for device, why in refused.items():
        log.warning("device %d, round %d: %s", device, round.number, why)
    return update, refused


def update_server(method: Method, server_state: ServerState, round: Round, states: dict[str, Tree]) -> ServerUpdate:
    """sift -> weigh -> combine -> serve -> prune -> observe; raises NotFinite where the new model is not finite."""
    replies, new_states = method.sift(round.replies, states, round)
    round = replace(round, replies=replies)
    weights, new_states = normalise_weights(method, round, new_states)
    if weights is None:
        return ServerUpdate(round, replace(server_state, states=states), True)
    round = replace(round, weights=weights)
    params, new_states = method.combine(lambda: average_replies(round), new_states, round)
    params, new_states = method.serve(params, new_states, round)
    if not tree.is_tree_finite(params):
        raise NotFinite("the new model is not finite")
    after = prune_model(method, replace(server_state, params=params, states=new_states), round)
    observed = method.observe(after.params, after.states, replace(round, net=after.net, params=after.params))
    return ServerUpdate(round, replace(after, states=observed), False)


def normalise_weights(method: Method, round: Round, states: dict[str, Tree]) -> tuple[Tensor | None, dict[str, Tree]]:
    """Weights of the replies that sum to 1, or None when all are 0 or there are no replies; and the new states."""
    if not round.replies:
        return None, states
    sizes = [0 if r.device == SERVER else r.size for r in round.replies]
    weights, states = method.weigh(torch.tensor(sizes, dtype=torch.float64), states, round)
    return (weights / weights.sum() if weights.sum() > 0 else None), states


def prune_model(method: Method, server_state: ServerState, round: Round) -> ServerState:
    """The server state after `prune`: where a part prunes, the model and the states of parts are cut alike."""
    plan, states = method.prune(WHOLE_MODEL, server_state.states, replace(round, params=server_state.params))
    if not plan:
        return replace(server_state, states=states)
    net, slicer = server_state.net.cut(plan), server_state.net.slicer
    params, states = slicer.take(server_state.params, plan), slicer.cut_tree(states, plan)
    return replace(server_state, net=net, params=params, states=states, cuts=(*server_state.cuts, plan))
