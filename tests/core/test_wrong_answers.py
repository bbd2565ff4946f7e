"""500 answers that can be read and are wrong, over all methods, in a simulation: none ends a run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.core.expression import parse_method
from shoal.core.model import tree
from shoal.core.types import Job, Outcome
from shoal.core.wire import Message
from shoal.parts import PRESETS, find_shipped_parts
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.hosts import TamperingHost
from shoal.testing.rounds import play_rounds

METHODS = [
    *find_shipped_parts(),
    *PRESETS,
    "feddh(lr_b=1.0, gradient_from='client_grad')",
    "fedad(check=1, force=0, direction='literal')",
    "fedap(at=2)",
    "prunefl(rate=0.3, every=1, change=0.5, half_life=2)",
    "feddst(sparsity=0.5, alpha=0.5, every=1)",
    "scaffold+fedpaq+topk",
    "fednh+heterofl",
    "creff(features=3, match_steps=4, epochs=2, batch=2)+feddrop",
]
SIZES, ROUNDS = (5, 3, 4, 2, 3), 8
assert len(METHODS) * ROUNDS >= 500

MISSHAPEN: list[Callable[[Tensor, Random], Any]] = [
    lambda t, draw: t[None],
    lambda t, draw: t.flatten()[: draw.randrange(1 + t.numel())],
    lambda t, draw: torch.cat((t.flatten(), t.flatten())),
    lambda t, draw: t.new_zeros(draw.randrange(1, 9), draw.randrange(1, 9)),
    lambda t, draw: t.bool(),
    lambda t, draw: None,
]
ODD_NUMBERS: list[Callable[[Tensor, Random], Any]] = [
    lambda t, draw: torch.zeros_like(t),
    lambda t, draw: -t if t.dtype.is_signed else ~t,
    lambda t, draw: torch.full_like(t, draw.choice([1e3, 1e30, 1e38, -1e38]) if t.is_floating_point() else 127),
    lambda t, draw: torch.full_like(t, torch.nan if t.is_floating_point() else 1),
    lambda t, draw: t.flatten()[torch.randperm(t.numel(), generator=torch.Generator().manual_seed(1))].view(t.shape),
    lambda t, draw: {"x": t},
    lambda t, draw: 1,
]


def list_places(node: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to every tensor of a tree of dicts."""
    if isinstance(node, Mapping):
        for name, below in node.items():
            yield from list_places(below, (*way, name))
    else:
        yield way


def spoil_place(node: Any, way: tuple[str, ...], spoil: Callable[[Tensor], Any]) -> Any:
    """The tree with something else at one place; None: nothing there."""
    if not way:
        return spoil(node)
    below = spoil_place(node[way[0]], way[1:], spoil)
    rest = {k: v for k, v in node.items() if k != way[0]}
    return rest if below is None else {**rest, way[0]: below}


def spoil_message(message: Message, draw: Random) -> Message:
    """Extras with anything wrong, or a body of another form; numbers that are wrong in the right form are no fault."""
    extras = list(list_places(message.beside))
    if extras and draw.random() < 0.7:
        wrong, way = draw.choice(MISSHAPEN + ODD_NUMBERS), draw.choice(extras)
        return replace(message, beside=spoil_place(message.beside, way, lambda t: wrong(t, draw)))
    if draw.random() < 0.2:
        return replace(message, beside=message.beside | {draw.choice(["fedavg", "x"]): {"y": torch.ones(2)}})
    wrong, way = draw.choice(MISSHAPEN), draw.choice(list(list_places(message.body)))
    return replace(message, body=spoil_place(message.body, way, lambda t: wrong(t, draw)))


@pytest.mark.whole
@pytest.mark.parametrize("text", METHODS)
def test_no_wrong_answer_ends_a_run(text: str):
    draw, told = Random(text), []

    def lie(job: Job, outcome: Outcome) -> Outcome:
        if job.device != job.round % len(SIZES) or outcome.message is None:
            return outcome
        told.append(job.round)
        return replace(outcome, message=spoil_message(outcome.message, draw), finite=False)

    loop, net = build_tiny_run(parse_method(text, find_shipped_parts(), PRESETS), SIZES)
    loop = replace(loop, host=TamperingHost(loop.host, lie))
    last, rows = play_rounds(loop, loop.start(net), 0, ROUNDS)
    assert len(rows) == ROUNDS and len(told) >= ROUNDS // 2
    assert tree.is_tree_finite(last.params)
    for row in rows:
        assert all(gone["device"] == row["round"] % len(SIZES) for gone in row.get("dropped", [])), row["dropped"]
