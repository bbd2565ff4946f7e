"""Prompt vectors: numbers worked out by hand, where they stand in a model, what travels, what is refused."""

import pickle
from copy import deepcopy
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from adapted_models import draw_texts, make_transformer
from hf_folders import write_hf_folder, write_reviews
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from shoal.core.builtin_tasks import TASKS
from shoal.core.errors import ShoalError
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.prompted_module import find_prompt_name
from shoal.engines.batched.engine import BatchedEngine
from shoal.models import build_model
from shoal.models.lenet import lenet
from shoal.models.lstm import lstm
from shoal.models.transformers_model import TransformersModel
from shoal.models.user_model import build_user_net
from shoal.models.vit import vit
from shoal.parts.lora import LoRA
from shoal.parts.prompt import Prompt
from shoal.plugins.smoke_run import MeanOverPositions, TinyAttention, build_tiny_net, build_tiny_text_net
from shoal.testing.rounds import assert_trees_close
from shoal.testing.toy import Toy, toy

TINY: dict[str, Any] = dict(devices=4, sample=4, rounds=2, batch=8, split="iid", engine="serial")


# by hand --------------------------------------------------------------------------------------------------------------
def make_number_net(words: list[float], length: int, *middle: nn.Module) -> Net:
    """Words are numbers, and the output is their mean, after what is in the middle."""
    embed, last = nn.Embedding(len(words), 1), nn.Linear(1, 1, bias=False)
    module = nn.Sequential(embed, *middle, MeanOverPositions(), last).double()
    with torch.no_grad():
        embed.weight.copy_(torch.tensor(words)[:, None])
        for layer in middle:
            layer.get_submodule("look").get_parameter("weight").fill_(log(2))
        last.weight.fill_(1)
    return replace(Net(module, (length,), 1, token_inputs=True), task=TASKS["regress"])


def start_number_run(net: Net, targets: tuple[float, ...], word: int, samples: int = 4) -> Toy:
    """Devices with one text of one word, two to a step, on the loss (output - target)^2 at rate 0.05."""
    y = torch.tensor([*(value for value in targets for _ in range(samples)), 0, 0, 0, 0], dtype=torch.float64)[:, None]
    texts = torch.full((len(y), *net.input_shape), word)
    part = Prompt(length=1, head="frozen")
    return toy(part, sizes=(samples,) * len(targets), net=net, inputs=texts, targets=y, lr=0.05)


def test_two_steps_through_a_mean_over_positions():
    """Words are 3, so is P: (P + 3 + 3) / 3 = 3, P = 3 - 0.1 * 3 / 3 = 2.9; then P = 2.9 - 0.1 * 8.9 / 9."""
    run = start_number_run(make_number_net([3.0, 3.0, 3.0], 2), (0.0,), 1)
    assert run.params == {"0.prompt": torch.tensor([[3.0]])}
    run.play()
    assert float(run.params["0.prompt"]) == pytest.approx(2.9 - 0.1 * 8.9 / 9, abs=1e-12)


def test_the_server_takes_the_mean_of_the_vectors():
    """A target of 3 leaves P where it is, so that the mean goes half the way."""
    run = start_number_run(make_number_net([3.0, 3.0, 3.0], 2), (0.0, 3.0), 1)
    run.play()
    assert float(run.params["0.prompt"]) == pytest.approx(3 - (0.1 + 0.1 * 8.9 / 9) / 2, abs=1e-12)


def test_attention_sees_the_vectors_and_gives_them_their_gradient():
    """x = 1 beside P = 0 with scores log2(...): rows 1 + 2/3 and 0 + 1/2, of mean 13/12, where without P it is 2.

    d out / dP = (11/6 + log(2) / 36) / 2, and one step at an error of 1 goes 2 * 0.05 of it.
    """
    net, text = make_number_net([1.0, 0.0, 0.0, 0.0, 0.0], 1, TinyAttention(1)), torch.tensor([[0]])
    assert float(net.forward(net.initial, text)[0]) == pytest.approx(2)
    run = start_number_run(net, (1 / 12,), 0, samples=2)
    assert float(run.params["0.prompt"]) == 0, "the seed draws another word"
    assert float(run.net.forward(run.params, text)[0]) == pytest.approx(13 / 12, abs=1e-12)
    run.play()
    assert float(run.params["0.prompt"]) == pytest.approx(-0.1 * (11 / 6 + log(2) / 36) / 2, abs=1e-12)


