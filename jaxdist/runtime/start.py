"""From a configuration to running devices: platform and simulated devices, joining a multi-process job, the true mesh."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import jax

from jaxdist.config import Config, DevicesConfig, check_layout, resolve_mesh
from jaxdist.errors import UserError
from jaxdist.precision import enable_x64


class Job(NamedTuple):
    """A multi-process job as the environment describes it. coordinator: "host:port". detect: let JAX find out (SLURM, MPI)."""

    coordinator: str | None
    processes: int | None
    rank: int | None
    detect: bool = False


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise UserError(f"{name}: {text!r} in the environment is no rank or count; allowed: an integer >= 0")
    return int(text)


def describe_job(environ: Mapping[str, str]) -> Job | None:
    """The job that the environment describes, or None for a single process.

    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID; or torchrun's MASTER_ADDR, MASTER_PORT, WORLD_SIZE
    and RANK; or a SLURM or Open MPI step of more than one task, which JAX detects by itself.
    """
    if environ.get("JAX_COORDINATOR_ADDRESS") and environ.get("JAX_NUM_PROCESSES"):
        return _check_job(
            environ["JAX_COORDINATOR_ADDRESS"], _integer(environ, "JAX_NUM_PROCESSES"), _integer(environ, "JAX_PROCESS_ID")
        )
    if environ.get("WORLD_SIZE") and environ.get("MASTER_ADDR"):
        # torchrun's own store listens on MASTER_PORT; without torchrun the port is free.
        port = _integer(environ, "MASTER_PORT") + (1 if "TORCHELASTIC_RUN_ID" in environ else 0)
        return _check_job(f"{environ['MASTER_ADDR']}:{port}", _integer(environ, "WORLD_SIZE"), _integer(environ, "RANK"))
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if environ.get(name, "1") not in ("", "1"):
            return Job(None, None, None, detect=True)
    return None


def _check_job(coordinator: str, processes: int, rank: int) -> Job | None:
    if rank >= processes:
        raise UserError(f"rank {rank} of a job of {processes} processes; allowed: 0 to {processes - 1}")
    return Job(coordinator, processes, rank) if processes > 1 else None


def join(job: Job) -> None:
    """`jax.distributed.initialize` for this job. Must run before JAX starts its devices."""
    if job.detect:
        # JAX gives a SLURM task one GPU; a node with one task would drive GPU 0 only. All visible ones are right for both:
        # a task-per-GPU launch restricts CUDA_VISIBLE_DEVICES itself when asked to bind.
        jax.distributed.initialize(initialization_timeout=300, heartbeat_timeout_seconds=60)
        return
    jax.distributed.initialize(
        coordinator_address=job.coordinator,
        num_processes=job.processes,
        process_id=job.rank,
        initialization_timeout=300,
        heartbeat_timeout_seconds=60,
    )


def choose_platform(devices: DevicesConfig) -> None:
    """Set the platform and the number of simulated CPU devices; both are read when JAX starts its devices."""
    jax.config.update("jax_num_cpu_devices", devices.simulated)
    if devices.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif devices.platform == "gpu":
        jax.config.update("jax_platforms", "cuda,cpu")


def start(config: Config) -> Config:
    """Bring up JAX for this configuration and return it with the mesh that the devices allow.

    Raises `UserError` when the mesh does not fit the devices that are there.
    """
    enable_x64(config.precision.policy)
    choose_platform(config.devices)
    job = describe_job(os.environ)
    if job is not None:
        join(job)
    config = replace(config, mesh=resolve_mesh(config.mesh, jax.device_count(), config.devices.fit))
    check_layout(config)
    return config
