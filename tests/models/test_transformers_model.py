"""Encoders and decoders of transformers, small and with random weights, train many devices in one call."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.core.errors import ShoalError
from shoal.engines.batched.engine import BatchedEngine
from shoal.models.attention_masks import build_attention_mask
from shoal.models.transformers_model import TransformersModel

transformers = pytest.importorskip("transformers")

COUNT, LENGTH, WORDS, CLASSES = 40, 6, 17, 3
SMALL: dict[str, Any] = dict(vocab_size=WORDS, pad_token_id=0)
RECIPE: dict[str, Any] = dict(devices=4, sample=4, rounds=1, steps="2", batch=4, lr=0.1, precision="float64")


def build_encoder(dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **SMALL,
    )
    return transformers.BertForSequenceClassification(config)


def build_gpt2(dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=16,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=False,
        **SMALL,
    )
    return transformers.GPT2LMHeadModel(config)


def build_llama(dropout: float) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        attention_dropout=dropout,
        tie_word_embeddings=False,
        **SMALL,
    )
    return transformers.LlamaForCausalLM(config)


def build_windowed(kind: str, dropout: float, **settings: Any) -> nn.Module:
    """A model that has layers in which a token sees few others."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=8,
        intermediate_size=12,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=CLASSES,
        attention_dropout=dropout,
        **SMALL | settings,
    )
    head = "SequenceClassification" if kind == "ModernBert" else "CausalLM"
    return getattr(transformers, f"{kind}For{head}")(config)


def build_mistral(dropout: float) -> nn.Module:
    return build_windowed("Mistral", dropout, num_hidden_layers=1, num_key_value_heads=1, sliding_window=3)


def build_qwen2(dropout: float) -> nn.Module:
    layers = dict(num_hidden_layers=2, max_window_layers=1, use_sliding_window=True, sliding_window=3)
    return build_windowed("Qwen2", dropout, num_key_value_heads=1, tie_word_embeddings=False, **layers)


def build_modernbert(dropout: float) -> nn.Module:
    words = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    sizes = dict(num_hidden_layers=2, global_attn_every_n_layers=2, local_attention=2)
    return build_windowed("ModernBert", dropout, **sizes, **words)


BUILDERS = {
    "bert": build_encoder,
    "gpt2": build_gpt2,
    "llama": build_llama,
    "mistral": build_mistral,
    "qwen2": build_qwen2,
    "modernbert": build_modernbert,
}
ENCODERS = ("bert", "modernbert")


def build_wrapped(kind: str, dropout: float = 0.0) -> TransformersModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TransformersModel(BUILDERS[kind](dropout))


