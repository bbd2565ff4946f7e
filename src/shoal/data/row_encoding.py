"""New rows for a model that was trained on a table: they become inputs as the rows of the training half did."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from shoal.data.table import MISSING_RULES, ColumnRoles, Table
from shoal.data.table_encoding import SCALARS, ColumnEncoding, encode_scalars, refuse_gaps, remark_on_test
from shoal.data.user_split import LARGEST, make_data_error


@dataclass(frozen=True, eq=False)
class TableEncoding:
    """How the columns of a table became inputs, in their order, and what its targets are called."""

    columns: tuple[ColumnEncoding, ...]
    label: str = ""
    """The column of targets; several with commas between them."""
    class_names: tuple[str, ...] = ()
    missing: str = "refuse"
    """What becomes of missing values, one of `MISSING_RULES`."""

    @property
    def kinds(self) -> dict[str, str]:
        """What the columns are, by name."""
        return {own.name: own.kind for own in self.columns}

    def encode_rows(self, table: Table) -> tuple[Tensor, list[str]]:
        """(N, inputs) of new rows, and remarks about what training could not show.

        Columns that are no inputs are left out, whatever they hold. Empty cells are filled as they were in training,
        or refused where they were refused then; a text that training did not show is none of the known ones.
        """
        names = [own.name for own in self.columns]
        lacking = [name for name in names if name not in table.columns]
        if lacking:
            problem = f"{table.source} lacks the column {lacking[0]!r}, which the model takes."
            raise make_data_error(problem, f"Give the columns {', '.join(names)}.")
        table = Table({name: table.columns[name] for name in names}, table.source, table.lines)
        if self.missing == "refuse":
            for name in names:
                refuse_gaps(name, table, "Fill it or drop the row: no cell was empty in training.")
        remarks = [
            text for own in self.columns for text in remark_on_test(own, table, self.missing, "rows", "new rows only")
        ]
        return encode_scalars(self.columns, table, "the new rows"), remarks

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        columns = [{key: own for key, own in asdict(column).items() if own != PLAIN[key]} for column in self.columns]
        told = {"columns": columns, "label": self.label, "missing": self.missing}
        return told | ({"class_names": list(self.class_names)} if self.class_names else {})


PLAIN: dict[str, Any] = asdict(ColumnEncoding("", ""))
"""What a column is unless something else is noted of it."""


def parse_table_encoding(noted: Mapping[str, Any]) -> TableEncoding:
    """The encoding that `to_dict` wrote; a ValueError says what is wrong with another."""
    try:
        columns = [
            ColumnEncoding(**column | {"categories": tuple(column.get("categories", ()))})
            for column in noted["columns"]
        ]
        encoding = TableEncoding(tuple(columns), noted["label"], tuple(noted.get("class_names", ())), noted["missing"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("it does not say how its columns are read") from error
    numbers = [own for column in columns for own in (column.fill, column.center, column.scale)]
    texts = [own for column in columns for own in (column.name, *column.categories)]
    if not columns or encoding.missing not in MISSING_RULES or any(column.kind not in SCALARS for column in columns):
        raise ValueError("its columns are of no known kind")
    if not all(isinstance(own, int | float) and abs(own) <= LARGEST for own in numbers):
        raise ValueError("its columns have scales that are no numbers")
    if not all(column.scale > 0 for column in columns):
        raise ValueError("its columns have scales that are not above 0")
    if not all(isinstance(own, str) for own in (*texts, encoding.label, *encoding.class_names)):
        raise ValueError("its columns have names that are no texts")
    return encoding


def make_table_encoding(
    table: Table, encodings: Sequence[ColumnEncoding], roles: ColumnRoles, class_names: tuple[str, ...]
) -> TableEncoding | None:
    """The encoding of a table whose inputs are numbers, dates and categories alone; None of others."""
    if len(encodings) < len(table.columns):
        return None
    return TableEncoding(tuple(encodings), roles.label, class_names, roles.missing)
