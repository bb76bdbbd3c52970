"""The settings of a run: those that differ from the defaults first, the rest folded; and where it ran."""

from typing import Any

from jaxdist.observe.environment import flat
from jaxdist.observe.report.elements import Markup, folded, page_section, rows_table, sentence, values_table
from jaxdist.observe.report.record import RunRecord


def shown(value: Any) -> str:
    """A value as it is written in YAML, nearly."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_section(record: RunRecord) -> tuple[str, Markup]:
    """The configuration: what is not a default, and the rest folded."""
    ours, usual = flat(record.settings), flat(record.defaults)
    if not ours:
        return page_section(
            "Settings", sentence("The run has no config.yaml: it was started from Python, or the file is gone.")
        )
    if not usual:
        every = rows_table(["setting", "value"], [(key, shown(value)) for key, value in ours.items()])
        return page_section("Settings", sentence("Which of them are defaults is not known."), every)
    changed = [
        (key, shown(value), shown(usual.get(key, "-"))) for key, value in ours.items() if usual.get(key) != value
    ]
    rest = [(key, shown(value)) for key, value in ours.items() if usual.get(key) == value]
    said = f"{len(changed)} of {len(ours)} settings differ from their defaults."
    made = rows_table(["setting", "value", "default"], changed) if changed else Markup("")
    others = folded(
        f"{len(rest)} settings with their defaults", rows_table(["setting", "value"], rest) if rest else Markup("")
    )
    return page_section("Settings", sentence(said), made, others)


def environment_section(record: RunRecord) -> tuple[str, Markup]:
    """Versions, machine and command."""
    known = ("data", "baselines", "state_bytes", "devices", "mesh")
    values = {key: value for key, value in record.environment.items() if key not in known}
    if isinstance(values.get("command"), list):
        values["command"] = " ".join(map(str, values["command"]))
    return page_section("Environment", values_table(values))


def data_section(record: RunRecord) -> tuple[str, Markup]:
    """Facts of the data source."""
    return page_section("Data", values_table(record.data))
