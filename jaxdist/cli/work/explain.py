"""The work of `scripts/explain.py`, once its arguments are read and jax has its devices."""

import json
import sys
from argparse import Namespace

from jaxdist.config.schema import Config
from jaxdist.plan import budget
from jaxdist.plan.context import context_text
from jaxdist.plan.experts import experts_text
from jaxdist.plan.explain import explain, explanation_to_json
from jaxdist.plan.remedies.table import assumed_cluster, remedies, remedies_to_json
from jaxdist.plan.remedies.text import remedies_text
from jaxdist.plan.report import pipeline, text


def run_explain(config: Config, arguments: Namespace) -> list[str]:
    """Print the report and write the files that the arguments name. Returns a line for each collective over budget."""
    ticks = None if arguments.timeline is None else pipeline.configured_ticks(config)
    found = explain(config, compiled=arguments.compile, devices_per_host=arguments.devices_per_host)
    print(
        text.explanation_text(
            found, rows=arguments.rows, parameters=arguments.parameters, activations=arguments.activations
        )
    )
    for over_axis in (context_text(config), experts_text(config)):
        if over_axis is not None:
            print("", over_axis, sep="\n")
    table = None
    if arguments.remedies:
        cluster = assumed_cluster(config, arguments.gpu)
        table = remedies(config, cluster=cluster, progress=lambda text: print(text, file=sys.stderr, flush=True))
        print("", remedies_text(table, predicted_for=f"{cluster.devices} x {arguments.gpu}"), sep="\n")
    if arguments.json is not None:
        everything = explanation_to_json(found) | ({} if table is None else {"remedies": remedies_to_json(table)})
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")
    if arguments.plot is not None:
        text.draw_explanation(found, arguments.plot)
    if ticks is not None:
        print("", pipeline.show_pipeline(config, ticks, arguments.timeline), sep="\n")
    if arguments.write_budget is not None:
        arguments.write_budget.write_text(json.dumps(budget.budget_of(found.ledger), indent=1) + "\n")
    if not arguments.budget:
        return []
    return budget.over_budget(found.ledger, budget.read_budget(arguments.budget, found.ledger.mesh))
