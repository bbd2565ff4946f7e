"""FedKT: the replies' models vote on labels for the server to train on (Li et al. 2021, arXiv:2010.01017)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.local.layer_overrides import override_layers
from shoal.core.local.schedule import make_schedule
from shoal.core.local.step import StepContext, StepRule, advance, compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.feddf import compute_logits, list_teacher_models
from shoal.parts.lib.checks import require, require_server


@dataclass(frozen=True)
class FedKT(Part):
    """The replies' models vote on labels for the server's inputs, and the combined model trains on them.

    It trains as a device would, for `epochs` epochs. Where several classes have most votes, the lowest wins. The
    server's own labels are not used.
    """

    needs_server_model: ClassVar = True
    cite: ClassVar = ("li2021fedkt",)
    needs_class_logits: ClassVar = True
    reads: ClassVar = frozenset({"updates"})
    neutral: ClassVar = Neutral({"epochs": 0})

    epochs: int = 5

    def __post_init__(self):
        require(self, "0 <= epochs <= 1e6", 0 <= self.epochs <= 10**6)

    def init_server(self, round: Round) -> Tree:
        require_server(self, round, "lets models vote on")
        return {}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        if not self.epochs:
            return params, state
        assert round.server is not None
        own = round.server
        labels = vote_labels([compute_logits(round.net, model, own) for model in list_teacher_models(round)])
        targets = own.targets.index_copy(0, own.index.to(own.targets.device), labels.to(own.targets))
        return params | self.train_on_votes(params, replace(own, targets=targets), round), state

    def train_on_votes(self, params: Params, samples: Samples, round: Round) -> Params:
        """Where so many epochs of plain training on these samples take the shared tensors."""
        net, rule = round.net, StepRule(round.net, Method(), round.optimiser)
        generator = torch.Generator().manual_seed(int(round.generator().integers(2**62)))
        work = replace(round.work, epochs=float(self.epochs), steps=0)
        schedule = make_schedule(samples.index, work, generator, net.mixes_batch)
        lr, steps = torch.tensor([work.lr, len(schedule)], dtype=net.dtype, device=net.place).unbind()
        state = rule.init_state(params, {})
        with override_layers(net.has_dropout, False, lambda shape: torch.rand(shape, generator=generator), None):
            for step, rows in enumerate(schedule):
                context = StepContext(params, {}, {"lr": lr, "step": torch.full_like(lr, step), "steps": steps}, {}, {})
                state, _ = advance(rule, state, samples.take_batch(rows), context, compute_autograd_gradient)
        return tree.select_params(state.params, net.shared_trainable) | tree.select_params(
            state.buffers, net.names_with_role("shared")
        )


def vote_labels(logits: Sequence[Tensor]) -> Tensor:
    """The class that most models choose, sample by sample; of several, the lowest."""
    votes = [F.one_hot(one.argmax(-1), one.shape[-1]) for one in logits]
    return torch.stack(votes).sum(0).argmax(-1)
