"""The page about one run."""

from pathlib import Path

import numpy as np

from jaxdist.files.regular import replace_file
from jaxdist.observe.report.account import account_of
from jaxdist.observe.report.elements import Markup, page_section, sentence, text
from jaxdist.observe.report.record import RunRecord, losses_of
from jaxdist.observe.report.sections.cost import memory_section, remedies_section, sent_section
from jaxdist.observe.report.sections.experts import experts_section
from jaxdist.observe.report.sections.learning import headline, learning_section, steps_section, summary_cards
from jaxdist.observe.report.sections.mesh import layout_section, mesh_section
from jaxdist.observe.report.sections.plan import plan_section
from jaxdist.observe.report.sections.running import history_section, utilisation_section
from jaxdist.observe.report.sections.settings import data_section, environment_section, settings_section
from jaxdist.observe.report.style import style_sheet


def page(title: str, top: str, sections: list[tuple[str, Markup]]) -> str:
    """A whole HTML page. top: what stands above the links to the sections."""
    links = "".join(f'<a href="#{name.lower().replace(" ", "-")}">{text(name)}</a>' for name, _ in sections)
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{style_sheet()}</style></head>"
    )
    body = "\n".join(made for _, made in sections)
    return f"{head}\n<body><main><header>{top}</header><nav>{links}</nav>\n{body}</main></body></html>\n"


@np.errstate(over="ignore", invalid="ignore")  # a damaged file may hold any numbers
def report_page(record: RunRecord) -> str:
    """The page about a run, whatever was recorded of it."""
    losses, account = losses_of(record), account_of(record.metrics)
    samples = Markup(f"<pre>{text(record.samples)}</pre>") if record.samples.strip() else sentence("There are none.")
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in record.notes)
    if record.simulated:
        warned = "The devices were simulated by a CPU: times are those of the CPU, and say nothing about GPUs."
        notes += f'<p class="note">{warned}</p>'
    said = headline(record, losses, account)
    top = f'<p class="run">{text(record.title)}</p><h1>{text(said)}</h1>{notes}'
    sections = [
        page_section("Summary", summary_cards(record, losses, account)),
        learning_section(record, losses),
        steps_section(record),
        *experts_section(record),
        utilisation_section(record, account),
        *plan_section(record),
        memory_section(record),
        sent_section(record),
        remedies_section(record),
        history_section(record, account),
        mesh_section(record),
        layout_section(record.prediction),
        page_section("Samples", samples),
        data_section(record),
        settings_section(record),
        environment_section(record),
    ]
    return page(record.title, top, sections)


def write_report(path: str | Path, record: RunRecord) -> None:
    """Write the page about a run at `path`, atomically.

    >>> import tempfile
    >>> from jaxdist.observe.report import RunRecord, write_report
    >>> record = RunRecord("mine", metrics=[{"step": 1, "loss": 2.0}])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(Path(folder) / "report.html", record)
    ...     print((Path(folder) / "report.html").read_text()[:15])
    <!DOCTYPE html>
    """
    replace_file(path, report_page(record).encode())
