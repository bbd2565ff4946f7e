"""The pull of a local model towards the one that was received, as FedProx and FedACG have it."""

from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model.tree import Params


def add_proximal_term(inner: Scorer, anchor: Params, strength: float | Tensor) -> Scorer:
    """The objective plus strength/2 |w - anchor|^2."""

    def score_proximal(params: Params, batch: Batch) -> BatchScore:
        scored = inner(params, batch)
        apart = sum((p - anchor[k]).square().sum() for k, p in params.items())
        return scored._replace(loss=scored.loss + strength / 2 * apart)

    return score_proximal
