"""Tables and figures from finished runs."""

from lit_madrl.report.distribution import plot_bars, plot_curve, print_table, summarize
from lit_madrl.report.runs import read_series

__all__ = ["plot_bars", "plot_curve", "print_table", "read_series", "summarize"]
