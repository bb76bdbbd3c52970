"""What a plan predicted, beside what the run measured."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxdist.observe.metrics import curve
from jaxdist.observe.report.account import account_of
from jaxdist.observe.report.elements import Markup, page_section, rows_table, seconds_text, sentence, short_bytes
from jaxdist.observe.report.record import RunRecord, mapping
from jaxdist.observe.report.sections.cost import measured_peak


class Compared(NamedTuple):
    """A part of a step. predicted, measured: in seconds, or in bytes of memory or sent; None where it is not known."""

    part: str
    unit: str
    predicted: float | None
    measured: float | None

    def shown(self) -> tuple[str, str, str, str]:
        """(part, predicted, measured, measured / predicted) as text."""
        write = seconds_text if self.unit == "s" else short_bytes
        both = self.predicted and self.measured is not None
        ratio = (
            f"{self.measured / self.predicted:.2f}" if both and self.measured is not None and self.predicted else "-"
        )
        texts = ["-" if each is None else write(each) for each in (self.predicted, self.measured)]
        return self.part, texts[0], texts[1], ratio


def compared(record: RunRecord) -> list[Compared]:
    """The prediction of a run's plan.json beside its measurements, by part; [] without one."""
    choice = mapping(record.plan.get("choice"))
    parts = {str(name): each for name, each in mapping(choice.get("parts")).items() if _number(each)}
    if not parts or not _number(choice.get("seconds")):
        return []
    spent, steps = _spent(record)
    rows = [Compared(name, "s", seconds, None) for name, seconds in parts.items()]
    total = record.step_s if math.isfinite(record.step_s) else None
    rows.append(Compared("a step", "s", float(choice["seconds"]), total))
    for name, words in (("data", "waiting for the next batch"), ("host", "the host's own work")):
        rows.append(Compared(words, "s", None, spent.get(name, 0.0) / steps if steps else None))
    peak, sent = choice.get("peak_bytes"), curve(record.metrics, "sent_bytes").values
    rows.append(Compared("memory of a device", "B", _known(peak), measured_peak(record)))
    rows.append(
        Compared("sent by a device", "B", _known(choice.get("sent_bytes")), float(sent[-1]) if len(sent) else None)
    )
    return rows


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _known(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _spent(record: RunRecord) -> tuple[Mapping[str, float], int]:
    account = account_of(record.metrics)
    return ({}, 0) if account is None else (account.seconds, len(account.spans))


def plan_section(record: RunRecord) -> list[tuple[str, Markup]]:
    """The section; [] where the run has no plan.json."""
    rows = compared(record)
    if not rows:
        return []
    said = (
        f"The plan chose {mapping(record.plan.get('choice')).get('layout')}, by {record.plan.get('basis')}. A run"
        " measures the parts of a step on its devices together, as the step."
    )
    table = rows_table(
        ["part", "predicted", "measured", "measured / predicted"], [each.shown() for each in rows], right=[1, 2, 3]
    )
    return [page_section("Plan", sentence(said), table)]
