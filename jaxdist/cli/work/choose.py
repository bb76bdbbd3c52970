"""The work of `jaxdist plan` without --compile: choose a layout and say why; a run beside its prediction."""

import sys
from argparse import Namespace
from collections.abc import Sequence

from jaxdist.cli.work.check_run import check_run
from jaxdist.config.checks import check_data_files
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.plan.calibration.file import read_calibration, stale
from jaxdist.plan.calibration.measure import versions_now
from jaxdist.plan.search.cluster import PlanCluster, calibrated_cluster, gpu_cluster
from jaxdist.plan.search.result import (
    LayoutPlan,
    launch_command,
    layout_named,
    layout_plan_text,
    plan_layout,
    write_plan,
)
from jaxdist.plan.search.text import search_text
from jaxdist.precision.policy import precision_of

_OF_THE_TABLE = "the makers' figures times assumed shares (docs/planner.md); nothing was measured"


def run_choose(config: Config, arguments: Namespace) -> int:
    """Print the plan, and write the files asked for. Raises `UserError`."""
    cluster, basis = cluster_of(config, arguments)
    asked = layout_named(arguments.explain, config, cluster.devices) if arguments.explain else None
    plan = plan_layout(
        config,
        cluster,
        basis=basis,
        traced=0 if arguments.quick else max(10, arguments.finalists),
        compiled=0 if arguments.quick else arguments.finalists,
        asked=asked,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(search_text(plan))
    if arguments.json is not None:
        arguments.json.write_text(layout_plan_text(plan))
    if arguments.out is not None:
        print("", *_written(plan, arguments), sep="\n")
    return 0


def run_check(arguments: Namespace, *, given: Sequence[str]) -> int:
    """Print a run's prediction beside its measurements. given: the command line; cluster options in it count."""
    asked = {each.partition("=")[0] for each in given} & {"--gpu", "--calibration"}
    config = load_config(arguments.check / "config.yaml", planned=True) if asked else None
    cluster = None if config is None else cluster_of(config, arguments)[0]
    print("\n".join(check_run(arguments.check, cluster)))
    return 0


def cluster_of(config: Config, arguments: Namespace) -> tuple[PlanCluster, str]:
    """(the cluster of the arguments, where its rates are from). Raises `UserError`."""
    if arguments.calibration is None:
        precision, hosts = precision_of(config.precision), arguments.hosts or 1
        cluster = gpu_cluster(
            arguments.gpu,
            precision,
            hosts=hosts,
            per_host=arguments.gpus_per_host,
            link=arguments.link,
            inside=arguments.inside,
        )
        return cluster, _OF_THE_TABLE
    found = read_calibration(arguments.calibration)
    basis = f"measured, {arguments.calibration}, {found.conditions.get('measured', {})}"
    if found.inside is None and found.hosts > 1 and found.per_host > 1:
        basis += (
            "; no link inside a host was measured: taken for that between hosts, until jaxdist calibrate runs again"
        )
    if differs := stale(found, config, versions_now()):
        basis += f"; STALE: {'; '.join(differs)}: make it again with jaxdist calibrate"
    return calibrated_cluster(found), basis


def _written(plan: LayoutPlan, arguments: Namespace) -> list[str]:
    paths = write_plan(plan, arguments.out)
    lines = [f"Written: {', '.join(map(str, paths))}", f"Train: {launch_command(plan, str(paths[1]))}"]
    try:
        check_data_files(plan.config.data)
    except UserError as error:
        lines.append(f"Not here: {error}")
    return lines
