"""The work of `jaxdist plan` without --compile: choose a layout, and say why."""

import json
import sys
from argparse import Namespace

from jaxdist.config.schema import Config
from jaxdist.plan.report.plan_text import search_text
from jaxdist.plan.search.cluster import gpu_cluster
from jaxdist.plan.search.result import Plan, launch_command, layout_named, make_plan, plan_to_json, write_plan
from jaxdist.precision.policy import precision_of


def run_choose(config: Config, arguments: Namespace) -> int:
    """Print the plan, and write the files asked for. Raises `UserError`."""
    hosts = arguments.hosts or 1
    cluster = gpu_cluster(
        arguments.gpu,
        precision_of(config.precision),
        hosts=hosts,
        per_host=arguments.gpus_per_host,
        link=arguments.link,
        inside=arguments.inside,
    )
    asked = layout_named(arguments.explain, config, cluster.devices) if arguments.explain else None
    plan = make_plan(
        config,
        cluster,
        basis="the makers' figures times assumed shares (docs/planner.md); nothing was measured",
        traced=0 if arguments.quick else max(10, arguments.finalists),
        compiled=0 if arguments.quick else arguments.finalists,
        asked=asked,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(search_text(plan))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(plan_to_json(plan), indent=1) + "\n")
    if arguments.out is not None:
        print("", *_written(plan, arguments), sep="\n")
    return 0


def _written(plan: Plan, arguments: Namespace) -> list[str]:
    paths = write_plan(plan, arguments.out)
    return [f"Written: {', '.join(map(str, paths))}", f"Train: {launch_command(plan, str(paths[1]))}"]
