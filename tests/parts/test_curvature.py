"""Models whose curvature is measured: attention in its fused forms, recurrent layers, and those that are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.core.batch import Batch
from shoal.core.model.kernels import use_differentiable_kernels
from shoal.models.user_model import build_user_net
from shoal.parts.lib.curvature import FlatLoss

ROWS = 8


class Rows(nn.Module):
    """The rows of an image of a digit as a sequence: a mixture of them, a hidden layer, classes."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer, self.fc1, self.fc2 = mixer, nn.Linear(ROWS, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixer(x.flatten(1, 2))
        return self.fc2(self.fc1((mixed[0] if isinstance(mixed, tuple) else mixed).mean(1)).relu())


class Attention(nn.Module):
    """Self-attention by torch's function."""

    def __init__(self, causal: bool = False):
        super().__init__()
        self.qkv, self.causal = nn.Linear(ROWS, 3 * ROWS), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


class Whole(nn.Module):
    """`nn.MultiheadAttention` without the weights that would keep it from the fused form."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(ROWS, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def encoder(**options) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(ROWS, 2, 12, batch_first=True, **options)


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "function": Attention,
    "causal": lambda: Attention(causal=True),
    "multihead": Whole,
    "encoder layer": encoder,
    "encoder layer, norm first": lambda: encoder(norm_first=True),
    "encoder": lambda: nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False),
    "lstm": lambda: nn.LSTM(ROWS, ROWS, batch_first=True),
}


def loss_of(module: nn.Module) -> FlatLoss:
    net = build_user_net(module.double(), (1, ROWS, ROWS), 10)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 1, ROWS, ROWS, generator=generator).double()
    return FlatLoss(net, net.initial, Batch(x, ((torch.arange(6), None),)))


@pytest.mark.parametrize("name", MIXERS)
def test_a_hessian_vector_product_through_it_is_a_difference_of_gradients(name):
    torch.manual_seed(0)
    loss = loss_of(Rows(MIXERS[name]()))
    at = loss.flatten(loss.params)
    vector, h = torch.randn(len(at), generator=torch.Generator().manual_seed(1)).double(), 1e-5
    expected = (loss.compute_gradient(at + h * vector)[1] - loss.compute_gradient(at - h * vector)[1]) / (2 * h)
    torch.testing.assert_close(loss.build_hessian_product(at)(vector), expected, rtol=1e-4, atol=1e-7)


def test_fused_attention_comes_back_after_a_measurement():
    allowed = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    with use_differentiable_kernels(Attention(), torch.device("cpu"), twice=True):
        assert not torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()) == allowed


METHODS = (
    "fedap(at=2, steps=4, samples=8, images=8)",
    "fedad(check=1, force=0, steps=4, images=8)",
    "imc(at=2, steps=4)",
)
SETTING: dict[str, Any] = {"data": "digits", "rounds": 3, "devices": 4, "sample": 2, "batch": 64}
SETTING |= {"server_data": "share:0.1", "fleet": "tiers:1:0.1"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["function", "encoder layer"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_whole_runs_measure_models_with_attention(method, name, engine):
    torch.manual_seed(0)
    run = shoal.run(method, model=Rows(MIXERS[name]()), engine=engine, **SETTING)
    assert not any("void" in row or "dropped" in row for row in run.history.rows)
    cost = "bytes_down" if method.startswith("imc") else "macs_forward"
    assert run.history.rows[2][cost] < run.history.rows[0][cost]


@pytest.mark.parametrize("method", METHODS[:2])
def test_processes_measure_models_with_attention(method):
    torch.manual_seed(0)
    setting: dict[str, Any] = SETTING | {"model": Rows(encoder(dropout=0.0))}
    ends = [shoal.run(method, engine=engine, **setting) for engine in ("serial", "pool")]
    for name, value in ends[0].params.items():
        torch.testing.assert_close(ends[1].params[name], value, rtol=1e-4, atol=1e-5)


class Distances(nn.Module):
    """Minus the distances to a point for each class: torch has no second derivative of `cdist`."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.points = nn.Linear(64, 12), nn.Linear(12, 6), nn.Parameter(torch.randn(10, 6))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.fc2(self.fc1(x.flatten(1)).relu()), self.points)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_cannot_be_differentiated_twice_is_refused_before_the_run(method, tmp_path):
    with pytest.raises(shoal.ShoalError, match="measures the curvature of the loss.*Write rule='fixed'") as found:
        shoal.run(method, model=Distances(), out=str(tmp_path / "run"), **SETTING)
    assert found.value.kind.name == "bad-part" and "_cdist_backward" in str(found.value)
    name = method.partition("(")[0]
    done = shoal.run(f"{name}(rule='fixed', rate=0.3)", model=Distances(), **SETTING)
    assert len(done.history.rows) == 3
