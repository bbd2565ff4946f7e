"""GMBS: a bandit for each device that picks how many of the last blocks it is sent."""

from collections.abc import Mapping
from math import exp, isfinite, log, sqrt
from typing import TypeAlias

import numpy as np

Bandit: TypeAlias = dict[str, list[float]]
"""Of one device: `p`, what each number of blocks was worth, and `n`, how often it was picked."""


def make_bandit(arms: int) -> Bandit:
    return {"p": [0.0] * arms, "n": [0.0] * arms}


def pick_block_count(arm: Bandit, round: int) -> int:
    """The number of blocks with the largest p + sqrt(ln(round + 2)) / (n + 1); the smallest of equal ones."""
    bonus = sqrt(log(round + 2))
    worth = [p + bonus / (n + 1) for p, n in zip(arm["p"], arm["n"])]
    return int(np.argmax(worth)) + 1


def count_pick(arm: Bandit, blocks: int) -> Bandit:
    return arm | {"n": [n + (i + 1 == blocks) for i, n in enumerate(arm["n"])]}


def reward_pick(arm: Bandit, blocks: int, reward: float, rate: float) -> Bandit:
    """p of the number that was used moves towards the reward."""
    p = [rate * reward + (1 - rate) * p if i + 1 == blocks else p for i, p in enumerate(arm["p"])]
    return arm | {"p": p}


def compute_block_rewards(
    far: Mapping[int, float], better: Mapping[int, float], link: Mapping[int, float], work: Mapping[int, float]
) -> dict[int, float]:
    """By device: how much it moved away from the mean, times how much its loss fell, less the slower it is."""
    shares = [normalise_shares(own) for own in (far, link, work)]
    return {d: shares[0][d] * better[d] / exp(shares[1][d] + shares[2][d]) for d in far}


def normalise_shares(values: Mapping[int, float]) -> dict[int, float]:
    """Shares of the sum; equal ones where there is nothing to share."""
    total = sum(values.values())
    if not (isfinite(total) and total > 0):
        return {d: 1 / len(values) for d in values}
    return {d: v / total for d, v in values.items()}
