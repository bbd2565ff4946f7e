"""Sequences of unequal length, and targets of their positions, are padded once to the longest, and have a mask."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset as TorchDataset

import shoal
from shoal.core.batch import Samples
from shoal.data.user_data import build_user_dataset
from shoal.service.run_description import build_device_setup, build_run_description

TOKENS = [[(i * j) % 9 + 1 for j in range(1, 2 + i % 5)] for i in range(40)]
LABELS = [i % 2 for i in range(40)]


class MeanOfWords(nn.Module):
    """The mean of the embeddings of the words that are there."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, inputs):
        mask = inputs["attention_mask"].unsqueeze(-1).to(self.head.weight.dtype)
        return self.head((self.embed(inputs["input_ids"]) * mask).sum(1) / mask.sum(1))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=6), min_size=3, max_size=9))
def test_what_is_padded_is_what_was_given(sequences):
    own = build_user_dataset((sequences, [0] * len(sequences)), test=(sequences, [0] * len(sequences)))
    if len({len(one) for one in sequences}) == 1:
        assert own.inputs.tolist() == sequences
        return
    ids, mask = own.inputs["input_ids"], own.inputs["attention_mask"]
    assert [row[present.bool()].tolist() for row, present in zip(ids, mask)] == sequences
    assert ids.shape == mask.shape == (len(sequences), max(map(len, sequences))) and not ids[mask == 0].any()


def test_halves_and_devices_are_padded_alike():
    own = build_user_dataset(([[1], [2, 3]], [0, 1], [[4, 5, 6, 7], [1]], [0, 1]))
    assert own.inputs["input_ids"].tolist() == [[1, 0, 0, 0], [2, 3, 0, 0]] and own.test_inputs["input_ids"].shape == (
        2,
        4,
    )
    devices = build_user_dataset([([[1], [2, 3]], [0, 1]), ([[4, 5, 6], [1]], [0, 1])], test=([[1, 2], [1]], [0, 1]))
    assert devices.inputs["attention_mask"].sum(1).tolist() == [1, 2, 3, 1]


def test_measurements_of_unequal_length():
    series = [np.ones((length, 2), np.float64) for length in (1, 3, 2)]
    own = build_user_dataset((series, [0, 1, 0]), test=(series, [0, 1, 0]))
    assert own.inputs["values"].shape == (3, 3, 2) and own.inputs["values"].dtype == torch.float32
    assert own.inputs["values"].sum((1, 2)).tolist() == [2, 6, 4]


class Sentences(TorchDataset):
    def __len__(self):
        return len(TOKENS)

    def __getitem__(self, i):
        return torch.tensor(TOKENS[i]), LABELS[i]


def test_a_torch_data_set_of_sentences():
    whole = build_user_dataset((TOKENS, LABELS))
    own = build_user_dataset(Sentences())
    assert torch.equal(own.inputs["input_ids"], whole.inputs["input_ids"])


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_padding_leaves_no_trace(engine):
    keys: dict[str, Any] = dict(devices=4, sample=3, rounds=2, batch=4, split="iid", engine=engine)
    torch.manual_seed(0)
    model = MeanOfWords()
    data = (TOKENS, LABELS, TOKENS, LABELS)
    short = shoal.run(data=data, model=model, **keys)
    longer = (TOKENS, LABELS, [*TOKENS, [1] * 12], [*LABELS, 0])  # pads everything to 12
    wide = shoal.run(data=longer, model=model, **keys)
    for name, value in short.params.items():
        assert torch.allclose(value, wide.params[name], atol=1e-6)


# a class for each position --------------------------------------------------------------------------------------------
TAGS = [[word % 3 for word in own] for own in TOKENS]


