"""A data set from a table: the columns of targets, devices and times by their roles, and the rest as inputs."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.data.dataset import Dataset
from shoal.data.holding_out import choose_held_out_rows
from shoal.data.row_encoding import make_table_encoding
from shoal.data.table import ColumnRoles, SampleColumn, Table
from shoal.data.table_encoding import encode_arrays, encode_inputs, fit_columns, refuse_gaps, remark_on_decimal_commas
from shoal.data.text_columns import TOKENS, TextReading, read_text_columns
from shoal.data.user_split import (
    UserSamples,
    count_classes,
    make_data_error,
    number_owners,
    pad_targets,
    read_label_rows,
    refuse_unfit_rows,
)

LABEL_NAMES = ("label", "target", "labels")
OWNER_NAMES = ("device", "owner")
"""Columns that have a role by their name, whatever its case, where none is named."""
MOST_EXACT = 2**53
"""From here on, whole numbers beside each other are the same one in a column of numbers."""


def build_table_dataset(
    table: Table,
    test: Table | None,
    roles: ColumnRoles,
    test_share: float,
    seed: int,
    classes: int,
    name: str,
    text: TextReading | None = None,
) -> Dataset:
    """A data set from one table, or from one for each half; what is encoded is fitted on the training half.

    `text` says how columns of text are read, where they are no categories.
    """
    table, test = join_label_columns(table, roles.label), test and join_label_columns(test, roles.label)
    named, text = roles, text or TextReading()
    table, roles, text_remarks = read_text_columns(table, named, text)
    if test is not None:
        test, _, test_remarks = read_text_columns(test, named, text)
        text_remarks += test_remarks
    roles = find_roles(table, roles)
    check_table(table, roles)
    owners = number_column_owners(table, roles.owner) if roles.owner else None
    order = read_order(table, roles.order) if roles.order else None
    if test is None:
        kept, held = choose_held_out_rows(len(table), test_share, seed, order)
        table, test = table.take(kept), table.take(held)
        owners, order = (None if own is None else own[kept] for own in (owners, order))
    shared = [name for name in table.columns if name not in (roles.owner, roles.order)]
    lacking = [name for name in shared if name not in test.columns]
    if lacking:
        raise make_data_error(
            f"{test.source} lacks the column {lacking[0]!r} of the training half.", "Give both halves the same columns."
        )
    test = replace(test, columns={name: test.columns[name] for name in shared})
    check_table(test, replace(roles, owner="", order=""))
    targets, test_targets, class_names = encode_targets(table, test, roles.label)
    inputs = [name for name in shared if name != roles.label]
    text_remarks += [said for name in shared for said in remark_on_decimal_commas(name, table.columns[name])]
    table, test = (replace(half, columns={name: half.columns[name] for name in inputs}) for half in (table, test))
    encodings = fit_columns(table, roles.missing)
    x, test_x, remarks = encode_inputs(table, test, encodings, roles.missing)
    targets, test_targets = (y for _, y in read_label_rows([(x, targets), (test_x, test_targets)]))
    for half in ((x, targets), (test_x, test_targets)):
        refuse_unfit_rows(*half)
    remarks += [*text_remarks, *(said for column in table.columns.items() for said in remark_on_row_numbers(*column))]
    return Dataset(
        name,
        x,
        targets,
        test_x,
        test_targets,
        max(len(class_names), count_classes([(x, targets), (test_x, test_targets)], classes)),
        owners,
        class_names=class_names,
        order=order,
        remarks=tuple(remarks),
        encoding=make_table_encoding(table, encodings, roles, class_names),
    )


def join_label_columns(table: Table, label: str) -> Table:
    """The table with one column of rows in the place of the columns that `label` names with commas between them."""
    names = [name.strip() for name in label.split(",")]
    if len(names) < 2 or label in table.columns:
        return table
    for name in names:
        column = table.require_column(name, "label")
        missing = column.find_missing()
        if column.kind != "number":
            problem = f"The column {name!r} holds a {column.kind}, and several columns are learnt."
            raise make_data_error(problem, "Name columns of numbers, or of yes and no.")
        if missing.any():
            where = table.locate(int(missing.nonzero()[0][0]), name)
            raise make_data_error(f"{where}: the cell is empty.", "Drop the row: every sample needs its target.")
    labels = [table.columns[name] for name in names]
    values = np.stack([column.values for column in labels], 1)
    rows = values.astype(np.int64) if all(column.whole for column in labels) else values
    rest = {name: column for name, column in table.columns.items() if name not in names}
    return replace(table, columns={**rest, label: SampleColumn("array", rows)})


def find_roles(table: Table, roles: ColumnRoles) -> ColumnRoles:
    """The roles with the names of columns: those given, or those that are clear from names, or the last as label."""
    for role in ("label", "owner", "order"):
        if getattr(roles, role):
            table.require_column(getattr(roles, role), role)
    given = [name for name in (roles.label, roles.owner, roles.order) if name]
    if len(set(given)) != len(given):
        raise make_data_error("One column is given two of the roles label, owner and order.", "Give each its own.")
    free = [name for name in table.columns if name not in given]
    labels, owners = ([n for n in free if n.lower() in known] for known in (LABEL_NAMES, OWNER_NAMES))
    if not roles.label and len(labels) > 1 or not roles.owner and len(owners) > 1:
        raise make_data_error(
            f"{table.source} has the columns {', '.join(labels + owners)[:80]!r}.",
            "Say which one is the label, and which the owner.",
        )
    owner = roles.owner or next(iter(owners), "")
    label = roles.label or next(iter(labels), "") or next((n for n in reversed(free) if n != owner), "")
    if not label:
        raise make_data_error(
            f"{table.source} has the columns {', '.join(table.columns)[:80]!r}.",
            "It needs one column for the target, at most one for the device, and at least one more.",
        )
    return replace(roles, label=label, owner=owner)


def check_table(table: Table, roles: ColumnRoles) -> None:
    """Refuse a table without inputs, targets that are missing, and with the rule `refuse` whatever else is."""
    inputs = [name for name in table.columns if name not in (roles.label, roles.owner, roles.order)]
    if not inputs:
        raise make_data_error(
            f"{table.source} has the columns {', '.join(table.columns)[:80]!r}.",
            "It needs one column for the target, at most one for the device, and at least one more.",
        )
    check_role_columns(table, roles)
    if roles.missing == "refuse":
        for name in inputs:
            refuse_gaps(name, table)


def check_role_columns(table: Table, roles: ColumnRoles) -> None:
    """Refuse targets, owners and times that are missing."""
    for name, advice in ((roles.label, "target"), (roles.owner, "owner"), (roles.order, "time")):
        if name and (missing := table.columns[name].find_missing()).any():
            where = table.locate(int(missing.nonzero()[0][0]), name)
            raise make_data_error(f"{where}: the cell is empty.", f"Drop the row: every sample needs its {advice}.")


def encode_targets(table: Table, test: Table, label: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Targets of both halves and the names of classes: texts are numbered in sorted order, numbers stay as they are.

    Whole numbers and yes and no are classes, other numbers are to be predicted as they are.
    """
    columns = [half.columns[label] for half in (table, test)]
    kinds = {column.kind for column in columns}
    if len(kinds) > 1 and not kinds <= {"array", "sequence"}:
        raise make_data_error(
            f"The column {label!r} holds {' in one half and '.join(sorted(kinds))} in the other.",
            "Give both halves the same form.",
        )
    if kinds == {"category"}:
        names = sorted({text for column in columns for text in column.values})
        if all(name.isascii() and name.isdecimal() and len(name) < 10 for name in names):
            numbers = {name: int(name) for name in names}
            names = []
        else:
            refuse_free_labels(label, names, len(table))
            numbers = {name: i for i, name in enumerate(names)}
        y, test_y = (torch.tensor([numbers[text] for text in column.values]) for column in columns)
        return y, test_y, tuple(names)
    if kinds == {"number"}:
        if all(column.whole for column in columns):
            y, test_y = (torch.from_numpy(column.values.astype(np.int64)) for column in columns)
            values = torch.cat((y, test_y)).unique()
            if values[0] < 0 and len(values) <= max(2, len(y) // 2):  # classes like -1 and 1
                names = tuple(map(str, values.tolist()))
                return torch.searchsorted(values, y), torch.searchsorted(values, test_y), names
            return y, test_y, columns[0].names
        y, test_y = (torch.from_numpy(column.values.astype(np.float32)) for column in columns)
        return y, test_y, ()
    if kinds == {"array"}:
        y, test_y = (torch.from_numpy(np.ascontiguousarray(column.values)) for column in columns)
        dtype = torch.float32 if y.is_floating_point() else torch.int64
        return y.to(dtype), test_y.to(dtype), ()
    if kinds <= {"array", "sequence"}:
        longest = max(len(value) for column in columns for value in column.values)
        y, test_y = (pad_targets(list(column.values), f"column {label!r}", longest) for column in columns)
        return y, test_y, ()
    raise make_data_error(
        f"The column {label!r} holds dates, which cannot be learnt.",
        "Name another column as label.",
    )


def refuse_free_labels(label: str, names: list[str], rows: int) -> None:
    if len(names) > 20 and len(names) > rows / 2:
        raise make_data_error(
            f"The column {label!r} holds {len(names)} different texts in {rows} rows: these are no classes.",
            "Name the column with the target: label = COLUMN.",
        )


def number_column_owners(table: Table, owner: str) -> np.ndarray:
    """The device of each row: owners in sorted order, numbers by their size."""
    column = table.columns[owner]
    if column.kind == "number" and (np.abs(column.values) >= MOST_EXACT).any():
        row = int(np.argmax(np.abs(column.values) >= MOST_EXACT))
        problem = f"{table.locate(row, owner)}: numbers of 16 digits and more are not told apart."
        raise make_data_error(
            problem, "Write owners as texts: frame[COLUMN].astype(str), with a letter before a file's."
        )
    if column.kind == "category":
        return number_owners(column.values.tolist())
    if column.kind == "number" and column.whole:
        return number_owners(column.values.astype(np.int64))
    if column.kind == "date" or column.kind == "number":
        return np.unique(column.values, return_inverse=True)[1].reshape(-1)
    raise make_data_error(f"The column {owner!r} holds arrays, and cannot name owners.", "Name a column of names.")


def read_order(table: Table, order: str) -> np.ndarray:
    """When each sample was taken: dates or numbers, the newest largest."""
    column = table.columns[order]
    if column.kind not in ("number", "date"):
        raise make_data_error(f"The column {order!r} holds neither numbers nor dates.", "Name a column with the time.")
    return column.values


def remark_on_row_numbers(name: str, column: SampleColumn) -> list[str]:
    """A column that counts the rows, as files have that pandas wrote with its index."""
    if column.kind != "number" or not column.whole or len(column.values) < 10:
        return []
    named = name == "" or name.lower() in ("index", "id") or name.startswith("Unnamed:")
    if not named or len(np.unique(column.values)) < len(column.values):
        return []
    return [f"The column {name!r} numbers the rows, and a model could learn it by heart: drop it if that is not meant."]


def read_plain_samples(table: Table, roles: ColumnRoles, text: TextReading | None = None) -> UserSamples:
    """The samples of one half alone, of number columns or tokens: nothing is encoded with what another half shows."""
    table, roles, _ = read_text_columns(table, roles, text or TextReading())
    roles = replace(find_roles(table, roles), missing="refuse")
    check_table(table, roles)
    inputs = {n: c for n, c in table.columns.items() if n not in (roles.label, roles.owner, roles.order)}
    if TOKENS in inputs and all(column.kind in ("array", "sequence") for column in inputs.values()):
        tokens, _ = encode_arrays(table, table, list(inputs))
        y, _, names = encode_targets(table, table, roles.label)
        x = tokens if len(tokens) > 1 else tokens[TOKENS]
        return UserSamples(x, [names[i] for i in y.tolist()] if names else y)
    odd = next((name for name, column in inputs.items() if column.kind != "number"), None)
    if odd is not None:
        raise make_data_error(
            f"Column {odd!r} holds a {inputs[odd].kind}, and every device would encode it in its own way.",
            "Turn it into numbers, alike on all devices.",
        )
    x = torch.from_numpy(np.stack([column.values for column in inputs.values()], 1).astype(np.float32))
    label = table.columns[roles.label]
    if label.kind == "category":
        return UserSamples(x, label.values.tolist())
    if label.kind != "number":
        raise make_data_error(f"The column {roles.label!r} holds a {label.kind}.", "Name a column of classes as label.")
    return UserSamples(x, torch.from_numpy(label.values.astype(np.int64 if label.whole else np.float32)))


def refuse_roles(roles: ColumnRoles, what: str) -> None:
    """Refuse names of columns for data that have none."""
    for role in ("label", "owner", "order"):
        if getattr(roles, role):
            raise ShoalError(
                "bad-value",
                f"{role} names the column {getattr(roles, role)[:40]!r}, and {what} has no columns.",
                f"Leave {role} out, or give a table.",
            )