def test_only_the_vectors_travel():
    run = start_number_run(make_number_net([3.0, 3.0, 3.0], 2), (0.0, 1.0), 1)
    [row] = run.play()
    assert row["bytes_by"]["down"] == row["bytes_by"]["up"] == {"model": 2 * 8}
    assert set(run.net.frozen) == {"0.weight", "2.weight"} and not run.net.axes


# the first vectors ----------------------------------------------------------------------------------------------------
def test_they_are_the_same_wherever_they_are_drawn_and_others_with_another_seed():
    base = build_tiny_text_net()
    nets = [replace(build_tiny_text_net(), seed=seed) for seed in (0, 0, 1)]
    rows = [Prompt(length=4).model(net).initial["words.prompt"] for net in nets]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    words = base.initial["words.weight"]
    assert all(any(torch.equal(row, word) for word in words) for row in rows[0]) and len(rows[0].unique(dim=0)) == 4
    assert Prompt(length=20).model(base).initial["words.prompt"].shape == (20, 3)


def test_the_seed_of_a_recipe_draws_them():
    seeds = (0, 0, 1)
    drawn = [
        Prompt(length=3, init="random").model(build_model("lstm", (5,), 11, seed)).initial["embed.prompt"]
        for seed in seeds
    ]
    assert torch.equal(drawn[0], drawn[1]) and not torch.allclose(drawn[0], drawn[2], atol=0.1)
    scale = build_model("lstm", (5,), 11, 0).initial["embed.weight"].square().mean().sqrt()
    assert float(drawn[0].square().mean().sqrt() / scale) == pytest.approx(1, abs=0.2)


def test_the_word_of_padding_is_none_of_them():
    module = nn.Sequential(nn.Embedding(3, 2, padding_idx=0), MeanOverPositions(), nn.Linear(2, 2))
    net = Prompt(length=8).model(Net(module, (4,), 2, token_inputs=True))
    assert net.initial["0.prompt"].any(1).all()


# where they stand -----------------------------------------------------------------------------------------------------
def test_outputs_and_features_of_positions_are_those_of_the_text():
    base = build_tiny_text_net(pooled=False)
    x = torch.randint(0, 7, (5, 4))
    net = Prompt(length=3).model(base)
    logits, features, taps, _ = net.forward(net.initial, x, taps=("attention",))
    assert logits.shape == (5, 4, 2) and features.shape == (5, 4, 3) and taps["attention"].shape == (5, 7, 3)
    long = torch.cat((read_words(net, base.initial["words.weight"]).expand(5, -1), x), 1)
    torch.testing.assert_close(logits, base.forward(base.initial, long)[0][:, 3:])
    held = base.initial["words.weight"][long]
    torch.testing.assert_close(net.forward_from_block(net.initial, held, 1), logits)


def read_words(net: Net, weight: Tensor) -> Tensor:
    """The tokens whose rows the vectors begin with."""
    rows = net.initial[find_prompt_name(net.module)]
    return torch.stack([(weight == row).all(1).nonzero()[0, 0] for row in rows])


KINDS = {
    "bert": ("BertForSequenceClassification", "BertConfig", 1),
    "tagger": ("BertForTokenClassification", "BertConfig", 1),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", 1),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertConfig", 1),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", 0),
    "gpt2-sentences": ("GPT2ForSequenceClassification", "GPT2Config", 0),
    "llama": ("LlamaForCausalLM", "LlamaConfig", 0),
    "llama-sentences": ("LlamaForSequenceClassification", "LlamaConfig", 0),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", 0),
}


