"""Data-sharing: devices train on their own samples and a copy of the server's (Zhao et al. 2018, arXiv:1806.00582)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.streams import RandomStreams, part_stream_name
from shoal.core.types import SERVER, Device, Round
from shoal.parts.lib.checks import require, require_one_tensor, require_server

WHOLE_NUMBERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class DataSharing(Part):
    """Devices train on their own samples and on a share of the server's, which is drawn for each of them once.

    `share` is how much of the server's samples a device gets, at first contact. They travel as bytes and are counted; a
    simulated device then reads the same rows of the data set, since it is there already.
    """

    cite: ClassVar = ("zhao2018noniid",)
    neutral: ClassVar = Neutral({"share": 0.0})

    share: float = 1.0

    def __post_init__(self):
        require(self, "0 <= share <= 1", 0 <= self.share <= 1)

    def model(self, net: Net) -> Net:
        require_one_tensor(self, net, "sends devices")
        return net

    def init_server(self, round: Round) -> Tree:
        require_server(self, round, "hands out")
        return {"has": torch.zeros(round.population, dtype=torch.bool)}

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        new = [d for d in round.devices if d != SERVER and not state["has"][d]]
        assert round.server is not None
        count = self.count_shared(round.server)
        if not new or not count:
            return {}, state
        everything = round.server.take_all()
        (inputs, extent), labels = quantise_inputs(everything.inputs), shrink_integers(everything.targets[0][0])
        places = {d: draw_shared_rows(round.streams, self.name(), d, len(labels), count) for d in new}
        return {d: {"inputs": inputs[at], "labels": labels[at], "extent": extent} for d, at in places.items()}, state

    def data(self, samples: Samples, memory: Tree, device: Device) -> Samples:
        assert device.shared is not None
        if device.id == SERVER:
            return samples
        at = draw_shared_rows(
            device.streams, self.name(), device.id, len(device.shared), self.count_shared(device.shared)
        )
        return samples.join(replace(device.shared, index=device.shared.index[at]))

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        here = torch.tensor([r.device for r in round.replies if r.device != SERVER], dtype=torch.long)
        return params, {"has": state["has"].index_fill(0, here, True)}

    def count_shared(self, samples: Samples) -> int:
        return round(self.share * len(samples))


def draw_shared_rows(streams: RandomStreams, part: str, device: int, size: int, count: int) -> Tensor:
    """Which of the server's samples a device gets; both ends can draw it."""
    generator = streams.make_torch_generator(part_stream_name(part, "share"), 0, device)
    return torch.randperm(size, generator=generator)[:count].sort().values


def quantise_inputs(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs as one of 256 levels between the least and the largest of each channel, and those; words as they are."""
    if not inputs.is_floating_point():
        return shrink_integers(inputs), torch.zeros(0)
    over = [0, *range(2, inputs.dim())]
    low, high = inputs.amin(over, keepdim=True), inputs.amax(over, keepdim=True)
    # a channel of one single value has no range to divide by
    level = (inputs - low) / (high - low).clamp(min=torch.finfo(inputs.dtype).tiny) * 255
    return level.round().to(torch.uint8), torch.stack((low.flatten(), high.flatten())).float()


def shrink_integers(whole: Tensor) -> Tensor:
    """Whole numbers in the fewest bytes; real ones, the targets of a regression, as they are."""
    if whole.is_floating_point():
        return whole
    low, high = int(whole.min()), int(whole.max())
    return whole.to(next(t for t in WHOLE_NUMBERS if torch.iinfo(t).min <= low and high <= torch.iinfo(t).max))
