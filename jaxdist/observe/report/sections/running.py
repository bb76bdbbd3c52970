"""How a run spent its time: utilisation, and its sessions, checkpoints and incidents on one line."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdist.observe.metrics import curve
from jaxdist.observe.report.account import PURPOSES, Account, over_time
from jaxdist.observe.report.charts import Axis, Bar, Figure, Shares, TimeLine
from jaxdist.observe.report.elements import (
    Markup,
    number_text,
    page_section,
    rows_table,
    seconds_text,
    sentence,
    swatch,
    timing,
)
from jaxdist.observe.report.record import RunRecord, median

_OLD = "The lines of metrics.jsonl have no times: the run was made by an older version."
_WHAT = {
    "device": "waiting for the devices, which compute and communicate",
    "data": "waiting for the next batch",
    "host": "everything else of the loop",
    "eval": "evaluations",
    "save": "saving checkpoints, as far as training waits for it",
    "start": "importing, restoring, compiling and the first step, in each session",
    "stopped": "between two sessions, with the steps that were lost and taken again",
    "lost": "taken, and dropped by a rollback",
    "rest": "between lines, and in none of their accounts",
}


def utilisation_section(record: RunRecord, account: Account | None) -> tuple[str, Markup]:
    """The use of the devices: MFU where their peak is known, and the share of each purpose in the time of the run."""
    mfu = median(curve(record.metrics, "mfu").values)
    if np.isfinite(mfu):
        first = sentence("Model FLOPs utilisation: ", timing(record, f"{mfu:.1%}"), " of the devices' peak (median).")
    else:
        why = (
            "simulated devices have no peak" if record.simulated else "the devices' peak is not known, or not recorded"
        )
        first = sentence(f"Model FLOPs utilisation is not given: {why}.")
    if account is None:
        waited = median(curve(record.metrics, "data_wait").values)
        more = sentence(f"In the median step {waited:.1%} of the time was spent waiting for data.")
        return page_section("Utilisation", first, sentence(_OLD), *([more] if np.isfinite(waited) else []))
    sums, total = account.seconds, account.total
    shares = {name: seconds / total for name, seconds in sums.items()}
    computing = shares.get("device", 0.0)
    said = sentence(
        f"{computing:.1%} of ",
        timing(record, seconds_text(total)),
        " from the first start to the last step was computing.",
    )
    rows: list[tuple[object, ...]] = [
        (swatch(name, PURPOSES[name]), f"{shares[name]:.2%}", timing(record, seconds_text(sums[name])), _WHAT[name])
        for name in sums
    ]
    rows.append(("all", f"{sum(shares.values()):.2%}", timing(record, seconds_text(total)), ""))
    return page_section(
        "Utilisation",
        first,
        said,
        *(each.html() for each in time_figures(record, account)),
        rows_table(["purpose", "share", "time", "what it is"], rows, right=[1, 2]),
    )


def time_figures(record: RunRecord, account: Account) -> list[Figure]:
    """The shares of the purposes in the time of the run: of all of it, and over its course."""
    sums, total = account.seconds, account.total
    words = ", ".join(f"{PURPOSES[name]} {seconds / total:.1%}" for name, seconds in sums.items())
    key = {name: PURPOSES[name] for name in sums}
    since = "time since the first start" + (" (simulated devices)" if record.simulated else "")
    course = Shares(over_time(account), list(sums), Axis(0.0, total, since, times=True))
    label = f"The same shares over the course of the run, {seconds_text(total)} long."
    return [
        Figure("time", Bar(sums), f"Share of the run's time: {words}.", "The whole run.", key),
        Figure("time_over_the_run", course, label, "The same shares over the course of the run."),
    ]


def history_section(record: RunRecord, account: Account | None) -> tuple[str, Markup]:
    """Sessions, evaluations, checkpoints and incidents in time, and the incidents as a table."""
    parts: list[Markup] = []
    said = _incidents(record)
    restarts = max(0, len(account.sessions) - 1) if account else 0
    ran = f", {restarts:,} {'restart' if restarts == 1 else 'restarts'}" if account else ""
    kept = f"{len(record.checkpoints):,} checkpoints are kept" if record.checkpoints else "no checkpoint is kept"
    parts.append(sentence(f"{said}{ran}; {kept}."))
    if account is not None:
        parts.append(history_figure(record, account).html())
        if restarts:
            rows = [
                (
                    i,
                    Axis(0, 1, times=True).words(each.begin - account.begin),
                    f"{each.first_step:,} to {each.last_step:,}",
                )
                for i, each in enumerate(account.sessions, start=1)
            ]
            parts.append(rows_table(["session", "started after", "steps that are kept"], rows))
    if record.incidents:
        told = [(_step(each), each.get("what", "-"), each.get("action", "-")) for each in record.incidents]
        parts.append(rows_table(["step", "what happened", "what the run did"], told, right=[0]))
    return page_section("History", *parts)


def _step(incident: Mapping[str, Any]) -> str:
    step = incident.get("step")
    return f"{step:,}" if type(step) is int else "-"


def _incidents(record: RunRecord) -> str:
    count = len(record.incidents)
    return f"{count:,} {'incident' if count == 1 else 'incidents'}" if count else "No incidents"


def history_figure(record: RunRecord, account: Account) -> Figure:
    """Sessions, evaluations, checkpoints and incidents in time."""
    start = account.begin

    def marks(steps: list[int]) -> list[tuple[float, float]]:
        return [(account.at(step) - start,) * 2 for step in steps]

    evaluated = [each["step"] for each in record.metrics if any(key.startswith("eval/") for key in each)]
    incidents = [each["step"] for each in record.incidents if type(each.get("step")) is int]
    sessions = [(each.begin - start, each.end - start) for each in account.sessions]
    rows = [
        ("sessions", sessions, "device"),
        ("evaluations", marks(evaluated[:500]), "eval"),
        ("checkpoints", marks([step for step in record.checkpoints if step <= record.last_step]), "save"),
        ("incidents", marks(incidents[:500]), "bad"),
    ]
    x = Axis(0.0, account.total, times=True)
    counts = ", ".join(f"{len(pieces):,} {name}" for name, pieces, _ in rows)
    label = f"Time line of {seconds_text(account.total)}: {counts}. {_incidents(record)}."
    note = " (simulated devices)" if record.simulated else ""
    caption = f"Time since the first start{note}; marks are at their steps."
    return Figure("history", TimeLine(rows, x), label, caption)


def speed_of(record: RunRecord) -> str:
    """The median time of a step in words; "-" where it is not known."""
    return seconds_text(record.step_s) if np.isfinite(record.step_s) else "-"


def loss_text(value: float) -> str:
    """A loss, or "-"."""
    return number_text(value) if np.isfinite(value) else "-"
