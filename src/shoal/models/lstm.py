"""The language model of FedBIAD: two LSTM layers of 300 units (7,454,800 parameters with 10,000 words)."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Block, Cut, make_output_rows


class LSTM(nn.Module):
    """One layer with the numbers of `nn.LSTM`, in plain operations.

    So it can be cut, since its sizes are those of its weights; be counted; and go through `vmap` and two derivatives,
    which the fused kernels cannot.
    """

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, positions, inputs) to (batch, positions, hidden), from a state of zeros."""
        recurrent = self.weight_hh.t()
        outputs: list[Tensor] = []
        h = c = x.new_zeros(x.shape[0], recurrent.shape[0])
        for given in F.linear(x, self.weight_ih, self.bias_ih + self.bias_hh).unbind(1):
            i, f, g, o = torch.addmm(given, h, recurrent).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)


def lstm(input_shape: tuple[int, ...], classes: int, width: int = 300, words: int = 0) -> Net:
    """embedding(300) LSTM(300) LSTM(300) fc: the next word at every position; inputs are numbers of words.

    Where classes are no words, `words` is how many of these there are.
    """
    if len(input_shape) != 1:
        problem = f"The language model needs sequences of words, got inputs of shape {tuple(input_shape)}."
        raise ShoalError("no-data", problem, "Use --model lenet for images.")
    words = max(words, classes)
    module = nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(words, width),
            lstm1=LSTM(width, width),
            lstm2=LSTM(width, width),
            fc=nn.Linear(width, classes),
        )
    )
    axes = (
        Axis("embed", width, (Cut("embed.weight", 1), Cut("lstm1.weight_ih", 1, reads=True))),
        Axis("lstm1", width, (*list_unit_cuts("lstm1"), Cut("lstm2.weight_ih", 1, reads=True))),
        Axis("lstm2", width, (*list_unit_cuts("lstm2"), Cut("fc.weight", 1, reads=True))),
    )
    blocks = (
        Block("embed", ("embed",)),
        Block("lstm1", ("lstm1",)),
        Block("lstm2", ("lstm2",)),
        Block("head", ("fc",)),
    )
    rows = (
        Axis("embed:embedding", words, (Cut("embed.weight", 0),)),
        *(row for layer in ("lstm1", "lstm2") for row in list_gate_rows(layer, width)),
        make_output_rows("fc", classes),
    )
    return Net(module, input_shape, classes, axes, blocks, token_inputs=True, rows=rows)


def list_gate_rows(layer: str, width: int) -> tuple[Axis, ...]:
    """The rows of a layer's two matrices, one by one, and those of the recurrent one by hidden unit."""
    return (
        Axis(f"{layer}:recurrent", 4 * width, (Cut(f"{layer}.weight_hh", 0),)),
        Axis(f"{layer}:cells", width, (Cut(f"{layer}.weight_hh", 0, copies=4),)),
        Axis(f"{layer}:input", 4 * width, (Cut(f"{layer}.weight_ih", 0),)),
    )


def list_unit_cuts(layer: str) -> tuple[Cut, ...]:
    """A hidden unit has a row in each of the four gates, and a column that the layer itself reads at the next position.

    Without them its cell stays at 0, and so does what it tells.
    """
    rows = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return (*(Cut(f"{layer}.{key}", 0, copies=4) for key in rows), Cut(f"{layer}.weight_hh", 1, reads=True))
