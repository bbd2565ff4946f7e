"""Columns of text in a table: made into token numbers once, and into next tokens as targets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.core.losses import IGNORED_TARGET
from shoal.data.sequences import MASK, PADDED_NAMES
from shoal.data.table import ColumnRoles, SampleColumn, Table
from shoal.data.user_split import make_data_error

TOKENS = PADDED_NAMES[True]
TOKEN_COLUMNS = (TOKENS, MASK, "token_type_ids")
"""The columns of a text that was made into tokens."""
NEXT_TOKENS = "labels"
"""What the column of targets is called that are tokens, as in Hugging Face."""
Tokeniser = Callable[[Sequence[str], Sequence[str] | None], tuple[dict[str, list[np.ndarray]], int]]
"""(texts, second texts of pairs or None) -> token columns by name, and how many texts were cut."""


@dataclass(frozen=True, eq=False)
class TextReading:
    """How texts of a table are read."""

    tokenise: Tokeniser | None = None
    """What makes tokens of texts; None: they stay categories."""
    next_tokens: bool = False
    """Whether the next tokens are the targets of a table that has no column of targets."""


def read_text_columns(table: Table, roles: ColumnRoles, reading: TextReading) -> tuple[Table, ColumnRoles, list[str]]:
    """The table with tokens in place of texts, and next tokens as targets where they are to be learnt.

    The remarks say how many texts were cut. A column `labels` that repeats the tokens, as Hugging Face has it, is moved
    on by one.
    """
    remarks: list[str] = []
    special = {roles.label, roles.owner, roles.order}
    free = [name for name in table.columns if name not in special]
    texts = [name for name in free if table.columns[name].kind == "category" and not is_role_name(name)]
    if reading.tokenise and texts and TOKENS not in table.columns:
        has_label = roles.label or reading.next_tokens or any(map(is_label_name, free))
        last = "" if has_label else next((name for name in reversed(free) if not is_owner_name(name)), "")
        texts = [name for name in texts if name != last]  # where none is named, the last column is the target
        if not texts:
            return table, roles, remarks
        table, remarks = tokenise_columns(table, texts, reading.tokenise)
        free = [name for name in table.columns if name not in special]
    if TOKENS not in table.columns:
        return table, roles, remarks
    inputs_alone = all(name in TOKEN_COLUMNS or is_owner_name(name) for name in free)
    if reading.next_tokens and not roles.label and inputs_alone:
        table = add_next_tokens(table, table.columns[TOKENS])
        return table, replace(roles, label=NEXT_TOKENS), remarks
    if NEXT_TOKENS in table.columns and roles.label in ("", NEXT_TOKENS) and repeats_tokens(table):
        table = add_next_tokens(table, table.columns[NEXT_TOKENS])
        return table, replace(roles, label=NEXT_TOKENS), remarks
    return table, roles, remarks


def count_each_text_as_a_token(
    texts: Sequence[str], pairs: Sequence[str] | None = None
) -> tuple[dict[str, list[np.ndarray]], int]:
    """A stand-in for a tokenizer, where texts are only to be counted."""
    return {TOKENS: [np.ones(1, dtype=np.int64) for _ in texts]}, 0


def is_label_name(name: str) -> bool:
    return name.lower() in ("label", "target", NEXT_TOKENS)


def is_owner_name(name: str) -> bool:
    return name.lower() in ("device", "owner")


def is_role_name(name: str) -> bool:
    return is_label_name(name) or is_owner_name(name)


def tokenise_columns(table: Table, texts: list[str], tokenise: Tokeniser) -> tuple[Table, list[str]]:
    """The table with the tokens of one column of texts, or of pairs from two, in place of them."""
    if len(texts) > 2:
        problem = f"{table.source} has the columns of text {', '.join(texts)[:80]}, and a model reads one, or a pair."
        raise make_data_error(problem, "Drop the others, or name them as label or owner.")
    for name in texts:
        missing = table.columns[name].find_missing()
        if missing.any():
            where = table.locate(int(missing.nonzero()[0][0]), name)
            raise make_data_error(f"{where}: the cell is empty.", "Drop the row: there is nothing to read.")
    first, *second = (table.columns[name].values.tolist() for name in texts)
    made, cut = tokenise(first, second[0] if second else None)
    empty = next((row for row, own in enumerate(made[TOKENS]) if not len(own)), None)
    if empty is not None:
        where = table.locate(empty, texts[0])
        raise make_data_error(f"{where}: the text has no tokens.", "Drop the row: there is nothing to read.")
    columns: dict[str, SampleColumn] = {}
    for name, column in table.columns.items():
        if name == texts[0]:
            columns |= {key: SampleColumn("sequence", values) for key, values in made.items() if key != MASK}
        elif name not in texts:
            columns[name] = column
    remarks = []
    if cut:
        longest = max(map(len, made[TOKENS]))
        remarks = [f"{cut} of {len(table)} texts have more than {longest} tokens and were cut there (text_length)."]
    return replace(table, columns=columns), remarks


def add_next_tokens(table: Table, tokens: SampleColumn) -> Table:
    """The table with a column of the tokens moved on by one: what a position is to predict, -100 where nothing is.

    Nothing is behind the last token of a text, where `attention_mask` is 0, and where a label says so.
    """
    mask = table.columns.get(MASK)
    moved = []
    for row, own in enumerate(tokens.values):
        target = np.append(np.asarray(own, dtype=np.int64)[1:], IGNORED_TARGET)
        if mask is not None:
            present = np.append(np.asarray(mask.values[row])[1:] != 0, False)
            target = np.where(present & (np.asarray(mask.values[row]) != 0), target, IGNORED_TARGET)
        moved.append(target)
    column = SampleColumn("array", np.stack(moved)) if tokens.kind == "array" else SampleColumn("sequence", moved)
    columns = {name: own for name, own in table.columns.items() if name != NEXT_TOKENS}
    return replace(table, columns=columns | {NEXT_TOKENS: column})


def repeats_tokens(table: Table) -> bool:
    """Whether the labels are the tokens themselves, but for those that do not count: then no position is moved yet."""
    labels, tokens = table.columns[NEXT_TOKENS], table.columns[TOKENS]
    if not {labels.kind, tokens.kind} <= {"array", "sequence"}:
        return False
    counted = 0
    for own, text in zip(labels.values, tokens.values):
        own, text = np.asarray(own), np.asarray(text)
        if own.shape != text.shape or own.dtype.kind not in "iu":
            return False
        counts = own != IGNORED_TARGET
        counted += int(counts.sum())
        if (own[counts] != text[counts]).any():
            return False
    return counted > 0
