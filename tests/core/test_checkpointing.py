"""Gradient checkpointing: the same numbers from less memory, on devices that train one after the other."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import shoal
from shoal.core.errors import ShoalError
from shoal.core.model.checkpointing import find_repeated_layers
from shoal.core.model.net import Net

RECIPE: dict[str, Any] = dict(devices=4, sample=4, rounds=2, steps="2", batch=4, lr=0.1, split="iid", threads=1)


class Block(nn.Module):
    def __init__(self, width: int, drop: float):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.Tanh(), nn.Dropout(drop), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stack(nn.Module):
    """Blocks of one kind, as transformers have them, with dropout."""

    def __init__(self, blocks: int = 3, width: int = 8, drop: float = 0.3, frozen: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(blocks))
        self.head = nn.Linear(width, 10)
        self.blocks[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize("method", ["fedavg", "moon", "fedsam", "scaffold"])
def test_the_numbers_are_the_same_bits(method, precision):
    """Also with dropout, with frozen layers, and where several passes come before the way back."""
    kept, again = (
        shoal.run(method, model=Stack(frozen=True), gradient_checkpointing=on, engine="serial", precision=precision,
                  **RECIPE)
        for on in (False, True)
    )  # fmt: skip
    assert all(torch.equal(kept.params[k], again.params[k]) for k in kept.params)
    assert again.history.rows[-1]["macs_work"] > kept.history.rows[-1]["macs_work"]


def test_layers_that_are_computed_again_have_the_tensors_of_their_pass():
    net = Net(Stack(drop=0.0).double(), (1, 8, 8), 10, checkpointing=True)
    plain = Net(Stack(drop=0.0).double(), (1, 8, 8), 10)
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    grads = []
    for own in (net, plain):
        one = {k: v.clone().requires_grad_() for k, v in own.initial.items()}
        two = {k: (2 * v).detach().requires_grad_() for k, v in own.initial.items()}
        loss = own.forward(one, x, training=True)[0].square().sum() + own.forward(two, x, training=True)[0].sum()
        grads.append(torch.autograd.grad(loss, [*one.values(), *two.values()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors, made inside, that are alive at one time."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.let_go, storage.nbytes())
        return out

    def let_go(self, size: int) -> None:
        self.now -= size


def test_a_step_needs_less_memory():
    peaks = []
    for on in (False, True):
        net = Net(Stack(blocks=12), (1, 8, 8), 10, checkpointing=on)
        params = {k: v.clone().requires_grad_() for k, v in net.initial.items()}
        x = torch.randn(512, 1, 8, 8)
        with LiveBytes() as live:
            torch.autograd.grad(net.forward(params, x, training=True)[0].sum(), list(params.values()))
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] / 3


def test_where_it_cannot_be():
    for engine in ("batched", "pool"):
        with pytest.raises(ShoalError, match="gradient_checkpointing is given, and engine is"):
            shoal.run(**RECIPE | {"model": Stack(), "gradient_checkpointing": True, "engine": engine, "threads": 0})
    with pytest.raises(ShoalError, match="works on layers of one kind in an nn.ModuleList, and mlp has none"):
        shoal.run(model="mlp", gradient_checkpointing=True, **RECIPE)
    result = shoal.run(**RECIPE | {"model": Stack(), "gradient_checkpointing": True, "rounds": 1})
    assert result.engine is not None and result.engine.engine == "serial"
    assert find_repeated_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