def make_text_model(kind: str) -> tuple[Any, int]:
    """A tiny model of transformers, and how many of a text's positions come before the prompt."""
    hf: Any = pytest.importorskip("transformers")
    name, config_name, at = KINDS[kind]
    sizes: Any = dict(vocab_size=40, num_labels=3, pad_token_id=1 if kind == "roberta" else 0, eos_token_id=2)
    match config_name:
        case "GPT2Config":
            sizes |= dict(n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=2)
        case "DistilBertConfig":
            sizes |= dict(dim=8, hidden_dim=12, n_layers=2, n_heads=2, max_position_embeddings=16)
        case _:
            sizes |= dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
            sizes |= dict(max_position_embeddings=16)
    if config_name in ("LlamaConfig", "GemmaConfig"):
        sizes |= dict(num_key_value_heads=2, head_dim=4)
    torch.manual_seed(0)
    return getattr(hf, name)(getattr(hf, config_name)(**sizes)).double().eval(), at


def draw_padded(padding: int) -> dict[str, Tensor]:
    """Texts of 6, 3 and 1 words, and their mask."""
    tokens = torch.randint(3, 40, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(6) < torch.tensor([[6], [3], [1]])).long()
    return {"input_ids": torch.where(mask > 0, tokens, padding), "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_words_computes_what_transformers_does_with_these_words_in_the_text(kind):
    """Masks, positions, pooling and outputs are all those of the longer text."""
    model, at = make_text_model(kind)
    inputs = draw_padded(model.config.pad_token_id)
    classes = 40 if kind in ("gpt2", "llama", "gemma") else 3
    module = TransformersModel(model, causal=not at)
    base = build_user_net(module, {"input_ids": (6,)}, classes, example={k: v[:1] for k, v in inputs.items()})
    net = Prompt(length=4).model(base)
    weight = model.get_input_embeddings()(torch.arange(40)).detach()
    words = read_words(net, weight).expand(3, -1)
    longer = {
        key: torch.cat((value[:, :at], words if key == "input_ids" else torch.ones_like(words), value[:, at:]), 1)
        for key, value in inputs.items()
    }
    with torch.no_grad():
        expected = model(**longer).logits
        found = net.forward(net.initial, inputs)[0]
    if expected.dim() == 3:
        expected = torch.cat((expected[:, :at], expected[:, at + 4 :]), 1)
    present = inputs["attention_mask"] > 0 if expected.dim() == 3 else slice(None)
    torch.testing.assert_close(found[present], expected[present], rtol=0, atol=1e-7)
    assert set(net.initial) >= {find_prompt_name(net.module)} and net.digest
    assert any("prompt" not in name for name in net.initial) == (kind not in ("gpt2", "llama", "gemma"))


def test_patches_of_a_vision_transformer_of_transformers():
    hf: Any = pytest.importorskip("transformers")
    sizes: Any = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    torch.manual_seed(0)
    config = hf.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    model, x = hf.ViTForImageClassification(config).double().eval(), torch.rand(2, 1, 8, 8).double()
    base = build_user_net(model, (1, 8, 8), 3)
    net = Prompt(length=4).model(base)
    rows = net.initial["vit.embeddings.prompt"]
    assert rows.shape == (4, 8) and 0.01 < float(rows.std()) < 0.04
    with torch.no_grad():
        seen = model.vit.embeddings(x)
        seen = torch.cat((seen[:, :1], rows.expand(2, -1, -1), seen[:, 1:]), 1)
        for layer in getattr(model.vit, "layers", None) or model.vit.encoder.layer:
            seen = layer(seen)
            seen = seen if isinstance(seen, Tensor) else seen[0]
        expected = model.classifier(model.vit.layernorm(seen)[:, 0])
        torch.testing.assert_close(net.forward(net.initial, x)[0], expected, rtol=0, atol=1e-9)


def test_the_transformer_of_the_list():
    net, x = Prompt(length=2).model(vit((3, 32, 32), 10)), torch.rand(2, 3, 32, 32)
    assert set(net.initial) == {"patches.prompt", "fc.weight", "fc.bias"}
    logits, features, taps, _ = net.forward(net.initial, x, taps=("norm",))
    assert logits.shape == (2, 10) and features.shape == (2, 64) and taps["norm"].shape == (2, 66, 64)
    torch.testing.assert_close(features, taps["norm"].mean(1))


class Reader(nn.Module):
    """A transformer as a stranger writes one: positions of a table, padding as 0, the outputs of the first position."""

    def __init__(self, positions: int = 12, first: bool = True):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(positions, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head, self.first = nn.Linear(8, 3), first

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places(torch.arange(text.shape[1]))
        x = self.layer(x, src_key_padding_mask=text == 0)
        return self.head(x[:, 0] if self.first else x)


def test_a_module_of_ones_own():
    torch.manual_seed(0)
    module, text = Reader().double().eval(), torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 10]])
    base = build_user_net(module, (5,), 3)
    net = Prompt(length=2).model(base)
    words = read_words(net, base.initial["words.weight"]).expand(2, -1)
    longer = torch.cat((text[:, :1], words, text[:, 1:]), 1)
    with torch.no_grad():
        torch.testing.assert_close(net.forward(net.initial, text)[0], module(longer))
    assert set(net.initial) == {"words.prompt", "head.weight", "head.bias"}
    each = Prompt(length=2).model(build_user_net(Reader(first=False).double(), (5,), 3))
    assert each.forward(each.initial, text)[0].shape == (2, 5, 3)


