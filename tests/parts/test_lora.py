"""LoRA and what is made of it by roles: numbers worked out by hand, what travels, what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from adapted_models import draw_texts, make_product_net, make_transformer, read_weight, start_product_run
from frozen_models import Backboned, TiedWords, draw_words
from torch import nn

import shoal
from shoal.core.builtin_tasks import TASKS
from shoal.core.errors import ShoalError
from shoal.core.model.low_rank import (
    LowRankConv1D,
    LowRankLinear,
    find_adapters,
    list_adaptable_layers,
    merge_adapters,
)
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import count_tree_bytes
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.models.lenet import lenet
from shoal.models.user_model import build_user_net
from shoal.models.vit import vit
from shoal.parts.lib.adapter_products import compute_residue
from shoal.parts.lora import LoRA
from shoal.plugins.smoke_run import SmokeSetup, build_tiny_net
from shoal.testing.laws import play_on
from shoal.testing.rounds import assert_trees_close
from shoal.testing.toy import toy

TINY: dict[str, Any] = dict(devices=4, sample=4, rounds=2, batch=8, split="iid", engine="serial")


# by hand: W0 = 1, A = 1, B = 0, alpha / rank = 2, the gradient is w - 4 -----------------------------------------------
def test_two_steps_of_a_device():
    """B = 0.1 * 3 * 2 = 0.6, W = 2.2; A = 1 + 0.1 * 1.8 * 2 * 0.6 = 1.216, B = 0.96, W = 3.33472."""
    run = start_product_run()
    run.play()
    assert float(run.params["0.lora_A"]) == pytest.approx(1.216, abs=1e-12)
    assert float(run.params["0.lora_B"]) == pytest.approx(0.96, abs=1e-12)
    assert read_weight(run) == pytest.approx(3.33472, abs=1e-12)


def test_the_first_step_moves_b_alone():
    net, y = make_product_net(), torch.full((6, 1), 4.0).double()
    run = toy("lora", sizes=(2,), net=net, inputs=torch.ones_like(y), targets=y, lr=0.05)
    run.play()
    assert [float(run.params[f"0.lora_{k}"]) for k in "AB"] == pytest.approx([1.0, 0.6]) and read_weight(
        run
    ) == pytest.approx(2.2)


def test_ffa_lora_leaves_a_alone_and_averages_exactly():
    run = start_product_run(LoRA(a="frozen"))
    run.play()
    assert read_weight(run) == pytest.approx(2.92, abs=1e-12) and "0.lora_A" in run.net.frozen
    run = start_product_run(LoRA(a="frozen"), (0.0, 4.0))
    [row] = run.play()
    assert read_weight(run) == pytest.approx(1.64, abs=1e-12) and row["lora.residue"] == 0


def test_means_of_factors_are_not_the_mean_of_products_and_the_residue_says_by_how_much():
    """Devices end at (A, B) = (1.024, -0.32) and (1.216, 0.96): 1.7168, where the mean of products has 1.83968."""
    run = start_product_run("lora", (0.0, 4.0))
    [row] = run.play()
    assert read_weight(run) == pytest.approx(1.7168, abs=1e-12)
    assert row["lora.residue"] == pytest.approx((0.83968 - 0.7168) / 0.83968, abs=1e-12)


def test_fedsa_lora_keeps_b_on_devices():
    run = start_product_run(LoRA(b="personal"), (0.0, 4.0))
    [row] = run.play()
    assert float(run.params["0.lora_A"]) == pytest.approx(1.12) and float(run.params["0.lora_B"]) == 0
    assert [float(run.memory(d)[".personal"]["0.lora_B"]) for d in (0, 1)] == pytest.approx([-0.32, 0.96])
    own = run.session.loop.host.make_personal_model(1, run.params, 0)
    assert read_weight(run, own) == pytest.approx(1 + 2 * 1.12 * 0.96) and "lora.residue" not in row


# the residue without dense products -----------------------------------------------------------------------------------
def test_the_residue_of_scalars():
    """(A, B) = (1, 2) and (3, 4): 7 is the mean of products, 6 the product of means."""
    net = make_product_net()
    models = [{"0.lora_A": torch.tensor([[a]]), "0.lora_B": torch.tensor([[b]])} for a, b in ((1.0, 2.0), (3.0, 4.0))]
    mean = {k: (models[0][k] + models[1][k]) / 2 for k in models[0]}
    residue = compute_residue(models, [0.5, 0.5], mean, find_adapters(net.module), net)
    assert residue == pytest.approx(1 / 7, abs=1e-12)
    same = [models[0], models[0]]
    assert compute_residue(same, [0.5, 0.5], models[0], find_adapters(net.module), net) == pytest.approx(0, abs=1e-7)


def test_the_residue_is_that_of_the_dense_products():
    net = LoRA(rank=3).model(lenet((1, 28, 28), 10))
    adapters, generator = find_adapters(net.module), torch.Generator().manual_seed(0)
    models = [{k: torch.randn(v.shape, generator=generator) for k, v in net.initial.items()} for _ in range(4)]
    weights = [0.1, 0.2, 0.3, 0.4]
    share = torch.tensor(weights)
    mean = {k: torch.einsum("k,k...->...", share, torch.stack([m[k] for m in models])) for k in models[0]}
    gap, norm = torch.zeros(()).double(), torch.zeros(()).double()
    for x in adapters:
        products = torch.stack([m[x.b].double() @ m[x.a].double() for m in models])
        dense = torch.einsum("k,kij->ij", share.double(), products)
        gap += (dense - mean[x.b].double() @ mean[x.a].double()).square().sum()
        norm += dense.square().sum()
    expected = (gap / norm).sqrt()
    assert len(adapters) > 1
    assert compute_residue(models, weights, mean, adapters, net) == pytest.approx(float(expected), rel=1e-6)


# the model ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [lenet, vit])
def test_adapters_begin_with_the_logits_of_the_base_model(make):
    base = make((3, 32, 32), 10)
    net, x = LoRA().model(base), torch.rand(3, 3, 32, 32)
    assert torch.equal(net.forward(net.initial, x)[0], base.forward(base.initial, x)[0])
    moved = {k: v + 0.1 for k, v in net.initial.items()}
    assert not torch.allclose(net.forward(moved, x)[0], base.forward(base.initial, x)[0])


def test_adapters_compute_what_the_merged_weights_compute():
    net, x = LoRA(rank=2, alpha=3.0).model(vit((3, 32, 32), 10)), torch.rand(3, 3, 32, 32)
    generator = torch.Generator().manual_seed(0)
    params = {k: v + 0.3 * torch.randn(v.shape, generator=generator) for k, v in net.initial.items()}
    base = vit((3, 32, 32), 10)
    base.module.load_state_dict(merge_adapters(net, params))
    base = replace(base)
    torch.testing.assert_close(net.forward(params, x)[0], base.forward(base.initial, x)[0], rtol=1e-4, atol=1e-5)


def test_the_first_factor_is_the_same_wherever_it_is_drawn():
    nets = [LoRA().model(build_tiny_net()) for _ in range(2)]
    a, again = (net.initial["a.lora_A"] for net in nets)
    assert torch.equal(a, again) and a.shape == (8, 4) and a.abs().max() <= 0.5 and 0.2 < a.std() < 0.4
    assert not nets[0].initial["a.lora_B"].any() and nets[0].initial["a.lora_B"].shape == (3, 8)
    net = LoRA(a="frozen").model(build_tiny_net())
    assert torch.equal(net.frozen["a.lora_A"], a) and net.digest != nets[0].digest
    layers = LoRA().model(vit((3, 32, 32), 10)).initial
    assert not torch.equal(layers["layer1.fc1.lora_A"], layers["layer2.fc1.lora_A"])


def test_all_but_adapters_and_head_is_frozen_and_keeps_its_name():
    base = lenet((1, 28, 28), 10)
    net = LoRA().model(base)
    factors = {f"{name}.lora_{key}" for name in ("fc1", "fc2") for key in "AB"}
    assert set(net.initial) == {"fc3.weight", "fc3.bias"} | factors and net.head_name == "fc3"
    assert set(net.frozen) == set(base.initial) - {"fc3.weight", "fc3.bias"}
    assert [axis.name for axis in net.axes] == ["rank"] and net.axes[0].size == 8
    assert set(LoRA(head="frozen").model(base).initial) == factors
    assert LoRA(head="personal").model(base).names_with_role("personal") == ("fc3.weight", "fc3.bias")
    assert isinstance(net.module.get_submodule("fc1"), nn.Linear) and "fc1.weight" in net.frozen


def test_the_statistics_of_batch_norm_are_frozen_with_the_rest():
    net = LoRA().model(build_user_net(Backboned(frozen=False), (1, 8, 8), 10))
    assert not net.mixes_batch and "backbone.1.running_mean" in net.frozen
    assert set(net.initial) == {"backbone.4.lora_A", "backbone.4.lora_B", "head.weight", "head.bias"}


def test_the_head_is_frozen_where_it_gives_the_next_word_or_has_an_adapter():
    words = TiedWords()
    tied = LoRA().model(build_user_net(words, (5,), 11))
    assert set(tied.initial) == {"middle.lora_A", "middle.lora_B"}
    logits = tied.forward(tied.initial, draw_words()[0])[0]
    assert torch.equal(logits, words(draw_words()[0]))
    shared = LoRA(head="shared").model(build_user_net(TiedWords(), (5,), 11))
    assert set(shared.trainable) == {"words.weight", "middle.lora_A", "middle.lora_B"}
    on_head = LoRA(where="fc3").model(lenet((1, 28, 28), 10))
    assert set(on_head.initial) == {"fc3.lora_A", "fc3.lora_B"}


def test_adapters_may_be_added_to_what_is_frozen_already():
    base = build_user_net(Backboned(frozen=True), (1, 8, 8), 10)
    assert set(LoRA().model(base).trainable) == {
        "backbone.4.lora_A",
        "backbone.4.lora_B",
        "head.weight",
        "head.bias",
    }
    headless: Any = Backboned(frozen=False)
    headless.head.requires_grad_(False)
    base = build_user_net(headless, (1, 8, 8), 10)
    assert "head.weight" in LoRA().model(base).frozen
    assert "head.weight" in LoRA(head="shared").model(base).trainable


def test_where_takes_ends_of_names():
    net = LoRA(where="attention.qkv, fc2").model(vit((3, 32, 32), 10))
    assert len(find_adapters(net.module)) == 8
    assert {adapter.weight.partition(".")[2] for adapter in find_adapters(net.module)} == {
        "attention.qkv.weight",
        "fc2.weight",
    }
    with pytest.raises(ShoalError, match="no linear layer whose name ends with 'q_proj'") as error:
        LoRA(where="qkv,q_proj").model(vit((3, 32, 32), 10))
    assert "qkv, out, fc1, fc2, fc" in error.value.advice


class Fused(nn.Module):
    """A layer of torch that reads the weights of its linear layers and, in evaluation, calls none of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.before, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layer(self.before(x)).mean(1))


