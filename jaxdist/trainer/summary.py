"""The end of a run: samples.txt, report.html, and the last lines on the console."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxdist.build import Parts
from jaxdist.config.load import settings_of
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.files.regular import replace_file
from jaxdist.mesh import AnyMesh
from jaxdist.observe import read_metrics, redact_settings, work_unit
from jaxdist.observe.console import error_text
from jaxdist.observe.report import LayoutRow, Prediction, RemedyRow, RunRecord, Sent, read_run, write_report
from jaxdist.observe.report.read import defaults_of
from jaxdist.observe.report.sections.experts import experts_line
from jaxdist.observe.sinks import Image
from jaxdist.optim.muon import OPTIMIZER
from jaxdist.plan.changes import candidates
from jaxdist.plan.compiled.memory import batch_of, resident_bytes
from jaxdist.plan.explain import (
    ESTIMATED_PEAK,
    ESTIMATED_TEMPORARY,
    IN_HOST_MEMORY,
    NOT_HERE,
    explain_parts,
    memory_at_rest,
)
from jaxdist.plan.traced.ledger import GRADIENT, SENDS, Collective
from jaxdist.specs import PyTree, axes_by_dim
from jaxdist.trainer.header import yardsticks
from jaxdist.trainer.run import TrainingRun

if TYPE_CHECKING:  # the planner: a run does not load it
    from jaxdist.plan.remedies.table import Remedy, Table

WAIT_LIMIT = 0.05  # of a run's time; waiting longer for data is said at the end


def predict(config: Config, parts: Parts, mesh: AnyMesh, batch: PyTree) -> Prediction:
    """What the traced step says of memory and communication, for a report. Raises `UserError` as `ledger` does.

    batch: shapes with shardings
    """
    found = explain_parts(config, parts, mesh, batch)
    layout = tuple(
        LayoutRow(
            row.path,
            row.shape,
            row.dtype,
            tuple(axes_by_dim(row.spec, len(row.shape))),
            mesh.size // row.copies,
            row.bytes_per_device,
            row.bytes_per_device * (mesh.size // row.copies),
        )
        for row in found.parameters
    )
    at_rest = [name for name in memory_at_rest(parts.target) if name != IN_HOST_MEMORY]
    sums = {name: found.memory[name] for name in (*at_rest, "batch")}
    if carried := resident_bytes(parts.target.model_state):
        sums["state of the model"] = carried
    temporary, peak = found.memory[ESTIMATED_TEMPORARY], found.memory[ESTIMATED_PEAK]
    rest = peak - temporary - sum(sums.values())
    sums |= {"temporary": temporary} | ({"counters": rest} if rest > 0 else {})
    shown = {*sums, ESTIMATED_TEMPORARY, ESTIMATED_PEAK, NOT_HERE, IN_HOST_MEMORY}
    inside = {name: size for name, size in found.memory.items() if name not in shown and size}
    return Prediction(layout, sums, inside, _sent(found.ledger.collectives, found.ledger.busiest))


def _sent(collectives: Sequence[Collective], stage: int) -> tuple[Sent, ...]:
    """The collectives of the busiest stage, those of one purpose together."""
    merged: dict[tuple[Any, ...], Sent] = {}
    for each in collectives:
        key = (each.axes, purpose_of(each), each.op, each.link)
        calls = each.stages[stage]
        if not calls or not each.wire_bytes:
            continue
        before = merged.get(key, Sent(each.axes, key[1], each.op, (), 0, 0.0, each.link))
        phases = dict.fromkeys([*before.phases, each.phase])
        merged[key] = before._replace(
            phases=tuple(phases),
            calls=before.calls + calls,
            nbytes=before.nbytes + each.wire_bytes * calls / each.calls,
        )
    return tuple(merged.values())


def purpose_of(each: Collective) -> str:
    """What a collective is for, without the name of the parameter or the layer."""
    purpose = each.purpose
    if (each.phase, purpose) in SENDS.values():
        return purpose
    if purpose.startswith(OPTIMIZER):
        return "the optimizer's own"
    if purpose.startswith("gradients of activations"):
        return "gradients of activations"
    if purpose.startswith((GRADIENT, "gradients")):
        return "gradients of parameters"
    if purpose.startswith("activations"):
        return "activations"
    return "loss and weight" if purpose == "loss_and_weight" else "parameters" if each.op == "all_gather" else "sums"


def remedy_rows(config: Config, table: "Table | None" = None) -> list[RemedyRow]:
    """The changes that save memory, and pairs of them. table: what each would free, where they were compiled."""
    costs = {each.name: each for each in table.remedies} if table else {}
    rows = []
    for each in candidates(config):
        overrides, row = " ".join(each.overrides), costs.get(each.name)
        refused = each.refused or (row.refused if row else "")
        if each.in_use:
            rows.append(RemedyRow(each.name, overrides, "in use"))
        elif refused or each.config is None:
            why = refused or "it changes nothing here"
            rows.append(RemedyRow(each.name, overrides, "not here", why))
        elif table is None or row is None or row.cost is None:
            rows.append(RemedyRow(each.name, overrides, "possible"))
        else:
            rows.append(_compiled_row(table, row))
        costs.pop(each.name, None)
    rows += [_compiled_row(table, pair) for pair in costs.values() if table is not None and pair.cost is not None]
    return sorted(rows, key=lambda row: (row.state != "in use", row.state == "not here", -(row.saves or 0)))


def _compiled_row(table: "Table", remedy: "Remedy") -> RemedyRow:
    now, cost = table.now, remedy.cost
    assert cost is not None, f"{remedy.name} was refused"
    flops = cost.flops / now.flops if now.flops else None
    sent = cost.wire_bytes / now.wire_bytes if now.wire_bytes else None
    return RemedyRow(remedy.name, " ".join(remedy.overrides), "possible", "", table.saved(remedy), flops, sent)


def compiled_memory(config: Config, parts: Parts, batch: PyTree, table: "Table") -> dict[str, int]:
    """The memory of a device by the compiler, by the parts of a prediction. table: has the step as it is."""
    peak = table.now.memory.peak
    return {"temporary": max(0, peak - resident_bytes((parts.target, batch))), "peak": peak}


def write_run_report(run: TrainingRun, samples: str) -> RunRecord:
    """Write report.html. Returns what it shows."""
    plan = run.plan
    try:
        batch = batch_of(plan.config, plan.mesh, plan.source)
        prediction: Prediction | str = predict(plan.config, plan.parts, plan.mesh, batch)
    except UserError as error:  # a step that the ledger does not know: the rest of the page is as good
        prediction = f"The step cannot be read: {error}."
    record = read_run(run.outputs.folder)._replace(
        settings=redact_settings(settings_of(plan.config)),
        defaults=defaults_of(plan.config),
        samples=samples,
        prediction=prediction,
        remedies=remedy_rows(plan.config),
    )
    write_report(run.outputs.folder / "report.html", record)
    return record


def give_pictures(run: TrainingRun, record: RunRecord) -> None:
    """Give the charts of the report to TensorBoard, W&B and MLflow, where the run uses one."""
    if run.outputs.sinks:
        from jaxdist.observe.report.pictures import figures_of, png_of  # loads matplotlib

        images = {each.name: Image(png_of(each), each.label) for each in figures_of(record)}
        run.outputs.sinks.pictures(record.last_step, images)


def data_wait(records: Sequence[Mapping[str, Any]]) -> float:
    """The fraction of a run's time that it waited for data, by the records of metrics.jsonl. The first is left out: its
    step includes compilation."""
    timed, rate = [record for record in records[1:] if "data_wait" in record], f"{work_unit(records)}_per_s"
    seconds = [1 / record[rate] for record in timed]  # times the tokens, or samples, of a step
    waited = sum(record["data_wait"] * each for record, each in zip(timed, seconds, strict=True))
    return waited / sum(seconds) if timed else 0.0


@contextmanager
def _told(run: TrainingRun, name: str) -> Iterator[None]:
    """A context in which a file that cannot be made is a line on the console: the run itself is complete."""
    try:
        yield
    except OSError as error:
        why = f"cannot be written: {error.strerror}"
    except Exception as error:  # such as a user's loss that cannot be traced again
        why = f"cannot be made: {error_text(error)}"
    else:
        return
    run.outputs.console.line(f"{name} {why}; the run and its checkpoints are complete")


def write_summary(run: TrainingRun, samples: str) -> None:
    """Write samples.txt and report.html, and say on the console how the run went. For process 0."""
    folder, console = run.outputs.folder, run.outputs.console
    if samples:
        with _told(run, "samples.txt"):
            replace_file(folder / "samples.txt", (samples + "\n").encode())
        console.line("sample\n" + "\n".join("  | " + line for line in samples.split("\n\n")[0].splitlines()[:12]))
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []  # a directory that was removed was made again
    if run.plan.config.observe.report and records:
        with _told(run, "report.html"):
            record = write_run_report(run, samples)
            with _told(run, "pictures of the report"):
                give_pictures(run, record)
    measure, baselines = yardsticks(run)
    key = "eval/bits_per_byte" if measure == "bits per byte" else "eval/loss"
    evaluations = [record for record in records if key in record]
    if evaluations and (baselines or key != "eval/loss"):  # a loss alone was on the console
        loss, step, last = evaluations[-1][key], evaluations[-1]["step"], records[-1]["step"]
        marks = [
            f"{'below' if loss < mark else 'NOT below'} the {name} model's {mark:.3f}"
            for name, mark in baselines.items()
        ]
        when = "" if step == last else f" (evaluated after step {step}, not since)"
        console.line(", ".join([f"held-out text: {loss:.3f} {measure}{when}", *marks]))
    waited = data_wait(records)
    if waited > WAIT_LIMIT:
        console.line(f"waited for data {waited:.0%} of the time: docs/data.md says what helps")
    if said := experts_line(records):
        console.line(said)
    console.line(f"run directory: {folder}")
