"""Whether a file or folder of the user's says whose its samples are, found from names without reading a sample."""

import csv
from pathlib import Path
from zipfile import ZipFile

from safetensors import safe_open

from shoal.data.array_files import is_array_folder
from shoal.data.image_folder import IMAGE_SUFFIXES
from shoal.data.parquet_files import import_parquet, is_parquet, list_parquet_files
from shoal.data.table import ColumnRoles
from shoal.data.table_dataset import OWNER_NAMES
from shoal.data.user_data import separate_folder


def is_named_by_owner(path: Path, roles: ColumnRoles) -> bool:
    """Whether a table has one column of owners by its name, arrays have `owners`, or images a folder per device.

    What cannot be read here says nothing: reading the data refuses it in words of its own.
    """
    try:
        train = separate_folder(path)[0] if path.is_dir() else path
        if is_parquet(train):
            names = import_parquet().read_schema(list_parquet_files(train)[0]).names
            return has_owner_column(names, roles)
        if train.suffix == ".csv":
            with train.open(encoding="utf-8-sig", newline="") as file:
                return has_owner_column([cell.strip() for cell in next(csv.reader(file), [])], roles)
        return "owners" in list_array_names(train) if not has_images(train) else has_device_folders(train)
    except Exception:
        return False


def has_owner_column(names: list[str], roles: ColumnRoles) -> bool:
    """Whether just one of the columns that have no other role is called as columns of owners are."""
    free = [name for name in names if name not in (roles.label, roles.order)]
    return sum(name.lower() in OWNER_NAMES for name in free) == 1


def list_array_names(path: Path) -> list[str]:
    """The names of the arrays in a file or a folder."""
    if is_array_folder(path):
        return [file.stem for file in path.glob("*.npy")]
    if path.suffix == ".npz":
        with ZipFile(path) as file:
            return [Path(name).stem for name in file.namelist()]
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            return list(file.keys())
    return []


def has_images(path: Path) -> bool:
    return path.is_dir() and not is_array_folder(path)


def has_device_folders(path: Path) -> bool:
    """Whether images lie in `<device>/<class>/`, and none in `<class>/`."""
    depths = [any(file.suffix.lower() in IMAGE_SUFFIXES for file in path.glob(form)) for form in ("*/*", "*/*/*")]
    return depths == [False, True]
