"""Advice for a device that ran out of memory, in place of a traceback: what the step needs, what would make it fit."""

import sys
from pathlib import Path

import jax

from jaxdist.config.checks import with_default_remat
from jaxdist.config.load import to_yaml
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.files.regular import replace_file
from jaxdist.mesh import count_hosts
from jaxdist.observe import redact_settings
from jaxdist.plan.compiled.hardware import GPUS, gpu_of
from jaxdist.plan.compiled.memory import check_windows
from jaxdist.plan.explain import explain
from jaxdist.plan.report.text import memory_text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA could not allocate, on a device or in its pool of host memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def advise(config: Config, folder: Path, reason: str, *, compiling: bool) -> None:
    """Print to standard error what the step of this configuration holds, and the remedies with what each saves.

    compiling: compile the remedies now, for the devices of this process; nothing may be on them any more. Otherwise, or
    if the compiler runs out of memory as well, print the command that compiles them for simulated devices.
    """
    from jaxdist.plan.remedies.fitting import advice, device_room
    from jaxdist.plan.remedies.table import assumed_cluster, remedies  # the planner: a run that fits needs none
    from jaxdist.plan.remedies.text import remedies_text

    said, configured = f"out of memory: {reason.splitlines()[0]}", config
    config = with_default_remat(config, gpu=jax.default_backend() == "gpu")
    try:
        check_windows(config)
    except UserError as error:  # shapes are in the data: nothing more can be said
        _say(said, f"what the step holds cannot be said: {error}")
        return
    _say(said, "", "\n".join(memory_text(explain(config))), "")
    file = folder / "config.yaml"
    if not file.exists():  # the run had not begun
        replace_file(file, to_yaml(configured, redact_settings).encode())
    command, gpu = f"jaxdist explain {file} --remedies", _gpu_here()
    cluster = None if gpu is None else assumed_cluster(config, gpu)
    try:
        table = remedies(config, cluster=cluster, progress=_say) if compiling else None
    except jax.errors.JaxRuntimeError as error:
        _say(f"the remedies cannot be compiled here: {str(error).splitlines()[0]}")
        table = None
    if table is None:
        _say(f"what would save memory, and how much: {command}")
    else:
        _say(remedies_text(table, predicted_for="" if cluster is None else f"{cluster.devices} x {cluster.name}"))
    if jax.process_count() == 1:  # others may hold state and memory still
        for line in advice(config, table, device_room(jax.local_devices()[0]), file):
            _say(line)
    if jax.default_backend() != "cpu":
        _say(f"a layout that fits, the fastest, with reasons: {_planning(config, file, gpu)}")


def _gpu_here() -> str | None:
    """The name in the table of GPUs of this job's devices."""
    found = gpu_of(jax.devices()[0].device_kind)
    return next((name for name, gpu in GPUS.items() if gpu is found), None)


def _planning(config: Config, file: Path, gpu: str | None) -> str:
    """The command that plans this configuration for the devices of this job, and writes one that fits."""
    devices, hosts = config.mesh.devices, count_hosts()
    cluster = f"--gpu {gpu or 'NAME'} --hosts {hosts} --gpus-per-host {devices // hosts}"
    return f"jaxdist plan {file} {cluster} --out plan && jaxdist train plan/plan.yaml"


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)
