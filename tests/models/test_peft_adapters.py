"""Adapters of the package peft: alone in messages, taken as they are by `lora`, and merged on export."""

from typing import Any

import pytest
import torch
from adapted_models import draw_texts, make_transformer
from safetensors.torch import load_file

import shoal
from shoal.core.errors import ShoalError
from shoal.core.model.low_rank import find_adapters, merge_adapters
from shoal.core.model.net import Net
from shoal.models.transformers_model import TransformersModel, takes_token_dict
from shoal.models.user_model import build_user_net
from shoal.parts.lora import LoRA
from shoal.plugins.load import load_method
from shoal.testing.rounds import assert_trees_close

peft: Any = pytest.importorskip("peft")
TINY: dict[str, Any] = dict(devices=4, sample=4, rounds=2, batch=8, split="iid", lr=0.3)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "bert": {"task_type": "SEQ_CLS"},
}


def wrap(kind: str, **settings: Any) -> Any:
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 6} | KINDS[kind] | settings)
    torch.manual_seed(1)
    return peft.get_peft_model(make_transformer(kind), config)


def build(kind: str, **settings: Any) -> Net:
    inputs, _ = draw_texts(next_word=kind != "bert")
    classes = 2 if kind == "bert" else 40
    return build_user_net(
        wrap(kind, **settings), {"input_ids": (6,)}, classes, example={k: v[:1] for k, v in inputs.items()}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_model_is_taken_for_what_is_inside(kind):
    model = wrap(kind)
    assert takes_token_dict(model)
    own, plain = TransformersModel(model).eval(), TransformersModel(make_transformer(kind)).eval()
    assert own.causal == plain.causal == (kind != "bert") and own.accepts == plain.accepts
    inputs, _ = draw_texts(8)
    if kind != "bert":
        assert torch.equal(own(inputs), plain(inputs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fedavg", "lora", "lora+hetlora(rates='1,0.5')"])
def test_engines_agree_and_adapters_are_all_that_travels(kind, method):
    data = draw_texts(next_word=kind != "bert")
    ends = [shoal.run(method, model=wrap(kind), data=data, engine=engine, **TINY) for engine in ("serial", "batched")]
    assert_trees_close(ends[1].params, ends[0].params, 1e-5, f"{kind}, {method}")
    assert all("lora_" in name or "modules_to_save" in name for name in ends[0].params)
    assert any(bool(v.any()) for k, v in ends[0].params.items() if "lora_B" in k)
    whole = 4 * sum(v.nbytes for v in ends[0].params.values())
    sent = ends[0].history.rows[0]["bytes_by"]["down"]["model"]
    assert sent < whole if "hetlora" in method else sent == whole


def test_lora_gives_them_roles_and_the_axis_of_ranks():
    net = LoRA().model(build("llama"))
    assert [(axis.name, axis.size, len(axis.cuts)) for axis in net.axes] == [("rank", 2, 4)]
    assert net.trainable == build("llama").trainable and {a.scale for a in find_adapters(net.module)} == {3.0}
    ffa = LoRA(a="frozen").model(build("llama"))
    assert all("lora_B" in name for name in ffa.trainable) and not ffa.axes
    assert all("lora_B" in name for name in LoRA(b="personal").model(build("llama")).names_with_role("personal"))
    with_head = LoRA(head="shared").model(build("llama"))
    assert any("lm_head" in name for name in with_head.trainable)
    mixed = build("llama", rank_pattern={"v_proj": 1})
    assert not LoRA().model(mixed).axes


def test_other_ranks_than_those_given_are_refused():
    for text in ("rank=4", "rank=8", "alpha=1", "alpha=16", "where='q_proj'"):
        (part,) = load_method(f"lora({text})").parts
        with pytest.raises(ShoalError, match=f"has 2 adapters of rank 2 already, and {text} asks for others"):
            part.model(build("llama"))
    for part in (LoRA(rank=2, alpha=6.0), LoRA()):
        assert [axis.size for axis in part.model(build("llama")).axes] == [2]


def test_new_adapters_have_rank_8_and_a_scale_of_2():
    plain = build_user_net(
        make_transformer("llama"), {"input_ids": (6,)}, 40, example={"input_ids": torch.zeros(1, 6).long()}
    )
    for part in (LoRA(), LoRA(rank=8, alpha=16.0)):
        made = part.model(plain)
        assert [axis.size for axis in made.axes] == [8] and {a.scale for a in find_adapters(made.module)} == {2.0}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_that_peft_merges(kind):
    net, generator = build(kind), torch.Generator().manual_seed(0)
    params = {k: v + 0.3 * torch.randn(v.shape, generator=generator) for k, v in net.initial.items()}
    merged = merge_adapters(net, params)
    module: Any = TransformersModel(wrap(kind))
    module.load_state_dict(params, strict=False)
    expected = module.model.merge_and_unload().state_dict()
    assert {name.removeprefix("model.") for name in merged} == set(expected) - find_other_names(kind)
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name.removeprefix("model.")], rtol=1e-5, atol=1e-6)


def find_other_names(kind: str) -> set[str]:
    """Further names of tied tensors, which only the first name has here."""
    return {"lm_head.weight"} if kind == "gpt2" else set()


def test_an_export_that_is_merged_loads_into_the_base_model(tmp_path):
    data = draw_texts()
    model = TransformersModel(wrap("llama"))
    result = shoal.run("lora", model=model, data=data, out=str(tmp_path / "run"), checkpoint_every=1, **TINY)
    made = shoal.export(tmp_path / "run", tmp_path / "merged.safetensors", merged=True)
    base = TransformersModel(make_transformer("llama")).eval()
    base.load_state_dict(load_file(made.path))
    with torch.no_grad():
        torch.testing.assert_close(base(data[0]), result.module().eval()(data[0]), rtol=1e-4, atol=1e-5)
