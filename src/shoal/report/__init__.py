"""Reports of runs: a page with everything, or one picture."""

from shoal.report.write import draw, write_report

__all__ = ["draw", "write_report"]