class Named(nn.Module):
    """Tokens and a mask by the names of arguments, and a table beside them."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(6, 3)

    def forward(self, tokens: Tensor, attention_mask: Tensor, table: Tensor) -> dict[str, Tensor]:
        x = self.words(tokens) * attention_mask[:, :, None]
        return {"logits": self.head(torch.cat((x.sum(1) / attention_mask.sum(1, True), table), 1))}


def test_inputs_by_name():
    example = {"tokens": torch.zeros(1, 5).long(), "attention_mask": torch.ones(1, 5), "table": torch.zeros(1, 2)}
    base = build_user_net(Named(), {k: tuple(v.shape[1:]) for k, v in example.items()}, 3, example=example)
    net = Prompt(length=3).model(base)
    assert net.call_form == base.call_form == "names"
    given = {"tokens": torch.randint(0, 11, (2, 5)), "attention_mask": torch.ones(2, 5), "table": torch.rand(2, 2)}
    rows, words = net.initial["words.prompt"], base.initial["words.weight"][given["tokens"]]
    mean = torch.cat((rows.expand(2, -1, -1), words), 1).mean(1)
    expected = torch.nn.functional.linear(
        torch.cat((mean, given["table"]), 1), net.initial["head.weight"], net.initial["head.bias"]
    )
    torch.testing.assert_close(net.forward(net.initial, given)[0], expected)


def test_copies_and_pickles_keep_the_vectors():
    net, text = Prompt(length=2).model(build_user_net(Reader().double(), (5,), 3)), torch.randint(1, 11, (3, 5))
    expected = net.forward(net.initial, text)[0]
    module = copy_module(net)
    for again in (deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(again) is type(net.module) and find_prompt_name(again) == "words.prompt"
        torch.testing.assert_close(again.eval()(text), expected)
    assert "Reader" in repr(net)


# roles ----------------------------------------------------------------------------------------------------------------
def test_vectors_of_devices_own():
    run = toy(Prompt(length=2, role="personal"), sizes=(4, 4))
    start = run.params["words.prompt"].clone()
    run.play(2)
    own = [run.memory(d)[".personal"]["words.prompt"] for d in (0, 1)]
    assert torch.equal(run.params["words.prompt"], start) and not torch.equal(*own)
    with pytest.raises(ShoalError, match="nothing is left that is trained and shared"):
        toy(Prompt(role="personal", head="frozen"))


def test_the_head_is_trained_unless_it_gives_the_next_word():
    assert set(Prompt().model(build_tiny_text_net()).trainable) == {"words.prompt", "b.weight", "b.bias"}
    assert set(Prompt().model(lstm((5,), 11)).trainable) == {"embed.prompt"}
    assert set(Prompt(head="shared").model(lstm((5,), 11)).trainable) == {"embed.prompt", "fc.weight", "fc.bias"}
    personal = Prompt(head="personal").model(build_tiny_text_net())
    assert personal.names_with_role("personal") == ("b.weight", "b.bias")


# what cannot be told --------------------------------------------------------------------------------------------------
class Fixed(nn.Module):
    """Reads all positions by one matrix, so that texts of another length do not fit."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(20, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.words(text).flatten(1))


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Embedding(11, 4), nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head((self.left(text) + self.right(text)).mean(1))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(11, 4), nn.Linear(4, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.words(text))


