"""Models of Hugging Face as values of a recipe: heads by task, texts by the folder's tokenizer, every engine."""

import json
import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hf_folders import WORDS, draw_reviews, write_hf_folder, write_reviews, write_tokenizer
from torch import Tensor

import shoal
from shoal.core.errors import ShoalError
from shoal.core.losses import IGNORED_TARGET
from shoal.core.streams import RandomStreams
from shoal.engines.batched.engine import BatchedEngine
from shoal.models.hf_folder import PUBLIC_NAME, fingerprint_hf_config, fingerprint_hf_folder, get_public_name
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import load_recipe_dataset
from shoal.runs.start import load_result

transformers = pytest.importorskip("transformers")

RECIPE: dict[str, Any] = dict(
    devices=4, sample=4, rounds=1, steps="2", batch=4, lr=0.1, precision="float64", split="iid"
)
TEXTS, LABELS = draw_reviews()
VOCABULARY: list[str] = list(WORDS)


def run_hf(folder: Path, **values: Any) -> Any:
    recipe: dict[str, Any] = RECIPE | {"model": f"hf:{folder}", "engine": "serial"} | values
    return shoal.run(**recipe)


def get_tokens() -> tuple[dict[str, Tensor], Tensor]:
    """The reviews as token numbers and mask, and their classes, in three."""
    rows = [[VOCABULARY.index(word) for word in text.split()] for text in TEXTS]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, own in zip(ids, rows):
        row[: len(own)] = torch.tensor(own)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}, torch.arange(len(rows)) % 3


# every engine ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, label, task, more",
    [
        ("bert", True, "classify", {}),
        ("llama", True, "classify", {}),
        ("llama", False, "tokens", {"optimiser": "adamw", "lr": 0.01, "local_lr_warmup": 1}),
        ("gpt2", False, "tokens", {}),
        ("roberta", True, "classify", {"optimiser": "adamw", "lr": 0.01, "local_lr_warmup": 1}),
        ("vit", True, "classify", {}),
    ],
)
def test_devices_train_in_one_call_and_like_one_after_the_other(kind, label, task, more, tmp_path, monkeypatch, caplog):
    widths, honest = [], BatchedEngine.run_steps

    def run_steps(self, sharing_key, stack, *given):
        widths.append(stack.width)
        return honest(self, sharing_key, stack, *given)

    monkeypatch.setattr(BatchedEngine, "run_steps", run_steps)
    folder = write_hf_folder(tmp_path / kind, kind)
    data = "digits" if kind == "vit" else str(write_reviews(tmp_path / "reviews.csv", label))
    with caplog.at_level(logging.WARNING):
        batched = run_hf(folder, data=data, engine="batched", width=4, **more)
    assert widths == [4] and "one after the other" not in caplog.text
    serial = run_hf(folder, data=data, **more)
    assert serial.net.task.name == task
    assert max(float((batched.params[k] - v).abs().max()) for k, v in serial.params.items()) < 1e-9
    assert batched.history["loss"] == pytest.approx(serial.history["loss"])


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_half_precision_is_near_the_whole_one(kind, engine, tmp_path):
    folder = write_hf_folder(tmp_path / kind, kind)
    data = str(write_reviews(tmp_path / "reviews.csv"))
    half, whole = (run_hf(folder, data=data, engine=engine, precision=p) for p in ("bf16", "float32"))
    assert half.history["loss"] == pytest.approx(whole.history["loss"], abs=0.02)
    assert half.params.keys() == whole.params.keys() and half.net.dtype == torch.float32


# heads and weights ----------------------------------------------------------------------------------------------------
def test_weights_are_those_of_the_folder_and_a_head_of_another_size_is_drawn_anew(tmp_path, caplog):
    folder = write_hf_folder(tmp_path / "bert", "bert", num_labels=5)
    saved = transformers.BertForSequenceClassification.from_pretrained(folder).state_dict()
    with caplog.at_level(logging.INFO, "shoal"):
        net = run_hf(folder, data=get_tokens(), lr=1e-9, precision="float32").net
    assert "no weights of the right size for classifier.bias, classifier.weight: drawn at random" in caplog.text
    assert net.initial["model.classifier.weight"].shape == (3, 8)
    for name, value in saved.items():
        if "classifier" not in name:
            assert torch.equal(net.initial[f"model.{name}"], value)
    again = run_hf(folder, data=get_tokens(), rounds=1, precision="float32").net
    other = run_hf(folder, data=get_tokens(), rounds=1, precision="float32", seed=1).net
    head = [own.initial["model.classifier.weight"] for own in (net, again, other)]
    assert torch.equal(head[0], head[1]) and not torch.equal(head[0], head[2])


