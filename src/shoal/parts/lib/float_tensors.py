"""The tensors of a model that can be averaged: weights and statistics, but no counters."""

from collections.abc import Mapping

from torch import Tensor

from shoal.core.model.tree import Params


def select_float_tensors(params: Mapping[str, Tensor]) -> Params:
    """Those of floating point."""
    return {name: value for name, value in params.items() if value.is_floating_point()}
