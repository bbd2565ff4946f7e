"""Which layers of a model get adapters, and what becomes of its last layer."""

from collections.abc import Collection, Mapping

from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.model.low_rank import list_adaptable_layers, list_called_layers
from shoal.core.model.module_copy import set_module_tensors
from shoal.core.model.net import Net


def choose_layers(net: Net, where: str) -> tuple[list[str], bool]:
    """The layers that get adapters, and whether the model's outputs have positions."""
    kept = {name for name, role in net.roles.items() if role in ("personal", "server")}
    layers = [name for name in list_adaptable_layers(net.module) if f"{name}.weight" not in kept]
    body = [name for name in layers if name != net.head_name]
    called, has_positions = list_called_layers(net, layers)
    if not where:
        chosen = [name for name in body if name in called]
        if not chosen:
            problem = "lora finds no linear layer to add to, but the last one, and the model calls no other."
            raise ShoalError("bad-part", problem, "Use a model with linear layers, or name the last one by where.")
        return chosen, has_positions
    ends = [word.strip() for word in where.split(",")]
    by_end = {end: [name for name in layers if f".{name}".endswith(f".{end}") and end] for end in ends}
    for end, names in by_end.items():
        if not names:
            some = ", ".join(list(dict.fromkeys(name.rpartition(".")[2] for name in layers))[:12]) or "none"
            problem = f"lora finds no linear layer whose name ends with {end!r}."
            raise ShoalError("bad-part", problem, f"The linear layers of this model are called {some}.")
        for name in names:
            if name not in called:
                problem = f"lora cannot add to {name}: the model reads its weight and does not call it as a layer."
                raise ShoalError("bad-part", problem, "Leave it out of where.")
    return [name for name in layers if any(name in names for names in by_end.values())], has_positions


def choose_head_role(net: Net, layers: Collection[str], has_positions: bool) -> str:
    """The role of the last linear layer: shared, and frozen where it has an adapter or gives the next word."""
    name = net.head_name
    if not name or name in layers or f"{name}.weight" in (*net.ties, *net.ties.values(), *net.frozen):
        return "frozen"
    outputs = getattr(net.module.get_submodule(name), "out_features", 0)
    words = {m.num_embeddings for m in net.module.modules() if isinstance(m, nn.Embedding)}
    return "frozen" if has_positions and outputs in words else "shared"


def set_head_role(
    net: Net, roles: Mapping[str, str], head: str, asked: bool, factors: Collection[str] = ()
) -> dict[str, str]:
    """These roles with that of the last linear layer; unless it was asked for, tensors of other roles keep theirs.

    `factors` are of an adapter there. The module must be a copy: what shall train becomes a parameter that does.
    """
    if not (head and net.head_name):
        return dict(roles)
    known = (*net.initial, *net.frozen, *net.ties)
    own = {net.ties.get(name, name) for name in known if name.rpartition(".")[0] == net.head_name} - set(factors)
    names = [name for name in own if asked or net.roles.get(name, "shared") in ("shared", "frozen")]
    if head != "frozen":
        set_module_tensors(net.module, {}, {*net.trainable, *names}, net.ties)
    return dict(roles) | dict.fromkeys(names, head)