def test_a_head_of_the_right_size_is_that_of_the_folder(tmp_path, caplog):
    folder = write_hf_folder(tmp_path / "bert", "bert", num_labels=3)
    saved = transformers.BertForSequenceClassification.from_pretrained(folder).state_dict()
    with caplog.at_level(logging.INFO, "shoal"):
        net = run_hf(folder, data=get_tokens(), precision="float32").net
    assert "drawn at random" not in caplog.text
    assert torch.equal(net.initial["model.classifier.weight"], saved["classifier.weight"])


def test_a_config_alone_gives_random_weights_and_says_so(tmp_path, caplog):
    folder = write_hf_folder(tmp_path / "llama", "llama", weights=False)
    with caplog.at_level(logging.WARNING, "shoal"):
        assert run_hf(folder, data=get_tokens()).history["loss"][0] is not None
    assert "has a config and no weights: all of them are drawn at random" in caplog.text


def test_a_number_and_a_label_for_each_token(tmp_path):
    inputs, labels = get_tokens()
    folder = write_hf_folder(tmp_path / "bert", "bert")
    result = run_hf(folder, data=(inputs, labels + 0.5))
    assert result.net.task.name == "regress" and result.net.classes == 1
    tags = (inputs["input_ids"] % 4).masked_fill(inputs["attention_mask"] == 0, IGNORED_TARGET)
    result = run_hf(write_hf_folder(tmp_path / "tagger", "tagger"), data=(inputs, tags))
    assert result.net.task.name == "tokens" and result.net.classes == 4
    assert not result.net.module.causal  # type: ignore[attr-defined]


def test_positions_are_those_that_transformers_counts(tmp_path):
    """RoBERTa numbers positions from the token of padding on."""
    folder = write_hf_folder(tmp_path / "roberta", "roberta", pad_token_id=1)
    inputs, labels = get_tokens()
    net = run_hf(folder, data=(inputs, labels), precision="float64").net
    model: Any = net.module
    net.reset_slots()
    tokens = torch.where(inputs["attention_mask"] > 0, inputs["input_ids"], 1)
    with torch.no_grad():
        expected = model.model.eval()(input_ids=tokens, attention_mask=inputs["attention_mask"]).logits
        found = net.forward(net.initial, inputs)[0]
    assert torch.allclose(expected, found, 0, 1e-9)


# targets --------------------------------------------------------------------------------------------------------------
def test_next_tokens_are_the_targets_where_no_column_is_named(tmp_path):
    folder = write_hf_folder(tmp_path / "llama", "llama")
    data = str(write_reviews(tmp_path / "texts.csv", label=False))
    recipe = Recipe().with_values(data=data, model=f"hf:{folder}")
    dataset = load_recipe_dataset(recipe, RandomStreams(0))
    ids, mask = dataset.inputs["input_ids"], dataset.inputs["attention_mask"]
    lengths = mask.sum(1)
    assert dataset.classes == len(WORDS)
    for row, length in enumerate(lengths.tolist()):
        assert dataset.targets[row, : length - 1].tolist() == ids[row, 1:length].tolist()
        assert set(dataset.targets[row, length - 1 :].tolist()) == {IGNORED_TARGET}


def test_perplexity_and_accuracy_are_over_positions_that_count(tmp_path):
    folder = write_hf_folder(tmp_path / "llama", "llama")
    data = str(write_reviews(tmp_path / "texts.csv", label=False))
    result = run_hf(folder, data=data, metrics=("perplexity",))
    assembly = assemble_run(result.recipe)
    samples = assembly.evaluator.samples.take_all()
    logits, targets = result.net.forward(result.params, samples.inputs)[0], samples.targets[0][0]
    counts = targets >= 0
    log_loss = torch.nn.functional.cross_entropy(logits[counts], targets[counts])
    hits = (logits.argmax(-1) == targets)[counts].double().mean()
    by_sample = torch.stack(
        [torch.nn.functional.cross_entropy(own[c], t[c]) for own, t, c in zip(logits, targets, counts)]
    )
    row = result.history.rows[-1]
    assert row["perplexity"] == pytest.approx(float(log_loss.exp())) and row["accuracy"] == pytest.approx(float(hits))
    assert row["loss"] == pytest.approx(float(by_sample.mean()))


