"""The loss of what a device trains beside the model: it gives gradients, and is no part of the loss that is told."""

from torch import Tensor

from shoal.core.batch import BatchScore


def add_side_loss(scored: BatchScore, loss: Tensor) -> BatchScore:
    """The score with the gradient of a further loss, but not its value: others report, and choose, by the model's."""
    return scored._replace(loss=scored.loss + (loss - loss.detach()))
