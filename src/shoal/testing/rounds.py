"""Playing rounds of a loop, and comparing what came of them: for laws and tests."""

from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.model import tree
from shoal.core.model.tree import Tree
from shoal.core.optimiser import Optimiser
from shoal.core.part import Part
from shoal.core.round import Loop
from shoal.core.server_state import ServerState
from shoal.core.session import Session, play_round
from shoal.core.task import Engine
from shoal.engines.host import LocalDevices
from shoal.plugins.smoke_run import SmokeSetup, build_tiny_run

ROUNDS = 3
"""How many rounds a law plays, unless it needs more."""


DECAY = 0.1


def play_rounds(loop: Loop, server_state: ServerState, first: int, rounds: int) -> tuple[ServerState, list[Row]]:
    """Rounds `first` to `rounds`, each of them kept."""
    session = Session(loop, server_state.net, server_state, first)
    rows = [play_round(session) for _ in range(first, rounds)]
    return session.server_state or server_state, rows


def assert_trees_close(a: Tree, b: Tree, tolerance: float, message: str) -> None:
    actual, expected = list(tree.collect_tensors(a)), list(tree.collect_tensors(b))
    assert len(actual) == len(expected), f"{message}: {len(actual)} tensors instead of {len(expected)}"
    for x, y in zip(actual, expected):
        assert x.shape == y.shape, message
        difference = (x.double() - y.double()).abs().max().item() if x.numel() else 0.0
        assert difference <= tolerance, f"{message}: {difference:.2e} apart"


def drop_wall_seconds(row: Row) -> Row:
    return {k: v for k, v in row.items() if k != "wall_seconds"}


def start_tiny_run(
    part: Part, sizes: tuple[int, ...], engine: Engine, setting: SmokeSetup
) -> tuple[Loop[LocalDevices], ServerState]:
    """A run in miniature before its first round, with local momentum unless the part refuses that.

    Without weight decay the gradients for its two classes would be opposite numbers, and which of two elements of one
    size a method keeps would be left to rounding.
    """
    method = Method((part,))
    try:
        optimiser = Optimiser(momentum=0.5, weight_decay=DECAY)
        loop, net = build_tiny_run(method, sizes, engine=engine, setting=setting, optimiser=optimiser)
        return loop, loop.start(net)
    except ShoalError as error:
        if error.kind.name != "clash":
            raise
    optimiser = Optimiser(weight_decay=DECAY)
    loop, net = build_tiny_run(method, sizes, engine=engine, setting=setting, optimiser=optimiser)
    return loop, loop.start(net)
