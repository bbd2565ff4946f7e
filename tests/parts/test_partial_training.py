"""Parts that train a few tensors of a model as they are: biases, the last layers."""

from typing import Any

import pytest
import torch
from frozen_models import Backboned
from tiny_parts import FrozenHead
from torch import nn

import shoal
from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.models.lenet import lenet
from shoal.models.lstm import lstm
from shoal.models.user_model import build_user_net
from shoal.models.vit import vit
from shoal.parts.biasonly import BiasOnly
from shoal.parts.lastlayers import LastLayers

TINY: dict[str, Any] = dict(devices=4, sample=4, rounds=2, batch=8, split="iid", engine="serial")


def test_biases_shifts_and_the_head_are_trained():
    net = BiasOnly().model(lenet((1, 28, 28), 10))
    names = set(lenet((1, 28, 28), 10).initial)
    assert set(net.initial) == {name for name in names if name.endswith("bias")} | {"fc3.weight"}
    assert not net.axes
    shifts = set(BiasOnly(head=False).model(vit((3, 32, 32), 10)).trainable)
    assert {"layer1.norm1.bias", "norm.bias", "fc.bias"} <= shifts and all(name.endswith("bias") for name in shifts)
    recurrent = BiasOnly(head=False).model(lstm((20,), 30))
    assert all(".bias" in name for name in recurrent.trainable) and len(recurrent.trainable) > 1


def test_the_statistics_of_a_norm_whose_shift_moves_stay():
    net = BiasOnly().model(build_user_net(Backboned(frozen=False), (1, 8, 8), 10))
    assert "backbone.1.bias" in net.trainable and "backbone.1.running_mean" in net.frozen and not net.mixes_batch
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(net.forward(net.initial, x, training=True)[0], net.forward(net.initial, x)[0])


def test_a_model_without_biases_is_refused():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    with pytest.raises(ShoalError, match="has none but its last layer's"):
        BiasOnly().model(Net(module, (4,), 2))


def test_what_is_frozen_does_not_move_and_does_not_travel():
    base = shoal.run(model="lenet", **dict[str, Any](TINY | {"rounds": 1})).net.initial
    for method, count in (
        ("biasonly", 84 * 10 + 6 + 16 + 120 + 84 + 10),
        ("lastlayers(layers=2)", 850 + 120 * 84 + 84),
    ):
        result = shoal.run(method, model="lenet", **TINY)
        assert result.history.rows[0]["bytes_by"]["down"] == {"model": 4 * 4 * count}
        trained = result.module().state_dict()
        assert {k for k, v in base.items() if not torch.equal(trained[k], v)} == set(result.net.initial)


def test_last_layers_are_counted_from_the_head():
    assert set(LastLayers().model(lenet((1, 28, 28), 10)).initial) == {"fc3.weight", "fc3.bias"}
    assert {name.partition(".")[0] for name in LastLayers(3).model(lenet((1, 28, 28), 10)).initial} == {
        "fc1",
        "fc2",
        "fc3",
    }


def test_parts_that_leave_nothing_to_train_are_refused_by_their_names():
    method = compose([FrozenHead(), LastLayers()])
    with pytest.raises(ShoalError, match="lastlayers and frozenhead leave nothing to train"):
        method.model(lenet((1, 28, 28), 10))