def test_layers_that_are_not_called_get_no_adapters():
    base = build_user_net(Fused(), (3, 8), 4)
    assert {"layer.linear1", "layer.linear2"} < set(list_adaptable_layers(base.module))
    net = LoRA().model(base)
    assert [adapter.weight for adapter in find_adapters(net.module)] == ["before.weight"]
    with pytest.raises(ShoalError, match="does not call it as a layer"):
        LoRA(where="linear1").model(base)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="a or b trained"):
        LoRA(a="frozen", b="frozen")
    with pytest.raises(ShoalError, match="nothing is left that is trained and shared"):
        LoRA(a="frozen", b="personal", head="frozen").model(build_tiny_net())
    lonely = Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (4,), 2)
    with pytest.raises(ShoalError, match="no linear layer to add to, but the last one"):
        LoRA().model(lonely)
    assert set(LoRA(where="1").model(lonely).trainable) == {"1.lora_A", "1.lora_B"}
    for method in ("lora(b='personal')+hetlora", "lora(a='frozen')+hetlora"):
        with pytest.raises(ShoalError, match="A or B is not shared"):
            toy(method)
    with pytest.raises(ShoalError, match="none that it could leave out") as error:
        toy("fedsalora+fjord")
    assert "with a and b shared" in error.value.advice
    with pytest.raises(ShoalError, match="both choose what of the model is trained"):
        toy("lora+biasonly")


