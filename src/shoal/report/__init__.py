"""Reports of runs: a page with everything, or one picture."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.report.write import draw_comparison, write_report

__all__ = ["draw_comparison", "write_report"]


def __getattr__(name: str) -> Any:
    """What writes reports, imported when it is first asked for: the command line needs this package for its tables."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shoal.report import write

    return getattr(write, name)
