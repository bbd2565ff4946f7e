"""Reports of runs: a page with everything, or one picture."""

from shoal.report.write import draw_comparison, write_report

__all__ = ["draw_comparison", "write_report"]
