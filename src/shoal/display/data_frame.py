"""Tables as data frames of pandas, which is needed for nothing else."""

from typing import Any

from shoal.core.errors import ShoalError


def make_data_frame(columns_or_rows: Any) -> Any:
    """A `pandas.DataFrame` of a dict of columns or of a list of rows."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise ShoalError("missing-extra", "pandas is not installed.", "Run: pip install pandas.") from None
    return DataFrame(columns_or_rows)
