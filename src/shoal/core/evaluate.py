"""How good a model is on a test set."""

from dataclasses import dataclass

import torch

from shoal.core.net import Net
from shoal.core.train import sample_losses
from shoal.core.tree import Params
from shoal.core.types import Samples


@dataclass(frozen=True, eq=False)
class Judge:
    """Accuracy and mean loss over all samples of a test set."""

    samples: Samples
    chunk: int = 1024

    @torch.no_grad()
    def __call__(self, net: Net, params: Params) -> dict[str, float]:
        right, loss, positions = 0.0, 0.0, 0
        for rows in self.samples.index.split(self.chunk):
            batch = self.samples.batch(rows)
            logits = net.apply(params, batch.inputs)[0]
            targets = batch.targets[0][0]
            right += float((logits.argmax(-1) == targets).sum())
            loss += float(sample_losses(logits, targets).double().sum())
            positions += targets.numel()
        return {"accuracy": right / max(positions, 1), "loss": loss / max(len(self.samples), 1)}
