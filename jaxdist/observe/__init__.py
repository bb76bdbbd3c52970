"""The record of a run: console, metrics.jsonl, env.json and report.html. Nothing here imports JAX.

`jaxdist.observe.report` is imported only where a report is written.
"""

from jaxdist.observe.console import Console
from jaxdist.observe.environment import (
    environment,
    measured_on,
    redact,
    redact_command,
    redact_settings,
    redact_urls,
    write_environment,
)
from jaxdist.observe.metrics import MetricsWriter, read_metrics, work_unit

__all__ = [
    "Console",
    "MetricsWriter",
    "environment",
    "measured_on",
    "read_metrics",
    "redact",
    "redact_command",
    "redact_settings",
    "redact_urls",
    "work_unit",
    "write_environment",
]
