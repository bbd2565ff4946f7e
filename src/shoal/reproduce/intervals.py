"""Confidence intervals over seeds."""

from collections.abc import Sequence
from math import sqrt
from statistics import stdev

STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""For 1, 2, 3, ... degrees of freedom, half of a 95 % interval in standard errors (Student's t)."""


def compute_interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean; None of fewer than two values."""
    if len(values) < 2:
        return None
    return find_student_factor(len(values) - 1) * stdev(values) / sqrt(len(values))


def find_student_factor(freedom: int) -> float:
    """Beyond the table by the first two terms of its expansion in 1 / degrees of freedom, good to three digits."""
    if freedom <= len(STUDENT_95):
        return STUDENT_95[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