# what cannot be used --------------------------------------------------------------------------------------------------
def write_case(case: str, folder: Path) -> tuple[str, Any]:
    """A model and data that do not go together."""
    inputs, labels = get_tokens()
    data: Any = (inputs, labels)
    if case == "no config":
        folder.mkdir()
    elif case == "pickle":
        write_hf_folder(folder, "bert")
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif case == "encoder and decoder":
        write_hf_folder(folder, "t5")
    elif case == "no such head":
        write_hf_folder(folder, "vit")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ViTModel"]}))
    elif case == "code of its own":
        write_hf_folder(folder, "bert")
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
        (folder / "config.json").write_text(json.dumps(config))
    elif case == "small vocabulary":
        write_hf_folder(folder, "bert", vocab_size=8)
    elif case == "long texts":
        write_hf_folder(folder, "bert", max_position_embeddings=4)
    elif case == "no tokenizer":
        write_hf_folder(folder, "bert", tokenizer=False)
        data = str(write_reviews(folder.with_suffix(".csv")))
    elif case == "image size":
        write_hf_folder(folder, "vit", image_size=16)
        data = "digits"
    elif case == "text for images":
        write_hf_folder(folder, "vit")
    elif case == "images for text":
        write_hf_folder(folder, "bert")
        data = "digits"
    elif case == "other columns":
        write_hf_folder(folder, "bert")
        data = (inputs | {"table": torch.zeros(len(labels), 2)}, labels)
    elif case == "other weights":
        write_hf_folder(folder, "bert")
        other = write_hf_folder(folder.with_name("other"), "llama")
        shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    elif case == "quantised":
        write_hf_folder(folder, "bert", quantization_config={"quant_method": "gptq", "bits": 4})
    return (f"hf:{folder}" if case != "no folder" else "hf:nobody/nothing-of-that-name"), data


CASES = {
    "no folder": "no model of that name in the hub cache",
    "no config": "a folder without config.json",
    "pickle": "has its weights in pytorch_model.bin and not in safetensors",
    "encoder and decoder": r"is an encoder with a decoder \(t5\)",
    "code of its own": "The config of .* cannot be used",
    "small vocabulary": r"The data have the token 13, and the vocabulary of .* has 8 tokens",
    "long texts": "The longest text of the data has 7 tokens, and .* has 4 positions",
    "no tokenizer": "The data hold texts, and in the folder of .* lies no tokenizer",
    "image size": "takes images of 1 x 16 x 16, and those of the data are 1 x 8 x 8",
    "text for images": "takes images, and the samples of the data are a dict",
    "images for text": r"reads text, and the samples of the data are of shape \(1, 8, 8\)",
    "other columns": "The data have table beside the tokens",
    "other weights": "The weights in .* are those of another model",
    "quantised": "are quantised",
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_used_is_refused_in_one_sentence(case, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    model, data = write_case(case, tmp_path / "model")
    with pytest.raises(ShoalError, match=CASES[case]):
        shoal.run(model=model, data=data, **RECIPE)


def test_a_task_for_which_a_model_has_no_head(tmp_path):
    folder = write_hf_folder(tmp_path / "vit", "vit")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ViTForMaskedImageModeling"]}))
    assert run_hf(folder, data="digits").net.classes == 10  # images are all that it can be for
    folder = write_hf_folder(tmp_path / "gpt2", "gpt2", eos_token_id=None, pad_token_id=None, bos_token_id=None)
    with pytest.raises(ShoalError, match="has no pad_token_id"):
        run_hf(folder, data=get_tokens())


def test_without_the_package_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    folder = write_hf_folder(tmp_path / "bert", "bert")
    monkeypatch.setattr("shoal.models.hf_folder.find_spec", lambda name: None)
    with pytest.raises(ShoalError, match="needs the package transformers") as caught:
        run_hf(folder, data="digits")
    assert caught.value.kind.name == "missing-extra" and "shoal[hf]" in caught.value.advice


# what a run remembers -------------------------------------------------------------------------------------------------
def test_a_folder_that_changed_is_refused_when_a_run_goes_on(tmp_path):
    folder = write_hf_folder(tmp_path / "bert", "bert")
    data = str(write_reviews(tmp_path / "reviews.csv"))
    run_hf(folder, data=data, out=str(tmp_path / "run"))
    shutil.copytree(folder, tmp_path / "kept")
    assert len(shoal.resume(str(tmp_path / "run"), rounds=2).history) == 2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-3}))
    for attempt in (lambda: shoal.resume(str(tmp_path / "run"), rounds=3), lambda: load_result(tmp_path / "run")):
        with pytest.raises(ShoalError, match="is not what it was when .* was begun") as caught:
            attempt()
        assert caught.value.kind.name == "other-recipe"
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)
    assert len(shoal.resume(str(tmp_path / "run"), rounds=3).history) == 3


