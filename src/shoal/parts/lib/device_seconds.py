"""Seconds that a device takes for a round by its profile, as the server can work them out."""

from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.types import Reply, Round


def estimate_reply_seconds(reply: Reply, round: Round) -> float:
    """How long a device took, by its profile: its slice down, its work, its answer up."""
    net: Net = round.net
    sent = net.slicer.take(tree.select_params(reply.anchor, net.names_with_role("shared", "server")), reply.plan)
    outcome = reply.outcome
    up = outcome.message.nbytes if outcome.message is not None else 0
    return (
        round.fleet.get_profile(reply.device, reply.round)
        .estimate_times(tree.count_tree_bytes(sent), outcome.macs_work, up)
        .total
    )


def predict_seconds(device: int, round: Round) -> float:
    """How long a device would take in this round: the model both ways, and a forward and a backward per sample."""
    net, work = round.net, round.work
    nbytes = tree.count_tree_bytes(tree.select_params(round.anchor, net.names_with_role("shared", "server")))
    samples = work.steps * work.batch if work.steps else work.epochs * int(round.sizes[device])
    return (
        round.fleet.get_profile(device, round.number)
        .estimate_times(nbytes, int(3 * samples * net.macs_forward), nbytes)
        .total
    )