def test_slots_of_the_rank_may_change_places():
    net = LoRA(rank=4).model(vit((3, 32, 32), 10))
    generator = torch.Generator().manual_seed(0)
    params = {k: v + 0.1 * torch.randn(v.shape, generator=generator) for k, v in net.initial.items()}
    order, x = torch.tensor([2, 0, 3, 1]), torch.rand(2, 3, 32, 32)
    [axis] = net.axes
    mixed = params | {cut.tensor: params[cut.tensor].index_select(cut.dim, order) for cut in axis.cuts}
    assert not torch.equal(mixed["layer1.fc1.lora_A"], params["layer1.fc1.lora_A"])
    torch.testing.assert_close(net.forward(mixed, x)[0], net.forward(params, x)[0])


def test_a_cut_net_keeps_the_scale_of_the_full_rank():
    net, x = LoRA(rank=4, alpha=4.0).model(lenet((1, 28, 28), 10)), torch.rand(2, 1, 28, 28)
    plan = Plan({"rank": torch.arange(2)})
    generator = torch.Generator().manual_seed(0)
    params = {k: v + 0.1 * torch.randn(v.shape, generator=generator) for k, v in net.initial.items()}
    small = net.cut(plan)
    cut = net.slicer.take(params, plan)
    masked = net.slicer.place(cut, params, plan)
    layer: Any = small.module.get_submodule("fc1")
    assert isinstance(layer, LowRankLinear) and layer.scale == 1.0 and layer.lora_A.shape == (2, layer.in_features)
    torch.testing.assert_close(small.forward(cut, x)[0], net.forward(masked, x)[0])
    assert small.frozen["fc1.weight"].data_ptr() == net.frozen["fc1.weight"].data_ptr()


