"""The sum h_k of a device's past changes, and its mean over all devices, as FedDyn, FedSpeed and FedSMOO keep them."""

from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.types import SERVER, Device, Round


def recall_change_sum(memory: Tree, params: Params, device: Device) -> Params:
    """h_k as the device remembers it; 0 when it takes part for the first time."""
    return memory.get("h") or tree.make_zeros(tree.select_params(params, device.net.shared_trainable))


def extend_change_sum(h: Params, params: Params, device: Device) -> Params:
    """h_k + w_k - anchor."""
    return {k: v + params[k] - device.anchor[k] for k, v in h.items()}


def extend_mean_change_sum(h: Params, round: Round) -> Params:
    """The mean of h_k over all devices that hold data, after the changes of this round's replies."""
    devices = int((round.sizes > 0).sum())
    for reply in round.replies:
        if reply.device != SERVER:
            h = {k: v + reply.delta[k] / devices if k in reply.delta else v for k, v in h.items()}
    return h


def add_dynamic_pull(gradient: Params, params: Params, anchor: Params, h: Params, strength: float) -> Params:
    """gradient + strength * (w - anchor + h_k), for the tensors of h_k."""
    return gradient | {k: gradient[k] + strength * (params[k] - anchor[k] + v) for k, v in h.items()}
