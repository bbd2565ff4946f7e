"""Columns of text: tokens in their place, next tokens as targets, and what counts among them."""

from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.data.dataset import Dataset
from shoal.data.table import ColumnRoles, SampleColumn, Table, make_category_column, make_number_column
from shoal.data.table_dataset import build_table_dataset
from shoal.data.text_columns import TextReading

ROWS = 4


def tokenise_by_length(texts, pairs=None):
    """A token for each word: how many letters it has. At most four of them."""
    words = (
        [f"{text} {pair}".split() for text, pair in zip(texts, pairs)] if pairs else [text.split() for text in texts]
    )
    tokens = [np.array([len(word) for word in own], dtype=np.int64) for own in words]
    return {"input_ids": [own[:4] for own in tokens]}, sum(len(own) > 4 for own in tokens)


def read(columns: dict[str, SampleColumn], roles: ColumnRoles | None = None, **reading: Any) -> Dataset:
    table = Table(columns)
    return build_table_dataset(table, table, roles or ColumnRoles(), 0.2, 0, 0, "own", TextReading(**reading))


def texts(*lines: str) -> SampleColumn:
    return make_category_column(lines)


def sequences(*rows: list[int]) -> SampleColumn:
    return SampleColumn("sequence", [np.array(row) for row in rows])


def test_tokens_take_the_place_of_texts():
    made = read({"text": texts("a bb", "ccc", "a"), "label": texts("x", "y", "x")}, tokenise=tokenise_by_length)
    assert made.inputs["input_ids"].tolist() == [[1, 2], [3, 0], [1, 0]]
    assert made.inputs["attention_mask"].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert made.targets.tolist() == [0, 1, 0] and made.class_names == ("x", "y")


def test_the_last_column_is_the_target_and_two_texts_are_a_pair():
    columns = {"one": texts("a", "bb"), "two": texts("ccc", "a a"), "says": texts("yes", "no")}
    made = read(columns, tokenise=tokenise_by_length)
    assert made.inputs["input_ids"].tolist() == [[1, 3, 0], [2, 1, 1]] and made.class_names == ("no", "yes")


def test_an_owner_is_no_text():
    columns = {"text": texts("a", "bb"), "owner": texts("u", "v"), "label": texts("x", "y")}
    made = read(columns, tokenise=tokenise_by_length)
    assert made.owners is not None and made.owners.tolist() == [0, 1] and made.inputs["input_ids"].shape == (2, 1)


def test_next_tokens_by_hand():
    made = read({"text": texts("a bb ccc", "bb a")}, tokenise=tokenise_by_length, next_tokens=True)
    assert made.inputs["input_ids"].tolist() == [[1, 2, 3], [2, 1, 0]]
    assert made.targets.tolist() == [[2, 3, -100], [1, -100, -100]]


def test_next_tokens_stop_where_the_mask_does():
    ids = SampleColumn("array", np.array([[5, 6, 7], [8, 9, 0]]))
    mask = SampleColumn("array", np.array([[1, 1, 1], [1, 1, 0]]))
    made = read({"input_ids": ids, "attention_mask": mask}, next_tokens=True)
    assert made.targets.tolist() == [[6, 7, -100], [9, -100, -100]]


def test_labels_that_repeat_the_tokens_are_moved_and_others_are_not():
    ids = sequences([5, 6, 7], [8, 9])
    made = read({"labels": sequences([-100, 6, 7], [-100, 9]), "input_ids": ids})
    assert made.targets.tolist() == [[6, 7, -100], [9, -100, -100]]
    made = read({"input_ids": ids, "labels": sequences([6, 7, -100], [9, 1])})
    assert made.targets.tolist() == [[6, 7, -100], [9, 1, -100]]


def test_a_named_target_is_kept_where_next_tokens_could_be_learnt():
    columns = {"input_ids": sequences([5, 6], [7]), "label": make_number_column([1, 0], True)}
    assert read(columns, next_tokens=True).targets.tolist() == [1, 0]


def test_texts_that_are_cut_are_told_of():
    made = read({"text": texts("a a a a a", "a"), "label": texts("x", "y")}, tokenise=tokenise_by_length)
    assert made.inputs["input_ids"].shape == (2, 4)
    assert "1 of 2 texts have more than 4 tokens and were cut there (text_length)." in made.remarks


@pytest.mark.parametrize(
    "columns, problem",
    [
        ({"text": make_category_column(["a", None]), "label": texts("x", "y")}, "the cell is empty"),
        ({"text": texts("a", " "), "label": texts("x", "y")}, "the text has no tokens"),
        ({name: texts("a", "b") for name in ("one", "two", "three", "label")}, "a model reads one, or a pair"),
    ],
)
def test_what_cannot_be_read(columns, problem):
    with pytest.raises(ShoalError, match=problem):
        read(columns, tokenise=tokenise_by_length)


def test_without_a_tokenizer_texts_are_categories():
    made = read({"text": texts("a", "bb"), "label": texts("x", "y")})
    assert torch.equal(made.inputs, torch.eye(2))
