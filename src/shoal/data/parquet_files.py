"""Parquet files: small ones as tables; large ones are copied once, a piece at a time, into arrays that are mapped."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.errors import ShoalError, describe_error
from shoal.data.cache import load_cached_dataset
from shoal.data.dataset import Dataset
from shoal.data.frames import read_arrow_column
from shoal.data.holding_out import choose_held_out_rows
from shoal.data.table import ColumnRoles, SampleColumn, Table, assemble_table, choose_columns
from shoal.data.table_dataset import check_role_columns, encode_targets, find_roles, number_column_owners, read_order
from shoal.data.user_split import count_classes, make_data_error
from shoal.storage.files import damaged_file_error, explain_disk_errors

READ_AS_A_WHOLE = 2**30
"""Bytes, uncompressed, up to which parquet files are read into memory."""
ROWS = 8192
"""Rows of a parquet file that are read at a time."""


def import_parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ShoalError(
            "missing-extra", "Parquet files need the package pyarrow.", "pip install 'shoal[frames]'"
        ) from None
    return parquet


def is_parquet(path: Path) -> bool:
    """Whether a path is a parquet file, or a folder that has some."""
    return path.suffix == ".parquet" and path.is_file() or path.is_dir() and any(path.glob("*.parquet"))


def list_parquet_files(path: Path) -> list[Path]:
    """The file itself, or those of a folder in the order of their names."""
    with explain_disk_errors(path):
        return sorted(path.glob("*.parquet")) if path.is_dir() else [path]


def read_parquet(path: Path, kinds: Mapping[str, str] | None = None) -> Table:
    """All rows of a parquet file or folder as a table; where `kinds` says what columns are, the others are left out."""
    return read_parquet_columns(list_parquet_files(path), None, str(path), kinds)


def read_parquet_columns(
    files: Sequence[Path], names: list[str] | None, source: str, kinds: Mapping[str, str] | None = None
) -> Table:
    parquet = import_parquet()
    try:
        tables = [parquet.read_table(file, columns=names) for file in files]
    except Exception as error:
        raise damaged_file_error(files[0], describe_error(error)) from error
    odd = next((i for i, table in enumerate(tables) if table.column_names != tables[0].column_names), None)
    if odd is not None:
        raise make_data_error(
            f"{files[odd]} has other columns than {files[0].name}.", "Give all files of a folder the same columns."
        )
    every, columns = tables[0].column_names, []
    chosen = choose_columns(every, kinds, source)
    for i in chosen:
        chunks = [chunk for table in tables for chunk in table.column(i).chunks]
        column = tables[0].column(i) if len(tables) == 1 else join_chunks(chunks)
        columns.append(read_arrow_column(column, every[i], (kinds or {}).get(every[i], "")))
    return assemble_table([every[i] for i in chosen], columns, source)


def join_chunks(chunks: list[Any]) -> Any:
    import pyarrow

    return pyarrow.chunked_array(chunks)


def count_parquet_bytes(files: Sequence[Path]) -> int:
    """The uncompressed size of all files, as they say it themselves."""
    parquet, total = import_parquet(), 0
    for file in files:
        try:
            groups = parquet.ParquetFile(file).metadata
            total += sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups))
        except Exception as error:
            raise damaged_file_error(file, describe_error(error)) from error
    return total


def load_large_parquet(
    train: Path, test: Path | None, roles: ColumnRoles, root: Path, share: float = 0.2, seed: int = 0
) -> Dataset:
    """The data set of large parquet files from arrays in the cache below `root`, made when it is first asked for."""
    files, test_files = list_parquet_files(train), [] if test is None else list_parquet_files(test)
    if roles.missing != "refuse":
        raise make_data_error(
            f"missing is {roles.missing!r}, and {train} is too large to be read as a whole.",
            "Fill the gaps in the files.",
        )
    name = f"parquet:{train} {test} {roles} {share} {seed}"

    def read() -> Dataset:
        (root / ".arrays").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root / ".arrays", ignore_cleanup_errors=True) as folder:
            return convert_parquet(files, test_files, roles, Path(folder), share, seed)

    return load_cached_dataset(root, name, [*files, *test_files], read)


def convert_parquet(
    files: list[Path], test_files: list[Path], roles: ColumnRoles, folder: Path, share: float, seed: int
) -> Dataset:
    """The data set with its inputs in files of `folder`; columns with a role alone are in memory as a whole."""
    names, source = import_parquet().ParquetFile(files[0]).schema_arrow.names, str(files[0].parent)
    roles = find_roles(Table({name: SampleColumn("number", np.zeros(1)) for name in names}, source), roles)
    special = [name for name in (roles.label, roles.owner, roles.order) if name]
    heads = [read_parquet_columns(files, special, source)]
    heads += [read_parquet_columns(test_files, [roles.label], source)] if test_files else []
    check_role_columns(heads[0], roles)
    owners = number_column_owners(heads[0], roles.owner) if roles.owner else None
    order = read_order(heads[0], roles.order) if roles.order else None
    inputs = [name for name in names if name not in special]
    if test_files:
        kept, halves = np.arange(len(heads[0])), [(files, None), (test_files, None)]
    else:
        kept, held = choose_held_out_rows(len(heads[0]), share, seed, order)
        heads = [heads[0].take(kept), heads[0].take(held)]
        halves = [(files, kept), (files, held)]
    targets, test_targets, class_names = encode_targets(heads[0], heads[1], roles.label)
    x, test_x = (
        write_inputs(own, rows, len(head), inputs, folder / f"{i}")
        for i, ((own, rows), head) in enumerate(zip(halves, heads))
    )
    return Dataset(
        "own",
        x,
        targets,
        test_x,
        test_targets,
        max(len(class_names), count_classes([(x, targets), (test_x, test_targets)], 0)),
        None if owners is None else owners[kept],
        class_names=class_names,
        order=None if order is None else order[kept],
        mapped=True,
    )


def write_inputs(files: list[Path], rows: np.ndarray | None, count: int, names: list[str], start: Path) -> Any:
    """The inputs of these rows (ascending; None for all), written to files whose names begin with `start`."""
    arrays: dict[str, np.ndarray] = {}
    done = first = 0
    for columns in read_pieces(files, names):
        length = len(next(iter(columns.values())))
        own = slice(None) if rows is None else rows[(rows >= first) & (rows < first + length)] - first
        scalars = [name for name in names if columns[name].ndim == 1]
        blocks = {name: columns[name][own] for name in names if columns[name].ndim > 1}
        if scalars:
            blocks = {"table": np.stack([columns[name][own] for name in scalars], 1).astype(np.float32)} | blocks
        taken = 0
        for i, (name, block) in enumerate(blocks.items()):
            if name not in arrays:
                shape, path = (count, *block.shape[1:]), f"{start}-{i}.npy"
                arrays[name] = np.lib.format.open_memmap(path, "w+", block.dtype, shape)
            taken = len(block)
            arrays[name][done : done + taken] = block
        done, first = done + taken, first + length
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


def read_pieces(files: list[Path], names: list[str]) -> Iterator[dict[str, np.ndarray]]:
    """The columns of some rows after the other: numbers, or lists of one length, without gaps."""
    parquet = import_parquet()
    for file in files:
        try:
            pieces = parquet.ParquetFile(file).iter_batches(ROWS, columns=names)
            for piece in pieces:
                yield {name: read_piece(piece.column(name), name, file) for name in names}
        except ShoalError:
            raise
        except Exception as error:
            raise damaged_file_error(file, describe_error(error)) from error


def read_piece(values: Any, name: str, file: Path) -> np.ndarray:
    """Bytes as they are, whole numbers of lists as int64, the rest in single precision."""
    if values.null_count:
        raise make_data_error(f"{file}, column {name!r}: a cell is empty.", "Fill the gaps in the files.")
    kind = str(values.type)
    if "list" in kind:
        flat = values.flatten().to_numpy(zero_copy_only=False)
        if len(flat) != len(values) * len(values[0]) or any(len(own) != len(values[0]) for own in values):
            raise make_data_error(f"{file}, column {name!r}: lists of unequal length.", "Pad them to one length.")
        array = flat.reshape(len(values), -1)
        return array if array.dtype == np.uint8 else array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "buif":
        raise make_data_error(
            f"{file}, column {name!r} holds {kind}, and tables that do not fit into memory are numbers.",
            "Encode it as numbers in the files, or drop it.",
        )
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise make_data_error(f"{file}, column {name!r} holds a value that is not finite.", "Replace it.")
    return array
