"""The laws catch what they are there for: each planted fault is found."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.core.part import Neutral, Part
from shoal.testing.laws import check_part, check_resumes_exactly


@dataclass(frozen=True)
class Forgets(Part):
    """Its string does not make it again."""

    size: float = 1.0

    def __str__(self) -> str:
        return "forgets(size=2.0)"


@dataclass(frozen=True)
class Mutates(Part):
    def serve(self, params, state, round):
        params["a.bias"].add_(1)
        return params, state


@dataclass(frozen=True)
class Branches(Part):
    def objective(self, inner, local):
        def score(params, batch):
            scored = inner(params, batch)
            return scored if scored.loss > 0 else scored._replace(loss=scored.loss * 2)

        return score


@dataclass(frozen=True)
class CountsPadding(Part):
    """Uses the plain mean over a batch, which padding changes."""

    replaces_loss: ClassVar = True

    def objective(self, inner, local):
        def score(params, batch):
            scored = inner(params, batch)
            return scored._replace(loss=scored.logits.square().mean())

        return score


@dataclass(frozen=True)
class LossyCodec(Part):
    """Rounds, and says that it does not."""

    stage: ClassVar = "quantise"

    def encode(self, message, memory, link):
        return message.with_values(**{k: e["value"].half() for k, e in message.body.items()}), memory

    def decode(self, message, link):
        return message.with_values(**{k: e["value"].double() for k, e in message.body.items()})


@dataclass(frozen=True)
class NotNeutral(Part):
    neutral: ClassVar = Neutral({})

    def step(self, update, state, scored, local):
        return {k: u * 1.001 for k, u in update.items()}, state


@dataclass(frozen=True)
class KeepsSecrets(Part):
    """Keeps something that no checkpoint sees."""

    seen: ClassVar[list] = []

    def serve(self, params, state, round):
        self.seen.append(round.number)
        return {k: v + len(self.seen) * 1e-3 for k, v in params.items()}, state


@dataclass(frozen=True)
class HidesBytes(Part):
    """Sends more than the message says."""

    def measure(self, params, state, device):
        return {"wide": torch.zeros(1).expand(7)}


@dataclass(frozen=True)
class Bends(Part):
    def step(self, update, state, scored, local):
        return {k: u.sum() for k, u in update.items()}, state


@dataclass(frozen=True)
class GrowsState(Part):
    def step(self, update, state, scored, local):
        return update, state | {"new": scored.loss}


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (Forgets(), "expression"),
        (Mutates(), "changes what it is given"),
        (Branches(), "branches"),
        (CountsPadding(), "padding"),
        (LossyCodec(), "further off"),
        (NotNeutral(), "not neutral"),
        (KeepsSecrets(), "on another engine"),
        (Bends(), "has shape"),
        (GrowsState(), "another form"),
    ],
    ids=lambda p: p.name() if isinstance(p, Part) else "",
)
def test_a_planted_fault_is_found(part, found):
    with pytest.raises((AssertionError, ShoalError), match=found):
        check_part(part)


def test_a_secret_is_also_missed_after_a_resume():
    with pytest.raises(AssertionError, match="after a resume"):
        check_resumes_exactly(KeepsSecrets())


def test_expanded_tensors_count_as_what_would_travel():
    check_part(HidesBytes())


def test_a_wrong_ledger_is_found(monkeypatch):
    from shoal.core import round
    from shoal.testing.laws import check_bytes_are_what_travels

    honest = round.compute_round_cost
    boast = {"bytes_down": 1}
    monkeypatch.setattr(
        round, "compute_round_cost", lambda *a: (row := honest(*a)) | {k: row[k] + v for k, v in boast.items()}
    )
    with pytest.raises(AssertionError, match="ledger"):
        check_bytes_are_what_travels(replace(NotNeutral()))
