"""The work of `scripts/plan.py`: compile a step for GPUs that are not there, and report."""

import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from jaxdist.config.schema import Config
from jaxdist.plan.compiled import ahead_of_time, hardware
from jaxdist.plan.report import compiled_text
from jaxdist.runtime.compiler import set_flags, set_options


def run_plan(
    config: Config, arguments: Namespace, compile_step: Callable[..., Any] = ahead_of_time.compile_ahead
) -> int:
    """Print the plan, and write the files asked for. Returns the exit status: 0, or 1 if the step does not fit.

    compile_step: a function like `compile_ahead`, for a comparison with another program. Raises `UserError`.
    """
    gpu, library = hardware.get_gpu(arguments.gpu), ahead_of_time.plugin_library()
    set_flags(config, "gpu", started=False)
    set_options(config, "gpu")
    given = arguments.target_config
    text = given.read_text() if given else ahead_of_time.target_config(gpu, library)
    mesh = ahead_of_time.mesh_of(config, text, hosts=arguments.hosts, gpus_per_host=arguments.gpus_per_host)
    ideal, realistic = (
        compiled_text.with_network(rates, arguments.network, arguments.latency) for rates in (gpu.rates, gpu.realistic)
    )
    planned = compile_step(config, gpu, mesh, (ideal, realistic))
    print(compiled_text.plan_text(planned, rows=arguments.rows, network=arguments.network))
    if arguments.hlo is not None:
        arguments.hlo.write_text(planned.text)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(compiled_text.plan_to_json(planned, config), indent=1) + "\n")
    fits = ahead_of_time.fit_verdict(planned.footprint, gpu).fits
    if not fits and config.memory.remat == "dots":
        print("With memory.remat=full it needs less; where memory.remat is auto, a run takes that.")
    return 0 if fits else 1