class Tagger(MeanOfWords):
    """Three tags; ten words."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.embed(inputs["input_ids"]))


def test_targets_of_positions_are_padded_by_what_does_not_count():
    own = build_user_dataset(([[1], [2, 3]], [[0], [1, 0]], [[4, 5, 6], [1]], [[1, 0, 1], [0]]))
    assert own.targets.tolist() == [[0, -100, -100], [1, 0, -100]]
    assert own.test_targets.tolist() == [[1, 0, 1], [0, -100, -100]] and own.classes == 2
    devices = build_user_dataset([([[1], [2, 3]], [[0], [1, 0]]), ([[4, 5, 6], [1]], [[1, 0, 1], [0]])], test_share=0.3)
    assert devices.targets.shape[1] == 3
    with pytest.raises(shoal.ShoalError, match="Number 0 of y is no sequence of whole numbers"):
        build_user_dataset((TOKENS, [[float(tag) for tag in own] for own in TAGS]))


@pytest.mark.parametrize("form", ["lists", "objects", "pandas", "polars", "data set"])
def test_tags_train_alike_on_every_engine(form):
    def make_frame(package: str) -> Any:
        return pytest.importorskip(package).DataFrame({"input_ids": TOKENS, "label": TAGS})

    class Tagged(TorchDataset):
        def __len__(self):
            return len(TOKENS)

        def __getitem__(self, i):
            return {"input_ids": torch.tensor(TOKENS[i]), "labels": len(TOKENS[i]) % 3}

    def objects(lists: list[Any]) -> np.ndarray:
        held = np.empty(len(lists), dtype=object)
        held[:] = [np.array(own) for own in lists]
        return held

    data = {
        "lists": lambda: (TOKENS, TAGS),
        "objects": lambda: (objects(TOKENS), objects(TAGS)),
        "pandas": lambda: make_frame("pandas"),
        "polars": lambda: make_frame("polars"),
        "data set": Tagged,
    }[form]()
    runs = []
    for engine in ("serial", "batched"):
        torch.manual_seed(0)
        model = Tagger() if form != "data set" else nn.Sequential(Tagger(), MeanOverPositions())
        runs.append(
            shoal.run(data=data, model=model, devices=4, sample=4, rounds=2, batch=4, split="iid", engine=engine)
        )
    assert runs[0].net.task.name == ("tokens" if form != "data set" else "classify")
    assert runs[0].history["loss"] == pytest.approx(runs[1].history["loss"], rel=1e-5)


class MeanOverPositions(nn.Module):
    def forward(self, x):
        return x.mean(1)


WORDS = (torch.arange(240).reshape(40, 6) * 7) % 50


@pytest.mark.parametrize("form", ["tensors", "halves", "ignored", "arrays", "one word"])
def test_tags_are_counted_without_the_words(form):
    tags = WORDS % 3
    data: Any = {
        "tensors": (WORDS, tags),
        "halves": ((WORDS, tags), (WORDS, tags)),
        "ignored": (WORDS, torch.where(WORDS % 2 == 0, tags, -100)),
        "arrays": (WORDS.numpy(), tags.numpy()),
        "one word": (WORDS.reshape(-1, 1), tags.reshape(-1, 1)),
    }[form]
    assert build_user_dataset(data).classes == 3
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 3))
    result = shoal.run(data=data, model=model, metrics=("per_class",), devices=4, sample=2, rounds=1, split="iid")
    assert result.net.task.name == "tokens" and result.net.classes == 3
    assert len(result.history.rows[-1]["per_class"]) == 3


def test_next_words_are_counted_with_the_words():
    text = torch.arange(41).repeat(2, 1)
    assert build_user_dataset(((text[:, :-1], text[:, 1:]), (text[:, :-1], text[:, 1:]))).classes == 41
    last = torch.full((2, 40), -100)
    last[:, -1] = 7  # only what comes at the end is learnt
    assert build_user_dataset(((text[:, :-1], last), (text[:, :-1], last))).classes == 40
    assert build_user_dataset(((text[:, :1], text[:, 1:2]),) * 2).classes == 2


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_the_language_model_reads_more_words_than_it_has_classes(engine):
    keys: dict[str, Any] = dict(devices=4, sample=2, rounds=1, batch=8, split="iid", engine=engine)
    result = shoal.run(data=(WORDS, WORDS % 3), model="lstm", **keys)
    assert result.params["embed.weight"].shape == (50, 300) and result.params["fc.weight"].shape == (3, 300)
    made = build_run_description(result.recipe, build_user_dataset((WORDS, WORDS % 3)), None)
    samples = Samples(WORDS, WORDS % 3, torch.arange(4))
    assert build_device_setup(made, samples).net.initial["embed.weight"].shape == (50, 300)


@pytest.mark.parametrize(
    "words, tags, problem",
    [
        (WORDS - 1, WORDS % 3, "a word -1, outside 0 to 999999.*the words from 0 up"),
        (WORDS + 10**9, WORDS % 3, "a word 10000000.., outside"),
        (WORDS, WORDS % 3 - 1, "a label -1, outside.*classes from 0 up"),
        (WORDS, torch.full_like(WORDS, -100), "No target counts: all are -100"),
    ],
)
def test_words_and_tags_without_a_place_are_refused(words, tags, problem):
    with pytest.raises(shoal.ShoalError) as refused:
        build_user_dataset((words, tags))
    assert re.search(problem, str(refused.value), re.DOTALL)


def test_rows_of_measurements_may_have_a_class_each():
    series = torch.randn(40, 6, 3)
    own = build_user_dataset((series, (series[:, :, 0] > 0).long()))
    assert own.classes == 2 and own.targets.dtype == torch.int64
    model = nn.Linear(3, 2)
    assert shoal.run(data=own, model=model, devices=4, sample=2, rounds=1, split="iid").net.task.name == "tokens"


def test_samples_may_be_dicts_with_sequences_of_unequal_length():
    class Tokenised(TorchDataset):
        def __len__(self):
            return len(TOKENS)

        def __getitem__(self, i):
            return {"input_ids": torch.tensor(TOKENS[i]), "age": torch.tensor([1.0 * i]), "labels": LABELS[i]}

    own, plain = build_user_dataset(Tokenised()), build_user_dataset((TOKENS, LABELS))
    assert set(own.inputs) == {"input_ids", "attention_mask", "age"} and torch.equal(own.targets, plain.targets)
    assert torch.equal(own.inputs["attention_mask"], plain.inputs["attention_mask"])