class FirstWord(nn.Module):
    """Looks at the first word alone."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.words(text)[:, 0])


class Twice(nn.Module):
    """Reads the text, and in another call of the same layer its last word."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.words(text).mean(1) + self.words(text[:, -1:])[:, 0])


class OneTable(nn.Module):
    """Reads texts of so many words, the second of which may stand for padding."""

    def __init__(self, words: int, padding: int | None = None):
        super().__init__()
        self.words, self.head = nn.Embedding(words, 4, padding_idx=padding), nn.Linear(4, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.words(text).mean(1))


CASES = {
    "one word": (lambda: OneTable(1), 3, "tries the model with the tokens 0 and 1, and words has only 1 row for"),
    "no word left": (lambda: OneTable(2, 1), 3, "the token 2, which is no padding, .* and words has only 2 rows for"),
    "no room": (lambda: Reader(positions=12), 8, "places has only 12 rows for positions"),
    "fixed": (Fixed, 3, "cannot be used with this model: it raises RuntimeError.* when it is given 3 positions more"),
    "two tables": (TwoTables, 3, "left and right read the tokens"),
    "bag": (Bag, 3, "no nn.Embedding is called with the tokens"),
    "two calls": (Twice, 3, "words reads other tokens, too"),
    "first word": (FirstWord, 3, "prompt changes nothing here"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_told_is_refused_in_one_sentence(case):
    make, length, words = CASES[case]
    with pytest.raises(ShoalError, match=words) as error:
        Prompt(length=length).model(build_user_net(make(), (5,), 3))
    assert error.value.advice and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_texts_that_leave_no_room_are_refused(kind):
    pytest.importorskip("transformers")
    inputs, _ = draw_texts(1)
    classes = 2 if kind == "bert" else 40
    base = build_user_net(make_transformer(kind), {"input_ids": (6,)}, classes, example=inputs)
    with pytest.raises(ShoalError, match="makes texts of 6 tokens 3 longer, and the model has 8 positions") as error:
        Prompt(length=3).model(base)
    assert "text_length" in error.value.advice
    assert Prompt(length=2).model(base).trainable


def test_models_without_positions_are_refused():
    for net in (lenet((1, 28, 28), 10), build_tiny_net()):
        with pytest.raises(ShoalError, match="this model calls no nn.Embedding with tokens, nor cuts images"):
            Prompt().model(net)
    with pytest.raises(ShoalError, match="begins with words, and this model reads none"):
        Prompt(init="words").model(vit((3, 32, 32), 10))
    with pytest.raises(ShoalError, match="both choose what of the model is trained"):
        toy("prompt+lora")
    with pytest.raises(ValueError, match="length from 1"):
        Prompt(length=0)
    with pytest.raises(ShoalError, match="none that it could leave out"):
        toy("prompt+fjord")


def test_further_inputs_with_positions_are_refused():
    class Marked(Named):
        def forward(self, tokens, marks):
            return self.head(torch.cat((self.words(tokens).mean(1), marks[:, :2]), 1))

    example = {"tokens": torch.zeros(1, 5).long(), "marks": torch.ones(1, 5)}
    base = build_user_net(Marked(), {"tokens": (5,), "marks": (5,)}, 3, example=example)
    with pytest.raises(ShoalError, match="what marks has at the new positions nobody knows"):
        Prompt().model(base)
    two = {"one": torch.zeros(1, 5).long(), "other": torch.zeros(1, 5).long()}

    class Pair(Named):
        def forward(self, one, other):
            return self.head(torch.cat((self.words(one).mean(1), other[:, :2]), 1))

    base = build_user_net(Pair(), {"one": (5,), "other": (5,)}, 3, example=two)
    with pytest.raises(ShoalError, match="cannot tell which inputs of this model are tokens"):
        Prompt().model(base)


# runs -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, label",
    [("bert", True), ("roberta", True), ("llama", True), ("llama", False), ("gpt2", False), ("vit", True)],
)
def test_devices_train_in_one_call_and_like_one_after_the_other(kind, label, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    widths, honest = [], BatchedEngine.run_steps

    def run_steps(self, sharing_key, stack, *given):
        widths.append(stack.width)
        return honest(self, sharing_key, stack, *given)

    monkeypatch.setattr(BatchedEngine, "run_steps", run_steps)
    folder = write_hf_folder(tmp_path / kind, kind)
    data = "digits" if kind == "vit" else str(write_reviews(tmp_path / "reviews.csv", label))
    recipe: dict[str, Any] = dict(devices=4, sample=4, rounds=2, steps="2", batch=4, lr=0.5, precision="float64")
    recipe |= dict(split="iid", model=f"hf:{folder}", data=data)
    batched = shoal.run("prompt(length=3)", engine="batched", width=4, **recipe)
    serial = shoal.run("prompt(length=3)", engine="serial", **recipe)
    assert set(widths) == {4}
    assert_trees_close(batched.params, serial.params, 1e-9, kind)
    name = find_prompt_name(serial.net.module)
    assert not torch.equal(serial.params[name], serial.net.initial[name])
    numbers = sum(value.numel() for value in serial.params.values())
    assert serial.history.rows[0]["bytes_by"]["up"] == {"model": 4 * 8 * numbers}
    assert (numbers == 3 * 8) == (not label)


def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path):
    recipe: dict[str, Any] = TINY | {"model": "vit", "data": "digits", "checkpoint_every": 1, "lr": 0.1}
    whole = shoal.run("prompt(length=2)", **dict[str, Any](recipe | {"rounds": 3}))
    shoal.run("prompt(length=2)", out=str(tmp_path / "x"), **recipe)
    again = shoal.resume(tmp_path / "x", rounds=3)
    assert all(torch.equal(again.params[name], value) for name, value in whole.params.items())


def test_exports_compute_with_the_vectors_and_cannot_be_merged(tmp_path):
    data, model = draw_texts(), make_transformer("gpt2")
    recipe: dict[str, Any] = TINY | {"model": model, "data": data, "checkpoint_every": 1, "lr": 1.0}
    result = shoal.run("prompt(length=2)", out=str(tmp_path / "x"), **recipe)
    alone = shoal.export(tmp_path / "x", tmp_path / "prompt.safetensors")
    assert {k: v.shape for k, v in load_file(alone.path).items()} == {"model.transformer.wte.prompt": (2, 8)}
    whole = shoal.export(tmp_path / "x", tmp_path / "whole.safetensors", with_frozen=True)
    assert len(load_file(whole.path)) == 1 + len(result.net.frozen)
    with pytest.raises(ShoalError, match="prompt vectors cannot be merged"):
        shoal.export(tmp_path / "x", tmp_path / "merged.safetensors", merged=True)
    text = {key: value[:3] for key, value in data[0].items()}
    with torch.no_grad():
        assert result.module().eval()(text).shape == (3, 6, 40)
    program = shoal.export(tmp_path / "x", tmp_path / "model.pt2")
    assert program.deviation is not None and program.deviation.max_error < 1e-4


# peft -----------------------------------------------------------------------------------------------------------------
def test_a_prompt_beside_adapters_of_peft_and_none_of_pefts_own():
    peft: Any = pytest.importorskip("peft")
    data = draw_texts()
    with_lora = peft.get_peft_model(make_transformer("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    result = shoal.run("prompt(length=2)", model=with_lora, data=data, **TINY)
    assert [name.rpartition(".")[2] for name in result.params] == ["prompt"]
    for config in (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=8),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ):
        with pytest.raises(ShoalError, match="has virtual tokens of peft") as error:
            TransformersModel(peft.get_peft_model(make_transformer("llama"), config))
        assert "prompt(length=2)" in error.value.advice


def test_lora_is_as_it_was():
    """The role of the head is set by what both parts share."""
    assert set(LoRA(head="personal").model(lenet((1, 28, 28), 10)).names_with_role("personal")) == {
        "fc3.weight",
        "fc3.bias",
    }