def test_fingerprints_go_by_content_and_names_hold_no_path(tmp_path):
    one, two = (write_hf_folder(tmp_path / name / "bert", "bert") for name in ("a", "b"))
    assert fingerprint_hf_folder(f"hf:{one}") == fingerprint_hf_folder(f"hf:{two}")
    before = fingerprint_hf_folder(f"hf:{two}"), fingerprint_hf_config(f"hf:{two}")
    write_tokenizer(two)
    (two / "tokenizer_config.json").write_text("{}")
    after = fingerprint_hf_folder(f"hf:{two}"), fingerprint_hf_config(f"hf:{two}")
    assert before[0] != after[0] and before[1] == after[1]
    assert get_public_name(f"hf:{one}") == "hf:bert"
    for path in ("..", "../bert", "/etc", "a/../b", ".hidden", "a/b/c", "a\\b", "", "a/", "~root", "hf:x", "a/.."):
        assert not PUBLIC_NAME.fullmatch(path)
    assert PUBLIC_NAME.fullmatch("org/tiny-bert_1.0") and PUBLIC_NAME.fullmatch("bert")


# from the outside -----------------------------------------------------------------------------------------------------
def test_a_name_is_looked_up_in_the_hub_cache_and_never_in_a_network(tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--org--tiny"
    write_hf_folder(cached / "snapshots" / "abc", "bert")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    data = str(write_reviews(tmp_path / "reviews.csv"))
    recipe: dict[str, Any] = RECIPE | {"data": data}
    assert shoal.run(model="hf:org/tiny", **recipe).net.task.name == "classify"
    assert get_public_name("hf:org/tiny") == "hf:org/tiny"
    with pytest.raises(ShoalError, match="no model of that name in the hub cache"):
        shoal.run(model="hf:org/other", **recipe)


def test_check_and_list_know_them(tmp_path, capsys):
    folder = write_hf_folder(tmp_path / "llama", "llama")
    data = write_reviews(tmp_path / "texts.csv", label=False)
    run_in_process("check", f"hf:{folder}", "--data", str(data), "--method", "fedavg")
    printed = capsys.readouterr().out
    assert "task tokens" in printed and "14 outputs" in printed and "vectorised" in printed
    run_in_process("list", "models")
    assert "hf:FOLDER" in capsys.readouterr().out


def run_in_process(*words: str) -> None:
    from shoal.cli.commands import app

    app(list(words), standalone_mode=False)


def test_a_trained_model_is_exported_and_is_one_of_transformers(tmp_path):
    folder = write_hf_folder(tmp_path / "bert", "bert", num_labels=2)
    data = str(write_reviews(tmp_path / "reviews.csv"))
    result = run_hf(folder, data=data, out=str(tmp_path / "run"), precision="float32")
    shoal.export(str(tmp_path / "run"), str(tmp_path / "trained.safetensors"))
    weights = safetensors.torch.load_file(tmp_path / "trained.safetensors")
    model = transformers.BertForSequenceClassification.from_pretrained(folder)
    named = {name.removeprefix("model."): value for name, value in weights.items()}
    assert not model.load_state_dict(named, strict=False).unexpected_keys
    inputs, _ = get_tokens()
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        found = result.module().eval()(inputs)
    assert torch.allclose(expected, found, 0, 1e-5)
