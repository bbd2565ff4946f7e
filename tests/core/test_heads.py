"""Models with another last layer, or with tensors beside them."""

import pytest
import torch
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.model.heads import add_side_tensors, find_head_layer, replace_head
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.models.lenet import lenet
from shoal.models.resnet import build_resnet
from shoal.plugins.smoke_run import build_tiny_net


class Cosine(nn.Module):
    """The last layer's weight as directions."""

    def __init__(self, old: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(old.weight.detach().clone())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * nn.functional.normalize(x, dim=-1) @ self.weight.T


@pytest.mark.parametrize(
    "net",
    [build_tiny_net(), lenet((3, 32, 32), 10), build_resnet((3, 32, 32), 10, width=8)],
    ids=["tiny", "lenet", "resnet"],
)
def test_another_last_layer_still_reads_the_features(net: Net):
    name, layer = find_head_layer(net, "mine")
    other = replace_head(net, Cosine, {"weight": "server"}, "mine")
    x = torch.randn(3, *net.input_shape, dtype=net.dtype)
    _, features, _, _ = net.forward(net.initial, x)
    logits, seen, _, _ = other.forward(other.initial, x)
    assert torch.equal(features, seen) and features.shape[1] == layer.in_features
    torch.testing.assert_close(logits, nn.functional.normalize(features, dim=-1) @ layer.weight.T)
    assert f"{name}.bias" not in other.initial and f"{name}.scale" in other.shared_trainable
    assert f"{name}.weight" not in other.trainable and f"{name}.weight" in other.names_with_role("server")


@pytest.mark.parametrize("make", ["beside", "reheaded"])
def test_what_was_added_is_cut_along(make: str):
    net = lenet((3, 32, 32), 10)
    name, layer = find_head_layer(net, "mine")
    if make == "beside":
        net = add_side_tensors(net, "own", {"weight": torch.randn(10, layer.in_features)}, "personal", ("weight",))
        weight = "own.weight"
    else:
        net, weight = replace_head(net, Cosine, {}, "mine"), f"{name}.weight"
    axis = next(a for a in net.axes if any(c.tensor == weight for c in a.cuts))
    plan = Plan({axis.name: torch.arange(0, axis.size, 2)})
    small = net.cut(plan)
    assert small.initial[weight].shape == (10, layer.in_features // 2)
    x = torch.randn(2, 3, 32, 32)
    masked = net.slicer.place(net.slicer.take(net.initial, plan), net.initial, plan)
    torch.testing.assert_close(small.forward(small.initial, x)[0], net.forward(masked, x)[0])


def test_cuts_move_to_the_layers_that_take_the_place_of_the_old_one():
    """What reads the features reads them in the first new layer; the rows of the classes are those of the second."""
    net = lenet((3, 32, 32), 10)
    moved = {("weight", 1): "0.weight", ("weight", 0): "1.weight", ("bias", 0): "1.bias"}
    made = replace_head(net, lambda old: nn.Sequential(nn.Linear(84, 7), nn.Linear(7, 10)), {}, "mine", moved)
    found = {a.name: {(c.tensor, c.dim, c.reads) for c in a.cuts} for a in (*made.axes, *made.rows)}
    assert found["fc2"] == {("fc2.weight", 0, False), ("fc2.bias", 0, False), ("fc3.0.weight", 1, True)}
    assert found["fc3:output"] == {("fc3.1.weight", 0, False), ("fc3.1.bias", 0, False)}
    assert {a.name: a for a in made.axes}["fc1"] == {a.name: a for a in net.axes}["fc1"]
    without = replace_head(net, lambda old: nn.Sequential(nn.Linear(84, 7), nn.Linear(7, 10)), {}, "mine")
    assert not without.rows and not any(c.tensor.startswith("fc3") for a in without.axes for c in a.cuts)


def test_a_model_without_a_linear_layer_is_refused():
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), (1, 4, 4), 3)
    with pytest.raises(ShoalError, match="mine works on the last linear layer"):
        find_head_layer(net, "mine")
