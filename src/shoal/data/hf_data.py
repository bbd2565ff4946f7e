"""Data sets of Hugging Face: objects in memory, folders written by save_to_disk, and names where a network is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, describe_error
from shoal.data.frames import read_arrow_column, read_python_values
from shoal.data.table import SampleColumn, Table, assemble_table, choose_columns
from shoal.data.user_split import make_data_error

PREFIX = "hf:"
TRAIN_NAMES, TEST_NAMES = ("train",), ("test", "validation", "valid")
"""Names of the halves in a dict of data sets, the first that is there counts."""


def is_hf_dataset(data: Any) -> bool:
    """Whether data is a `datasets.Dataset`, such as a partition of flwr-datasets; the package is not imported."""
    return is_from_datasets(data) and hasattr(data, "with_format") and not isinstance(data, dict)


def is_from_datasets(data: Any) -> bool:
    return type(data).__module__.startswith("datasets.")


def load_hf_dataset(text: str) -> Any:
    """The data set of `hf:FOLDER` or `hf:NAME`, or a dict of its halves."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ShoalError(
            "missing-extra", "Data sets of Hugging Face need the package datasets.", "pip install 'shoal[hf-data]'"
        ) from None
    name = text.removeprefix(PREFIX)
    folder = Path(name).expanduser()
    if folder.is_dir():
        try:
            return datasets.load_from_disk(str(folder))
        except Exception as error:
            problem = f"{folder} is no data set of Hugging Face ({describe_error(error)[:100]})."
            raise make_data_error(problem, "Write the folder with save_to_disk.") from error
    try:
        return datasets.load_dataset(name)
    except Exception as error:
        raise ShoalError(
            "no-data",
            f"There is no folder {name[:80]}, and Hugging Face gave no data set of that name "
            f"({describe_error(error)[:100]}).",
            "Without a network, write it to a folder with save_to_disk where there is one, and give hf:FOLDER.",
        ) from error


def read_hf_table(data: Any, source: str = "The data set", kinds: Mapping[str, str] | None = None) -> Table:
    """The columns of a data set; classes keep their names, images become bytes with the channels first.

    Where `kinds` says what columns are, by name, the others are not read.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "column_names"):
        raise make_data_error("The data set of Hugging Face is a stream.", "Load it without streaming=True.")
    names = [data.column_names[i] for i in choose_columns(data.column_names, kinds, source)]
    arrow = data.with_format("arrow")[:]
    columns = [read_hf_column(data, name, arrow, (kinds or {}).get(name, "")) for name in names]
    return assemble_table(names, columns, source)


def read_hf_column(data: Any, name: str, arrow: Any, known_kind: str = "") -> SampleColumn:
    feature = data.features[name]
    kind = type(feature).__name__
    if kind == "Image":
        images = data.with_format(None).select_columns([name])
        return read_python_values([images[i][name] for i in range(len(images))], name)
    column = read_arrow_column(arrow.column(name), name, known_kind)
    if kind == "ClassLabel":
        low = column.values.min() if len(column.values) else 0
        if low < 0:
            raise make_data_error(
                f"The column {name!r} has the label -1: its classes are not told.", "Take another half as test data."
            )
        return SampleColumn("number", column.values, True, tuple(feature.names))
    return column


def separate_hf_halves(data: Any) -> tuple[Any, Any]:
    """Training and test data of a dict of data sets; `test` is the half of that name, or else `validation`."""
    train = next((data[name] for name in TRAIN_NAMES if name in data), None)
    if train is None:
        raise make_data_error(f"The data have the halves {', '.join(map(str, data))[:80]}.", "One must be `train`.")
    return train, next((data[name] for name in TEST_NAMES if name in data), None)
