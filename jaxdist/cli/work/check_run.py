"""A run beside the prediction for its layout: `jaxdist plan --check RUN`."""

import math
from collections.abc import Sequence
from pathlib import Path

from jaxdist.config.load import load_config
from jaxdist.errors import UserError
from jaxdist.observe.report import read_run
from jaxdist.observe.report.read import PLAN_FILE
from jaxdist.observe.report.sections.plan import compared
from jaxdist.plan.closed.leaves import Known
from jaxdist.plan.search.choose import Predicted, predicted, unplannable
from jaxdist.plan.search.cluster import PlanCluster
from jaxdist.plan.search.result import candidate_to_json
from jaxdist.plan.search.space import layout_of, with_prefetch
from jaxdist.plan.traced.sharding import aligned


def check_run(folder: Path, cluster: PlanCluster | None) -> list[str]:
    """Lines: what was predicted for a run, by part, beside what it measured.

    cluster: what to predict for; None: what the plan.json of the run says counts. Raises `UserError` for a run without
    one.
    """
    record = read_run(folder)
    if cluster is not None:
        record = record._replace(plan={"choice": candidate_to_json(_predicted(folder, cluster))})
    rows = compared(record)
    if not rows:
        raise UserError(
            f"--check: {_without_plan(folder, record.notes)}; allowed: a run of a plan.yaml that jaxdist plan --out"
            " wrote; or give --calibration, or --gpu with --hosts and --gpus-per-host, to predict it now"
        )
    head = ("part", "predicted", "measured", "measured / predicted")
    return aligned([head, *(each.shown() for each in rows)], right=(1, 2, 3))


def _without_plan(folder: Path, notes: Sequence[str]) -> str:
    """What is wrong with the plan.json of a run. notes: of its record."""
    damaged = next((note.rstrip(".") for note in notes if note.startswith(PLAN_FILE)), None)
    if damaged is not None:
        return f"{folder}: {damaged}"
    return (
        f"{folder / PLAN_FILE} holds no prediction" if (folder / PLAN_FILE).exists() else f"{folder} has no plan.json"
    )


def _predicted(folder: Path, cluster: PlanCluster) -> Predicted:
    config = with_prefetch(load_config(folder / "config.yaml", planned=True), gpu=cluster.gpu)
    known, devices = Known(), config.mesh.devices
    if (why := unplannable(config, known)) is not None:
        raise UserError(f"--check: {why}")
    if devices != cluster.devices:
        raise UserError(
            f"--check: {folder} has {devices} devices, and the prediction is for {cluster.devices}; allowed: as many,"
            " by --hosts and --gpus-per-host, or a --calibration of that many devices"
        )
    return predicted(layout_of(config), config, cluster._replace(memory=math.inf), known)
