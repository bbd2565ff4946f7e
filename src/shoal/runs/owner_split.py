"""The split of data that say whose each sample is, where nobody said how to split them."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shoal.data.dataset import DATASETS, HANDED_OVER
from shoal.data.noise import NOISE
from shoal.data.owner_names import is_named_by_owner
from shoal.data.sources import SOURCES
from shoal.data.table import ColumnRoles


def split_by_known_owners(values: Mapping[str, Any], varied: Collection[str] = ()) -> dict[str, Any]:
    """A new recipe's values with a device of each owner, where data of the user's name owners.

    Nothing changes where split, devices or a column of owners are given or `varied`, and for shipped data sets.
    Recorded recipes do not come here, since they hold every key.
    """
    said = {"split", "devices", "owner"} & {*values, *varied}
    if said or not names_owners(values):
        return dict(values)
    return {**values, "split": "owner", "devices": 0}


def names_owners(values: Mapping[str, Any]) -> bool:
    """Whether the data of a recipe's values are the user's own, and say whose each sample is."""
    data = str(values.get("data") or "")
    if data in HANDED_OVER:
        dataset = HANDED_OVER[data]
        return dataset.owners is not None and dataset.name.partition(":")[0] not in SOURCES
    if not data or data in DATASETS | NOISE or data in SOURCES or ".py:" in data:
        return False
    return is_named_by_owner(
        Path(data).expanduser(), ColumnRoles(str(values.get("label", "")), order=str(values.get("order", "")))
    )
