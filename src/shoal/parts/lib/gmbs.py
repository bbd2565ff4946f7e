"""GMBS, greedy-based model blocks selection: a bandit per device picks how many of the last blocks it is sent.

Liu et al. 2023 (FedBR), Algorithm 1 and eq. (19)-(24).
"""

from collections.abc import Mapping
from math import exp, isfinite, log, sqrt
from typing import TypeAlias

import numpy as np

Bandit: TypeAlias = dict[str, list[float]]
"""Of one device k, by number of blocks m: `p` the running mean of its feedback, `n` how often m was picked."""


def make_bandit(arms: int) -> Bandit:
    """p_k = 0 and n_k = 0, for m = 1 .. arms."""
    return {"p": [0.0] * arms, "n": [0.0] * arms}


def pick_block_count(arm: Bandit, round: int) -> int:
    """alpha_k = argmax_m V_k,m with V_k,m = p_k,m + sqrt(ln(t + 1)) / (n_k,m + 1), eq. (24); of equal ones the first.

    The paper's t counts rounds from 1, `round` from 0.
    """
    bonus = sqrt(log(round + 2))
    decision = [p + bonus / (n + 1) for p, n in zip(arm["p"], arm["n"])]
    return int(np.argmax(decision)) + 1


def count_pick(arm: Bandit, blocks: int) -> Bandit:
    """n_k,m + 1 for the number of blocks m that was sent (line 8)."""
    return arm | {"n": [n + (i + 1 == blocks) for i, n in enumerate(arm["n"])]}


def reward_pick(arm: Bandit, blocks: int, reward: float, rate: float) -> Bandit:
    """p_k,m = lambda r_k,m + (1 - lambda) p_k,m for the number m that was sent, eq. (23); `rate` is lambda."""
    p = [rate * reward + (1 - rate) * p if i + 1 == blocks else p for i, p in enumerate(arm["p"])]
    return arm | {"p": p}


def compute_block_rewards(
    distance: Mapping[int, float],
    loss_drop: Mapping[int, float],
    link_seconds: Mapping[int, float],
    work_seconds: Mapping[int, float],
) -> dict[int, float]:
    """By device, the feedback r_k = d_k Delta zeta_L / exp(t'_k,c + t'_k,b), eq. (21).

    d_k is its share of the squared `distance` of local models from the global one, eq. (19); t'_k,b and t'_k,c are its
    shares of the seconds that the round's devices spent on the link and on training, eq. (20).
    """
    d, t_b, t_c = (normalise_shares(values) for values in (distance, link_seconds, work_seconds))
    return {k: d[k] * loss_drop[k] / exp(t_b[k] + t_c[k]) for k in distance}


def normalise_shares(values: Mapping[int, float]) -> dict[int, float]:
    """Each value as a share of their sum; equal shares where the sum is 0 or not finite, since x / 0 says nothing."""
    total = sum(values.values())
    if not (isfinite(total) and total > 0):
        return {d: 1 / len(values) for d in values}
    return {d: v / total for d, v in values.items()}
