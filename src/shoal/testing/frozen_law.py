"""The law about frozen tensors: a frozen layer leaves no trace but in what the model computes."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.core.ledger import Row
from shoal.core.model import tree
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.tree import Tree
from shoal.core.part import Part
from shoal.core.task import Engine
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.plugins.smoke_run import SHARED, SmokeSetup, make_tiny_setup
from shoal.testing.hosts import RecordingHost
from shoal.testing.rounds import assert_trees_close, play_rounds, start_tiny_run

SIZES = (1, 1, 5)


def check_frozen_tensors_stay(part: Part, same_numbers: bool = True) -> None:
    """With a frozen layer before it, a model is sent, remembered and kept as without: nothing has more tensors.

    With `same_numbers`, what is trained on `batched` is the same as on `serial` without that layer, on inputs that went
    through it before; a part that looks at costs, or sends inputs, need not keep this.
    """
    plain = make_tiny_setup(sum(SIZES) + SHARED, part)
    stemmed, stem = add_frozen_stem(plain.net)
    with torch.no_grad():
        seen = replace(plain, inputs=stem(plain.inputs))
    expected, expected_rows = play_recorded(part, seen, SerialEngine())
    actual, rows = play_recorded(part, replace(plain, net=stemmed), BatchedEngine(2))
    assert tree.outline_tree(actual) == tree.outline_tree(expected), f"{part}: a frozen tensor is where none may be"
    if same_numbers:
        assert_trees_close(actual, expected, 1e-9, f"{part} trains to other numbers behind a frozen layer")
    for key in ("bytes_down", "bytes_up"):
        assert [row[key] for row in rows] == [row[key] for row in expected_rows], f"{part}: {key} has frozen tensors"


class FrozenStem(nn.Linear):
    """A linear layer that no part takes for a plain one, to which adapters could be added."""


class FrozenShift(nn.Module):
    """Gives every word the number of the next one."""

    def __init__(self):
        super().__init__()
        self.step = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.step.long()


def add_frozen_stem(net: Net) -> tuple[Net, nn.Module]:
    """The net with a frozen layer before the others, linear or, for texts, a shift of words; and that layer."""
    if net.token_inputs:
        stem = FrozenShift().double()
    else:
        stem = FrozenStem(4, 4).double()
        with torch.no_grad():
            stem.weight.copy_(torch.eye(4) + 0.1)
            stem.bias.fill_(0.1)
    stem.requires_grad_(False)
    module = nn.Sequential()
    module.add_module("stem", stem)
    for name, layer in copy_module(net).named_children():
        module.add_module(name, layer)
    first, *others = net.blocks
    return replace(net, module=module, blocks=(replace(first, children=("stem", *first.children)), *others)), stem


def play_recorded(part: Part, setting: SmokeSetup, engine: Engine) -> tuple[Tree, list[Row]]:
    """What was sent both ways, and what server and devices know after two rounds; and the rows."""
    loop, server_state = start_tiny_run(part, SIZES, engine, setting)
    host = RecordingHost(loop.host)
    server_state, rows = play_rounds(replace(loop, host=host), server_state, 0, 2)
    engine.close()
    sent = [[job.message.body, job.message.beside] for jobs in host.jobs for job in jobs]
    replies = [o.message and [o.message.body, o.message.beside] for outcomes in host.outcomes for o in outcomes]
    memories = [loop.host.memory.get(device) for device in range(len(SIZES))]
    return [server_state.params, server_state.states, memories, sent, replies], rows
