"""Window: the model that is judged is the mean of the last rounds' models (Caldarola et al. 2023, arXiv:2310.01366)."""

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.float_tensors import select_float_tensors


@dataclass(frozen=True)
class Window(Part):
    """Judges the plain mean of the models of the last rounds (window-based model averaging, WiMA).

    `rounds` is how many of them. The server and its checkpoint hold at most `blocks` tensors for each of the model:
    sums over ceil(rounds / blocks) rounds each. The oldest sum is dropped as a whole when there would be more rounds
    in all than `rounds`, so up to ceil(rounds / blocks) - 1 of the oldest may be missing; with `blocks` as large as
    `rounds` none ever is. Training goes on from the ordinary model and does not notice; nothing travels.
    """

    cite: ClassVar = ("caldarola2023wima",)
    neutral: ClassVar = Neutral({"rounds": 1})

    rounds: int = 100
    blocks: int = 10

    def __post_init__(self):
        require(self, "rounds >= 1 and blocks >= 1", self.rounds >= 1 and self.blocks >= 1)

    def init_server(self, round: Round) -> Tree:
        return {"blocks": []}

    def observe(self, judged: Params, state: Tree, round: Round) -> Tree:
        total, count, blocks = select_float_tensors(judged), 1, list(state["blocks"])
        if blocks and blocks[-1]["count"] < -(-self.rounds // self.blocks):
            newest = blocks.pop()
            total, count = tree.add_params(newest["sum"], total), newest["count"] + 1
        blocks.append({"sum": total, "count": count})
        return {"blocks": blocks[1:] if count_rounds(blocks) > self.rounds else blocks}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        if not state["blocks"]:
            return judged
        total, count = (
            reduce(tree.add_params, [block["sum"] for block in state["blocks"]]),
            count_rounds(state["blocks"]),
        )
        return judged | {"": judged[""] | {k: value / count for k, value in total.items()}}


def count_rounds(blocks: list[dict[str, Any]]) -> int:
    """How many models are in these sums."""
    return sum(block["count"] for block in blocks)
