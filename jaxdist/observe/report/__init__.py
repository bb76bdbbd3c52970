"""report.html: self-contained pages about one run or several, without scripts and without anything from elsewhere.

Nothing here imports JAX's programs: what the traced step predicts is passed in, as a `Prediction`.
"""

from jaxdist.observe.report.comparison import write_comparison
from jaxdist.observe.report.page import write_report
from jaxdist.observe.report.read import read_run
from jaxdist.observe.report.record import LayoutRow, Prediction, RemedyRow, RunRecord, Sent

__all__ = ["LayoutRow", "Prediction", "RemedyRow", "RunRecord", "Sent", "read_run", "write_comparison", "write_report"]