# runs -----------------------------------------------------------------------------------------------------------------
def test_adapters_and_head_are_all_that_travels():
    result = shoal.run("lora(rank=2)", model="lenet", **TINY)
    row, inputs = result.history.rows[0], result.net.frozen["fc1.weight"].shape[1]
    factors = sum(2 * (i + o) for i, o in ((inputs, 120), (120, 84)))
    assert row["bytes_by"]["down"] == row["bytes_by"]["up"] == {"model": 4 * 4 * (factors + 84 * 10 + 10)}
    whole = shoal.run(model="lenet", **TINY).history.rows[0]
    assert row["bytes_up"] < whole["bytes_up"] / 10


@pytest.mark.parametrize("other", ["heterofl(rates='1,0.5', mask_loss=False)", "fjord(widths='0.5,1')", "hetlora"])
def test_small_devices_have_small_messages_and_engines_agree(other):
    method = toy(f"lora+{other}", sizes=(5, 3, 4, 2)).session.loop.method
    messages = []

    def play(engine):
        run = toy(method.parts, sizes=(5, 3, 4, 2), engine=engine, momentum=0.5)
        messages.append([row["bytes_by"]["up"]["model"] for row in run.play(3)])
        return [run.params, run.states]

    expected = play(SerialEngine())
    assert_trees_close(play(BatchedEngine(2)), expected, 1e-9, f"{method} trains to other numbers on another engine")
    whole = 4 * count_tree_bytes(toy("lora").params)
    assert messages[0] == messages[1] and max(messages[0]) < whole


def test_fedad_drops_ranks():
    rows = toy("lora+fedad(rule='fixed', rate=0.5, check=1, force=0)", sizes=(5, 3, 4)).play(3)
    sent = [row["bytes_by"]["down"]["model"] for row in rows]
    assert sent[2] < sent[0] and rows[2]["fedad.dropout_rate"] > 0


class Together(nn.Module):
    """Two adapted layers, one of them held twice."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.again = self.first

    def forward(self, x):
        return self.head(self.again(self.first(x).tanh()))


def test_a_layer_that_is_held_twice_has_one_adapter():
    net = build_user_net(Together().double(), (4,), 2)
    adapted = LoRA().model(net)
    assert [x.a for x in find_adapters(adapted.module)] == ["first.lora_A"]
    assert adapted.module.again is adapted.module.first and "again.lora_A" in adapted.ties
    x = torch.randn(12, 4).double()
    setting = SmokeSetup(net, x, torch.arange(12) % 2)
    (serial, _), (batched, _) = (
        play_on(engine, LoRA(), (5, 3), setting) for engine in (SerialEngine(), BatchedEngine(2))
    )
    assert_trees_close(batched, serial, 1e-9, "a layer that is held twice")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_transformers_train_alike_on_all_engines(kind):
    pytest.importorskip("transformers")
    data = draw_texts(next_word=kind != "bert")
    ends = [
        shoal.run("lora(rank=2)", model=make_transformer(kind), data=data, **dict[str, Any](TINY | {"engine": engine}))
        for engine in ("serial", "batched")
    ]
    assert_trees_close(ends[1].params, ends[0].params, 1e-5, kind)
    adapters = find_adapters(ends[0].net.module)
    assert len(adapters) == {"llama": 7, "gpt2": 4, "bert": 7}[kind]
    assert any(".classifier." in name for name in ends[0].params) == (kind == "bert")
    if kind == "gpt2":
        layers = [m for m in ends[0].net.module.modules() if isinstance(m, LowRankConv1D)]
        assert len(layers) == 4 and all(adapter.transposed for adapter in adapters)


def test_tasks_without_classes():
    net = replace(Net(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double(), (4,), 1), task=TASKS["regress"])
    x = torch.randn(12, 4).double()
    rows = toy("lora", net=net, inputs=x, targets=x[:, :1]).play(2)
    assert rows[1]["loss"] < 10
