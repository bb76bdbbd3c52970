"""The end of a run: samples.txt, report.html, and the last lines on the console."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jaxdist.config.load import to_yaml
from jaxdist.files.regular import replace_file
from jaxdist.mesh import sizes_of
from jaxdist.observe import read_metrics, redact_settings, work_unit
from jaxdist.specs import bytes_per_device, path_name, shard_count
from jaxdist.trainer.recorder import work_of_a_step
from jaxdist.trainer.run import TrainingRun, run_environment

WAIT_LIMIT = 0.05  # of a run's time; waiting longer for data is said at the end


def write_run_report(run: TrainingRun, records: Sequence[dict[str, Any]], samples: str) -> None:
    """Write report.html. records: of metrics.jsonl."""
    from jaxdist.observe.report import LayoutRow, write_report  # imports matplotlib, which is slow

    plan, folder = run.plan, run.outputs.folder
    layout = [
        LayoutRow(
            path_name(path),
            leaf.shape,
            str(leaf.dtype),
            str(leaf.sharding.spec),
            shard_count(leaf.sharding.spec, plan.mesh),
            bytes_per_device(leaf, leaf.sharding.spec, plan.mesh),
            math.prod(leaf.shape) * leaf.dtype.itemsize,
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(plan.parts.target.params)
    ]
    work, unit = work_of_a_step(plan.config, plan.source)
    write_report(
        folder / "report.html",
        title=folder.name,
        config_yaml=to_yaml(plan.config, redact_settings),
        environment=run_environment(plan.mesh),
        metrics=records,
        layout=layout,
        mesh_axes=sizes_of(plan.mesh),
        devices=[device.device_kind for device in plan.mesh.devices.flat],
        baselines=run.baselines,
        samples=samples,
        data_info={**redact_settings(plan.source.info), f"{unit}_per_step": work},
    )


def data_wait(records: Sequence[Mapping[str, Any]]) -> float:
    """The fraction of a run's time that it waited for data, by the records of metrics.jsonl. The first is left out: its
    step includes compilation."""
    timed, rate = [record for record in records[1:] if "data_wait" in record], f"{work_unit(records)}_per_s"
    seconds = [1 / record[rate] for record in timed]  # times the tokens, or samples, of a step
    waited = sum(record["data_wait"] * each for record, each in zip(timed, seconds, strict=True))
    return waited / sum(seconds) if timed else 0.0


@contextmanager
def _told(run: TrainingRun, name: str) -> Iterator[None]:
    """A context in which a file that cannot be written is a line on the console: the run itself is complete."""
    try:
        yield
    except OSError as error:
        run.outputs.console.line(
            f"{name} cannot be written: {error.strerror}; the run and its checkpoints are complete"
        )


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
            write_run_report(run, records, samples)
    evaluations = [record for record in records if "eval/bits_per_byte" in record]
    if evaluations:
        bits = evaluations[-1]["eval/bits_per_byte"]
        marks = [
            f"{'below' if bits < mark else 'NOT below'} the {name} model's {mark:.3f}"
            for name, mark in run.baselines.items()
        ]
        console.line(", ".join([f"held-out text: {bits:.3f} bits per byte", *marks]))
    waited = data_wait(records)
    if waited > WAIT_LIMIT:
        console.line(f"waited for data {waited:.0%} of the time: docs/data.md says what helps")
    console.line(f"run directory: {folder}")
