"""From a configuration to running devices: platform, simulated devices, joining a multi-process job, the true mesh."""

import contextlib
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxdist.config import Config, DevicesConfig, check_layout, resolve_mesh
from jaxdist.config_check import GPU_PLUGINS
from jaxdist.errors import UserError
from jaxdist.precision import POLICIES, check_float8, enable_x64
from jaxdist.runtime.cache import set_up
from jaxdist.runtime.compiler import set_flags, set_options

INITIALIZATION_S = 300  # until all processes have joined
HEARTBEAT_S = 30  # without a sign of life a process is dead, and JAX ends the others
LOOPBACK = ("127.0.0.1", "localhost")


class Job(NamedTuple):
    """A multi-process job as the environment describes it. coordinator: "host:port". gpus: indices of this process's
    GPUs, () for all that it sees, None for what JAX_LOCAL_DEVICE_IDS says. detect: JAX finds out the rest (SLURM, MPI).
    """

    coordinator: str | None
    processes: int | None
    rank: int | None
    gpus: tuple[int, ...] | None = ()
    detect: bool = False


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise UserError(f"{name}: {text!r} in the environment is no rank or count; allowed: an integer >= 0")
    return int(text)


def describe_job(environ: Mapping[str, str]) -> Job | None:
    """The job that the environment describes, or None for a single process.

    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID; or torchrun's MASTER_ADDR, MASTER_PORT,
    WORLD_SIZE and RANK; or a SLURM or Open MPI step of more than one task, which JAX detects by itself.
    """
    gpus = local_gpus(environ)
    if environ.get("JAX_COORDINATOR_ADDRESS") and environ.get("JAX_NUM_PROCESSES"):
        count, rank = _integer(environ, "JAX_NUM_PROCESSES"), _integer(environ, "JAX_PROCESS_ID")
        return _check_job(environ["JAX_COORDINATOR_ADDRESS"], count, rank, gpus)
    if environ.get("WORLD_SIZE") and environ.get("MASTER_ADDR"):
        # torchrun's own store listens on MASTER_PORT; without torchrun the port is free.
        port = _integer(environ, "MASTER_PORT") + (1 if "TORCHELASTIC_RUN_ID" in environ else 0)
        address = f"{environ['MASTER_ADDR']}:{port}"
        return _check_job(address, _integer(environ, "WORLD_SIZE"), _integer(environ, "RANK"), gpus)
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if environ.get(name, "1") not in ("", "1"):
            return Job(None, None, None, gpus, detect=True)
    if environ.get("JAX_COORDINATOR_ADDRESS"):  # every process would train alone, all of them into one folder
        raise UserError("JAX_COORDINATOR_ADDRESS is set, but JAX_NUM_PROCESSES is not; set JAX_PROCESS_ID too")
    return None


def local_gpus(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """See `Job.gpus`. Where several processes share a node and all see its GPUs, each takes that of its local rank."""
    if environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    bound = visible != "" and "," not in visible  # the launcher has chosen
    shared = re.search("[2-9]|1[0-9]", re.sub(r"\(x\d+\)", "", environ.get("SLURM_STEP_TASKS_PER_NODE", "")))
    for rank, several in (
        ("LOCAL_RANK", environ.get("LOCAL_WORLD_SIZE", "1") != "1"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1"),
        ("SLURM_LOCALID", shared),
    ):
        if several and rank in environ and not bound:
            return (_integer(environ, rank),)
    return ()


def _check_job(coordinator: str, processes: int, rank: int, gpus: tuple[int, ...] | None) -> Job | None:
    port = coordinator.rpartition(":")[2]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"coordinator: {coordinator!r} in the environment is no address; allowed: host:port of rank 0")
    if rank >= processes:
        raise UserError(f"rank {rank} of a job of {processes} processes; allowed: 0 to the number of processes - 1")
    return Job(coordinator, processes, rank, gpus) if processes > 1 else None


def join(job: Job) -> None:
    """`jax.distributed.initialize` for this job. Must run before JAX starts its devices."""
    options: dict[str, Any] = {
        "initialization_timeout": INITIALIZATION_S, "heartbeat_timeout_seconds": HEARTBEAT_S
    }  # fmt: skip
    if job.gpus is not None:
        options["local_device_ids"] = list(job.gpus)  # an empty list is all; left out, SLURM gets one GPU a task
    if job.detect:
        jax.distributed.initialize(**options)
        return
    assert job.coordinator is not None
    host, port = job.coordinator.rsplit(":", 1)
    if job.rank == 0:
        _check_port(int(port))
    if host in LOOPBACK:  # the service has no authentication: open to this machine only, where that is enough
        options["coordinator_bind_address"] = job.coordinator
    jax.distributed.initialize(job.coordinator, job.processes, job.rank, **options)


def _check_port(port: int) -> None:
    """Raise `UserError` if the port is taken: jax 0.10 would crash without a word."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(f"MASTER_PORT or JAX_COORDINATOR_ADDRESS: port {port}: {reason}; set a free one") from error


@contextlib.contextmanager
def fail_alone() -> Iterator[None]:
    """Around the work of one process of a job: an exception is reported as usual, then the process ends at once.

    A normal exit waits for the other processes to exit too, and they wait for this one, in a collective: minutes of
    silence. Ended at once, a launcher sees it, and so does JAX in the other processes. Status as in scripts: 2 for a
    `UserError`, else 1. A single process is left to itself.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if jax.process_count() == 1:
            raise
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if isinstance(error, UserError) else 1)


def has_devices() -> bool:
    """Whether JAX has started its devices: it then refuses another number of simulated ones."""
    count = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", 2 if count == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def expected_backend(devices: DevicesConfig) -> str:
    """gpu or cpu: what JAX will take, as far as that can be told without asking it."""
    plugin = any(importlib.util.find_spec(name) is not None for name in GPU_PLUGINS)
    only_cpu = devices.platform == "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu"
    return "gpu" if plugin and not only_cpu else "cpu"


def choose_platform(devices: DevicesConfig) -> None:
    """Set the platform and the number of simulated CPU devices. When JAX has its devices already, as in a notebook,
    they stay what they are, and the mesh is judged by them."""
    with contextlib.suppress(RuntimeError):  # JAX refuses to change their number then
        jax.config.update("jax_num_cpu_devices", devices.simulated)
    if devices.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif devices.platform == "gpu":
        jax.config.update("jax_platforms", "cuda,cpu")


def _count(devices: DevicesConfig) -> int:
    """The number of devices of the job: JAX starts here."""
    try:
        return jax.device_count()
    except RuntimeError as error:
        if devices.platform != "gpu":
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"devices.platform: 'gpu', but JAX cannot use one ({reason}); set auto or cpu") from error


def start(config: Config) -> Config:
    """Bring up JAX and its compiler for this configuration and return it with the mesh that the devices allow.

    Raises `UserError` when the mesh does not fit the devices that are there, or they cannot multiply as the precision
    asks.
    """
    enable_x64(config.precision.policy)
    set_flags(config, expected_backend(config.devices), started=has_devices())
    choose_platform(config.devices)
    job = describe_job(os.environ)
    if job is not None and not jax.distributed.is_initialized():
        join(job)
    with fail_alone():
        config = replace(config, mesh=resolve_mesh(config.mesh, _count(config.devices), config.devices.fit))
        set_options(config, jax.default_backend())
        set_up(config.devices.compilation_cache, jax.default_backend())
        check_layout(config)
        check_float8(POLICIES[config.precision.policy], jax.devices())
        return config
