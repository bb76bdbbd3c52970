"""What is seen and kept of a run: console, metrics.jsonl, env.json and report.html. Nothing here imports JAX."""

from jaxdist.observe.console import Console
from jaxdist.observe.environment import environment, measured_on, redact, redact_command, redact_urls, write_environment
from jaxdist.observe.metrics import MetricsWriter, read_metrics, work_unit
from jaxdist.observe.report import LayoutRow, write_report

__all__ = [
    "Console",
    "LayoutRow",
    "MetricsWriter",
    "environment",
    "measured_on",
    "read_metrics",
    "redact",
    "redact_command",
    "redact_urls",
    "work_unit",
    "write_environment",
    "write_report",
]
