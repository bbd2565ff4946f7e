"""A checkpoint of a run: what it holds after a number of rounds, as a tree for the file and back from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan, Slicer
from shoal.core.model.tree import Tree
from shoal.core.server_state import ServerState
from shoal.storage.memory import MemoryVersion

FORMAT = 2
"""The version of what a checkpoint file holds. Files of former versions are read, those of later ones refused."""
RESERVED: dict[str, Any] = {"in_flight": [], "clock": 0.0, "charges": []}
"""Keys for what later versions will store (jobs on their way, simulated time, privacy spent), and what they hold in
this one; a file in which they hold more cannot be continued by this version."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after a number of complete rounds."""

    rounds: int
    server_state: ServerState
    cuts: list[tuple[Slicer, Plan]]
    """Each pruning so far: the slicer of the net before it, and the plan of what it kept."""
    memory: list[MemoryVersion]
    lines: bytes
    """The rows of the history up to then; none in checkpoints of former versions."""


def make_checkpoint_tree(
    fingerprint: str, rounds: int, server_state: ServerState, memory: Sequence[MemoryVersion], lines: bytes | bytearray
) -> dict[str, Any]:
    """The contents of a checkpoint file: server state, index of device memories and history after so many rounds."""
    return {
        "format": FORMAT,
        "recipe": fingerprint,
        "rounds": rounds,
        "model_digest": server_state.net.digest,
        "params": server_state.params,
        "states": server_state.states,
        "cards": server_state.cards,
        "cuts": describe_cuts(server_state.cuts),
        "memory": {"versions": [list(version) for version in memory]},
        "history": torch.frombuffer(bytearray(lines), dtype=torch.uint8),
        **RESERVED,
    }


def describe_cuts(cuts: Sequence[Plan]) -> list[dict[str, Any]]:
    """Prunings as a file holds them."""
    return [{"kept": dict(cut.kept), "masks": dict(cut.masks)} for cut in cuts]


def check_format(content: Tree) -> None:
    """Raise a ValueError where a checkpoint is of a later version, or holds what only a later one can continue."""
    version = content["format"]
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise ValueError(f"its format is {version}, this version reads 1 to {FORMAT}")
    for key, empty in RESERVED.items():
        if version > 1 and content[key] != empty:
            raise ValueError(f"it holds {key}, which this version cannot continue")


def restore_checkpoint(content: Tree, net: Net, parts: set[str]) -> Checkpoint:
    """The checkpoint of a tree, with the net pruned as it was then; a ValueError says what is wrong with it."""
    rounds, cards = content["rounds"], content["cards"]
    versions = [MemoryVersion(*version) for version in content["memory"]["versions"]]
    if type(rounds) is not int or rounds < 0:
        raise ValueError("its number of rounds is no such number")
    if not isinstance(content["states"], dict) or set(content["states"]) != parts:
        raise ValueError("its states are not those of the method's parts")
    if not isinstance(cards, dict) or not all(type(d) is int and isinstance(c, dict) for d, c in cards.items()):
        raise ValueError("its cards are not those of devices")
    for version in versions:
        if any(type(n) is not int for n in version) or version.round >= rounds or version.cuts > len(content["cuts"]):
            raise ValueError("its index of memories does not fit")
    lines = content.get("history", torch.empty(0, dtype=torch.uint8))
    if not isinstance(lines, Tensor) or lines.dtype != torch.uint8 or lines.dim() != 1:
        raise ValueError("its history is no text")
    cuts, plans = [], []
    for cut in content["cuts"]:
        plan = Plan(cut["kept"], cut["masks"])
        cuts.append((net.slicer, plan))
        plans.append(plan)
        net = net.cut(plan)
    params, states = tree.map_tensors(lambda t: t.to(net.place), [content["params"], content["states"]])
    if {k: (v.shape, v.dtype) for k, v in params.items()} != {k: (v.shape, v.dtype) for k, v in net.initial.items()}:
        raise ValueError("its tensors are not those of the model")
    server_state = ServerState(net, params, states, cards, tuple(plans))
    return Checkpoint(rounds, server_state, cuts, versions, lines.numpy().tobytes())
