"""Rows of a history file, and the checks when one is read to resume, report or export."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from shoal.core.ledger import Row
from shoal.core.metric import AMOUNTS, METRICS, Metric
from shoal.storage.strict_json import parse_json


def parse_row(text: bytes, number: int, metrics: Mapping[str, Metric] = METRICS) -> Row:
    """The row of round `number` from a line of a history; a ValueError says what is wrong with it."""
    row = parse_json(text)
    if not isinstance(row, dict) or type(row.get("round")) is not int or row["round"] != number:
        raise ValueError("it is not the row of its round")
    try:
        check_row(row, metrics)
    except OverflowError:
        raise ValueError("a number is too large") from None
    return row


def check_row(row: Row, metrics: Mapping[str, Metric] = METRICS) -> None:
    """Raise a ValueError unless costs are at least 0, other metrics numbers or missing, and all numbers finite."""
    for column, metric in metrics.items():
        if metric.unit in AMOUNTS and "." not in column:
            if column in row or (metric.is_in_every_row and metric.total == "sum"):
                require_amount(row.get(column), column)
        elif row.get(column) is not None:
            require_number(row[column], column)
    for column in (c for c in ("devices", "dropped", "per_class", "log") if row.get(c) is not None):
        require_list(row[column], column)
    if not isinstance(row.get("stopped", ""), str):
        raise ValueError("stopped is no text")
    for said in row.get("log") or ():
        if not (isinstance(said, list) and len(said) == 2 and all(isinstance(word, str) for word in said)):
            raise ValueError("log is not a list of a part and a text each")
    for value in row.get("per_class") or ():
        if value is not None:
            require_number(value, "per_class")
    for column in ("bytes_by", "seconds_by"):
        for key, value in require_table(row.get(column) or {}, column).items():
            for cause, part in require_table(value, column).items() if isinstance(value, dict) else [(key, value)]:
                require_amount(part, f"{column} of {cause}")
    for column, value in row.items():
        require_finite(value, column)


def require_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is not a number")
    if not isfinite(float(value)):
        raise ValueError(f"{name} is not finite")
    return value


def require_amount(value: Any, name: str) -> float:
    if require_number(value, name) < 0:
        raise ValueError(f"{name} is below 0")
    return value


def require_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def require_table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a table")
    return value


def require_finite(value: Any, name: str) -> None:
    """Raise a ValueError where a number is not finite, such as 1e999, which JSON can hold and Python cannot write."""
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{name} is not finite")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        require_finite(inner, name)
