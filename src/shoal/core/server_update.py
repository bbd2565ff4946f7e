"""The end of a round on the server: weigh -> combine -> serve -> prune, with every reply that can be used."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.aggregate import holders_mean
from shoal.core.compose import Method
from shoal.core.faulty_replies import NotFinite, use_without_culprits
from shoal.core.model import tree
from shoal.core.model.plan import WHOLE
from shoal.core.model.tree import Tree
from shoal.core.server_state import Standing
from shoal.core.types import SERVER, Reply, Round

log = logging.getLogger("shoal")


@dataclass(frozen=True, eq=False)
class Conclusion:
    """What the server made of some replies."""

    round: Round
    after: Standing
    void: bool
    """Whether nothing could be made of them: the model and the states are those before."""


def conclude_with_usable(
    method: Method,
    standing: Standing,
    round: Round,
    states: dict[str, Tree],
    rehearse: Callable[[Conclusion], None] | None,
) -> tuple[Conclusion, dict[int, str]]:
    """What becomes of the replies, and, by device, why a reply was left out that nothing could be made with.

    Where devices are elsewhere, `rehearse` raises what the next round would raise; a reply that makes it raise is
    left out too.
    """
    others = [r for r in round.replies if r.device != SERVER]
    untrusted, refused = rehearse is not None, dict[int, str]()

    def conclude_with(some: list[Reply]) -> Conclusion:
        kept = {SERVER, *(r.device for r in some)}
        return conclude(
            method, standing, replace(round, replies=[r for r in round.replies if r.device in kept]), states
        )

    def check_next_round(made: Conclusion) -> Conclusion:
        if rehearse and not made.void:
            if tree.finite(states) and not tree.finite(made.after.states):
                raise NotFinite("a state of the server is not finite")
            rehearse(made)
        return made

    def usable(use: Callable[[list[Reply]], Conclusion]) -> Conclusion:
        left = [r for r in others if r.device not in refused]
        made, why = use_without_culprits(left, use, lambda reply: tree.outline(reply.report), untrusted)
        refused.update({left[at].device: text for at, text in why.items()})
        return made

    try:
        made = usable(conclude_with)
    except NotFinite:
        made = Conclusion(round, replace(standing, states=states), True)
    try:
        check_next_round(made)
    except Exception:
        with suppress(Exception):  # where no reply is to blame, the next round itself will tell what is wrong
            made = usable(lambda some: check_next_round(conclude_with(some)))
    for device, why in refused.items():
        log.warning("device %d, round %d: %s", device, round.number, why)
    return made, refused


def conclude(method: Method, standing: Standing, round: Round, states: dict[str, Tree]) -> Conclusion:
    """weigh -> combine -> serve -> prune."""
    weights, new_states = normalised_weights(method, round, states)
    if weights is None:
        return Conclusion(round, replace(standing, states=states), True)
    round = replace(round, weights=weights)
    params, new_states = method.combine(lambda: holders_mean(round), new_states, round)
    params, new_states = method.serve(params, new_states, round)
    if not tree.finite(params):
        raise NotFinite("the new model is not finite")
    return Conclusion(round, prune_model(method, replace(standing, params=params, states=new_states), round), False)


def normalised_weights(method: Method, round: Round, states: dict[str, Tree]) -> tuple[Tensor | None, dict[str, Tree]]:
    """Weights that sum to 1, or None when nobody is left who counts."""
    if not round.replies:
        return None, states
    sizes = [0 if r.device == SERVER else r.size for r in round.replies]
    weights, states = method.weigh(torch.tensor(sizes, dtype=torch.float64), states, round)
    return (weights / weights.sum() if weights.sum() > 0 else None), states


def prune_model(method: Method, standing: Standing, round: Round) -> Standing:
    """A smaller model where a part asks for one; every state shaped like it is cut along."""
    plan, states = method.prune(WHOLE, standing.states, replace(round, params=standing.params))
    if not plan:
        return replace(standing, states=states)
    net, slicer = standing.net.cut(plan), standing.net.slicer
    params, states = slicer.take(standing.params, plan), slicer.cut_tree(states, plan)
    return replace(standing, net=net, params=params, states=states, cuts=(*standing.cuts, plan))
