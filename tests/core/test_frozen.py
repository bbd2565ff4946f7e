"""Frozen tensors are in no tree of tensors, and a tensor that two layers hold is one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from frozen_models import Backboned, TiedWords
from torch import nn

import shoal
from shoal.core.model import tree
from shoal.core.model.heads import add_side_tensors, find_head_layer, replace_head
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Cut, Plan
from shoal.models.user_model import build_user_net

HEAD = ("head.weight", "head.bias")
X = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def build_net(**settings) -> Net:
    return build_user_net(Backboned(**settings), (1, 8, 8), 10)


def storages(tensors) -> set[int]:
    return {value.data_ptr() for value in tensors.values()}


def test_parameters_without_a_gradient_are_in_no_tree_but_that_of_the_frozen():
    net = build_net()
    assert net.trainable == net.names_with_role("shared") == tuple(net.initial) == HEAD
    assert not net.buffers and [name for name, *_ in net.shapes] == list(HEAD)
    backbone = {name for name in net.module.state_dict() if name.startswith("backbone")}
    assert set(net.frozen) == backbone and {"backbone.1.running_mean", "backbone.4.weight"} <= backbone


def test_a_frozen_net_computes_what_its_module_does_and_changes_nothing_in_training():
    module = Backboned().eval()
    net = build_user_net(module, (1, 8, 8), 10)
    before = {name: value.clone() for name, value in net.frozen.items()}
    for training in (False, True):
        torch.testing.assert_close(net.forward(net.initial, X, training=training)[0], module(X), rtol=0, atol=0)
    assert tree.is_same_tree(before, {name: value.detach() for name, value in net.frozen.items()})
    assert not net.mixes_batch and build_net(frozen=False).mixes_batch


def test_batch_norm_that_is_not_frozen_as_a_whole_goes_on_gathering():
    module: Any = Backboned()
    module.backbone[1].bias.requires_grad_(True)
    net = build_user_net(module, (1, 8, 8), 10)
    assert net.mixes_batch and "backbone.1.running_mean" in net.buffers and "backbone.1.weight" in net.frozen
    changed = net.forward(net.initial, X, training=True)[3]
    assert not torch.equal(changed["backbone.1.running_mean"], net.initial["backbone.1.running_mean"])


def test_a_role_freezes_and_a_role_keeps_from_being_frozen():
    net = build_net(frozen=False)
    half = replace(net, roles={"backbone.4.weight": "frozen"})
    assert list(half.frozen) == ["backbone.4.weight"] and "backbone.4.weight" not in (*half.initial, *half.trainable)
    module = Backboned()
    kept = Net(module, (1, 8, 8), 10, roles={"backbone.4.weight": "shared", "backbone.4.bias": "server"})
    assert {"backbone.4.weight", "backbone.4.bias"} <= set(kept.buffers)


def test_parts_that_change_the_model_share_its_frozen_tensors():
    net = build_net()
    cut = replace(net, axes=(Axis("classes", 10, (Cut("head.weight", 0), Cut("head.bias", 0))),)).cut(
        Plan({"classes": torch.arange(4)})
    )
    others = [
        replace(net, module=copy_module(net)),
        add_side_tensors(net, "side", {"values": torch.ones(3)}, "server"),
        replace_head(net, lambda old: nn.Linear(old.in_features, 10, bias=False), {}, "mine"),
        cut,
    ]
    for other in others:
        assert storages(other.frozen) == storages(net.frozen) and other.digest == net.digest
    assert "side.values" in copy_of_copy(others[1]).initial and cut.forward(cut.initial, X)[0].shape == (3, 4)


def copy_of_copy(net: Net) -> Net:
    """What a second part makes of what a first one made: tensors of the server must not be taken for frozen ones."""
    return replace(net, module=copy_module(net))


def test_axes_that_would_cut_a_frozen_tensor_are_dropped():
    axes = (
        Axis("wide", 64, (Cut("backbone.4.weight", 0), Cut("head.weight", 1, reads=True))),
        Axis("classes", 10, (Cut("head.weight", 0), Cut("head.bias", 0))),
    )
    assert [a.name for a in Net(Backboned(), (1, 8, 8), 10, axes).axes] == ["classes"]
    assert [a.name for a in Net(Backboned(frozen=False), (1, 8, 8), 10, axes).axes] == ["wide", "classes"]


def test_the_digest_tells_backbones_apart():
    net, same, other, trained = build_net(), build_net(), build_net(seed=1), build_net(frozen=False)
    assert net.digest == same.digest != other.digest and len(net.digest) == 32 and not trained.digest
    double = replace(other, module=Backboned(seed=0).double())
    assert double.digest not in ("", net.digest)


def test_other_tensors_stand_in_the_frozen_slots_inside_and_only_there():
    net, other = build_net(), build_net(seed=1)
    before = net.forward(net.initial, X)[0]
    with net.substitute_frozen(other.frozen.values()):
        inside = net.forward(net.initial, X)[0]
    assert torch.equal(inside, other.forward(net.initial, X)[0]) and not torch.equal(inside, before)
    assert torch.equal(net.forward(net.initial, X)[0], before)
    with pytest.raises(ValueError), net.substitute_frozen([]):
        pass


# tied tensors -----------------------------------------------------------------------------------------------------
def build_tied(**settings) -> Net:
    return build_user_net(TiedWords(**settings), (5,), 11)


def test_a_tensor_that_two_layers_hold_is_one_under_its_first_name():
    net = build_tied()
    assert list(net.initial) == ["words.weight", "middle.weight", "middle.bias"] == list(net.trainable)
    assert net.ties == {
        "again.weight": "middle.weight",
        "again.bias": "middle.bias",
        "last.weight": "words.weight",
    }
    x = torch.randint(0, 11, (2, 5))
    params = {name: torch.randn_like(value) for name, value in net.initial.items()}
    module = TiedWords()
    module.load_state_dict(params, strict=False)
    torch.testing.assert_close(net.forward(params, x)[0], module(x), rtol=0, atol=0)


def test_copies_stay_tied():
    net = build_tied()
    copies: list[Any] = [copy_module(net), net.cut(Plan()).module]
    for module in copies:
        assert module.last.weight is module.words.weight and module.again is module.middle


def test_tied_tensors_can_be_frozen():
    net = build_tied(frozen=True)
    assert list(net.frozen) == ["words.weight"] and list(net.initial) == ["middle.weight", "middle.bias"]


def test_roles_go_by_the_first_name():
    with pytest.raises(shoal.ShoalError, match="one tensor with 'words.weight'"):
        Net(TiedWords(), (5,), 11, roles={"last.weight": "personal"})
    assert Net(TiedWords(), (5,), 11, roles={"words.weight": "personal"}).names_with_role("personal") == (
        "words.weight",
    )


def test_parts_of_the_head_refuse_one_that_is_not_its_own():
    with pytest.raises(
        shoal.ShoalError, match="fedrod works on the last linear layer, and its weight is frozen or one"
    ):
        find_head_layer(build_tied(), "fedrod")