def make_sentences(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Sentences of 2 to 6 words, padded behind, and their classes or next words."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (COUNT, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (COUNT, 1), generator=generator)
    targets = ids.roll(-1, 1) if kind not in ENCODERS else torch.randint(0, CLASSES, (COUNT,), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask}, targets


QUICK = [("bert", 0.2), ("gpt2", 0.0), ("llama", 0.2), ("qwen2", 0.0), ("modernbert", 0.2)]
OTHERS = [(kind, dropout) for kind in BUILDERS for dropout in (0.0, 0.2) if (kind, dropout) not in QUICK]


@pytest.mark.parametrize(
    "kind, dropout", [*QUICK, *(pytest.param(*values, marks=pytest.mark.whole) for values in OTHERS)]
)
def test_devices_train_in_one_call_and_like_one_after_the_other(kind, dropout, monkeypatch, caplog):
    widths, honest = [], BatchedEngine.run_steps

    def run_steps(self, sharing_key, stack, *given):
        widths.append(stack.width)
        return honest(self, sharing_key, stack, *given)

    monkeypatch.setattr(BatchedEngine, "run_steps", run_steps)
    given: dict[str, Any] = dict(data=make_sentences(kind), model=build_wrapped(kind, dropout), split="iid")
    with caplog.at_level(logging.WARNING):
        batched = shoal.run(engine="batched", width=4, **given | RECIPE)
    assert widths == [4] and "one after the other" not in caplog.text
    serial = shoal.run(engine="serial", **given | RECIPE)
    apart = max(float((batched.params[k] - v).abs().max()) for k, v in serial.params.items())
    assert apart < 1e-9
    x, drawn = given["data"][0], given["model"].train()
    assert torch.equal(drawn(x), drawn(x)) == (dropout == 0)
    start = given["model"].double().state_dict()
    assert max(float((serial.params[k] - v).abs().max()) for k, v in start.items() if v.is_floating_point()) > 1e-4
    assert [row["loss"] for row in batched.history.rows] == pytest.approx([r["loss"] for r in serial.history.rows])


@pytest.mark.parametrize("kind", ["XLNet", "Bloom"])
def test_models_that_cannot_be_given_a_mask_of_four_dimensions_are_refused_by_name(kind):
    sizes: dict[str, Any] = dict(d_model=8, d_inner=16) if kind == "XLNet" else dict(hidden_size=8, pad_token_id=0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, n_layer=1, n_head=2, num_labels=CLASSES, **sizes)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    words = f"{kind}ForSequenceClassification computes with .* of two dimensions and not .* such as BERT or GPT-2"
    with pytest.raises(ShoalError, match=words) as error:
        shoal.run(data=make_sentences("bert"), model=model, **RECIPE)
    assert "\n" not in str(error.value) and "forward" not in str(error.value)


@pytest.mark.parametrize("kind", BUILDERS)
def test_what_stands_in_the_padding_leaves_no_trace(kind):
    model = build_wrapped(kind).double().eval()
    inputs, _ = make_sentences(kind)
    mask = inputs["attention_mask"].bool()
    noise = torch.where(mask, inputs["input_ids"], 5)
    wide = {key: nn.functional.pad(value.long(), (0, 3)) for key, value in inputs.items()}
    with torch.no_grad():
        plain, other, longer = model(inputs), model(inputs | {"input_ids": noise}), model(wide)
    if kind not in ENCODERS:
        plain, other, longer = plain[mask], other[mask], longer[:, :LENGTH][mask]
    assert torch.allclose(plain, other, 0, 1e-12) and torch.allclose(plain, longer, 0, 1e-12)


@pytest.mark.parametrize("kind", sorted(BUILDERS.keys() - set(ENCODERS)))
def test_a_decoder_sees_nothing_that_comes_after(kind):
    model = build_wrapped(kind).double().eval()
    ids = torch.randint(1, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    other = torch.cat((ids[:, :4], ids[:, 4:].flip(1) % 7 + 1), 1)
    with torch.no_grad():
        one, two = model({"input_ids": ids}), model({"input_ids": other})
    assert torch.equal(one[:, :4], two[:, :4]) and not torch.equal(one, two)


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_mask_of_four_dimensions_is_what_the_model_makes_of_the_usual_one(kind):
    model = build_wrapped(kind).double().eval()
    inputs, _ = make_sentences(kind)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        expected, found = model.model(**inputs | {"attention_mask": mask.long()}).logits, model(inputs)
    if kind not in ENCODERS:
        expected, found = expected[mask], found[mask]
    assert torch.allclose(expected, found, 0, 1e-9)


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_that_classifies_sees_no_later_positions(padded):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(vocab_size=20, pad_token_id=0, num_labels=3, **sizes)
    model = transformers.LlamaForSequenceClassification(config).double().eval()
    tokens = torch.randint(1, 20, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1:, 4:] = 0
    wrapped = TransformersModel(model)
    assert wrapped.causal and not TransformersModel(model, causal=False).causal
    with torch.no_grad():
        expected = model(tokens * mask, attention_mask=mask).logits
        assert torch.allclose(wrapped({"input_ids": tokens, "attention_mask": mask}), expected, 0, 1e-9)


def test_the_mask_by_hand():
    least = torch.finfo(torch.float32).min
    mask = build_attention_mask(torch.tensor([[True, True, False]]), causal=True, dtype=torch.float32)
    assert mask.tolist() == [[[[0.0, least, least], [0.0, 0.0, least], [0.0, 0.0, least]]]]
    mask = build_attention_mask(torch.tensor([[True, False]]), causal=False, dtype=torch.float32)
    assert mask.tolist() == [[[[0.0, least], [0.0, least]]]]


@pytest.mark.parametrize(
    "reach, causal, seen",
    [
        ({"window": 2}, True, ["1000", "1100", "0110", "0011"]),  # itself and the one before
        ({"window": 1}, False, ["1100", "1110", "0111", "0011"]),  # one to each side
        ({"chunk": 2}, True, ["1000", "1100", "0010", "0011"]),
        ({"chunk": 3}, False, ["1110", "1110", "1110", "0001"]),
    ],
)
def test_masks_of_layers_that_see_few_positions_by_hand(reach, causal, seen):
    mask = build_attention_mask(torch.ones(1, 4, dtype=torch.bool), causal, torch.float32, **reach)
    assert ["".join(str(int(value == 0)) for value in row) for row in mask[0, 0].tolist()] == seen
    present = torch.tensor([[False, True, True, True, True]])  # padding in front moves the pieces
    padded = build_attention_mask(present, causal, torch.float32, **reach)[:, :, 1:, 1:]
    assert torch.equal(padded, mask)


def test_a_model_that_reads_the_mask_otherwise_is_refused():
    class SeesEverything(transformers.BertForSequenceClassification):
        def forward(self, input_ids=None, attention_mask=None, **others):
            own = attention_mask if attention_mask is None or attention_mask.dim() == 2 else None
            return super().forward(input_ids=input_ids, attention_mask=own, **others)

    config = build_encoder(0.0).config
    words = "SeesEverything computes other logits with an attention mask of four dimensions, .* such as BERT or GPT-2"
    with pytest.raises(ShoalError, match=words) as error:
        shoal.run(data=make_sentences("bert"), model=SeesEverything(config), **RECIPE)
    assert "\n" not in str(error.value)


def test_a_module_without_a_config_is_refused():
    with pytest.raises(ShoalError, match="no model of transformers"):
        TransformersModel(nn.Linear(2, 2))


# as they come ---------------------------------------------------------------------------------------------------------
def test_a_model_of_text_needs_no_wrapping():
    data = make_raw_data()
    torch.manual_seed(0)
    module = build_encoder(0.0)
    histories = [shoal.run(data=data, model=m, **RECIPE).history for m in (module, TransformersModel(module))]
    assert histories[0]["loss"] == histories[1]["loss"] and histories[0]["loss"][0] is not None


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_model_of_pictures_gives_an_object_with_logits(engine):
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    torch.manual_seed(0)
    module = transformers.ViTForImageClassification(config)
    result = shoal.run(model=module, engine=engine, split="iid", **RECIPE)
    assert 2 < result.history["loss"][0] < 3


def test_a_head_for_a_number():
    inputs, labels = make_raw_data()
    torch.manual_seed(0)
    module = build_encoder(0.0)
    module.classifier = nn.Linear(8, 1)
    result = shoal.run(data=(inputs, labels + 0.5), model=module, split="iid", **RECIPE)
    assert result.net.task.name == "regress" and result.net.classes == 1 and result.headline is not None


def make_raw_data() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(1, WORDS, (COUNT, LENGTH), generator=generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}, words[:, 0] % CLASSES


def test_an_encoder_beside_a_decoder_sees_the_whole_text():
    """PLBart predicts next tokens and no masked ones, as decoders do, and its encoder reads in both directions."""
    torch.manual_seed(0)
    sizes: Any = dict(d_model=8, num_labels=CLASSES, max_position_embeddings=16, init_std=1.0)
    sizes |= {f"{side}_{key}": 2 for side in ("encoder", "decoder") for key in ("layers", "attention_heads", "ffn_dim")}
    config = transformers.PLBartConfig(vocab_size=WORDS, pad_token_id=1, eos_token_id=2, **sizes)
    model = transformers.PLBartForSequenceClassification(config).eval()
    tokens = torch.randint(3, WORDS, (2, LENGTH))
    tokens[:, -1] = 2
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        expected = model(**inputs).logits
        torch.testing.assert_close(TransformersModel(model)(inputs), expected, rtol=1e-4, atol=1e-5)
        seen_in_part = TransformersModel(model, causal=True)(inputs)
    assert not torch.allclose(seen_in_part, expected, rtol=1e-2, atol=1e-3)
