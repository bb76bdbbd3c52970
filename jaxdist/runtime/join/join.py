"""Joining a job of several processes: the roll call, then JAX's own service, on one address only."""

import os
from pathlib import Path
from typing import Any

import jax
from jax._src.clusters import ClusterEnv  # what `jax.distributed.initialize` finds out by itself

from jaxdist.errors import UserError
from jaxdist.runtime.join import rendezvous_file
from jaxdist.runtime.join.environment import FREE_PORT, JOB_ID, Job
from jaxdist.runtime.join.roll_call import Meeting, MissingPeers, answer_roll, join_timeout, take_roll
from jaxdist.runtime.network.addresses import NAME_S, PortTaken, format_address, listen, split_address
from jaxdist.runtime.network.job_token import read_token

HEARTBEAT_S = 30  # without a sign of life a process is dead, and JAX ends the others
BIND = "JAX_COORDINATOR_BIND_ADDRESS"


def join_job(job: Job | None, heartbeat: int = HEARTBEAT_S) -> None:
    """Call `jax.distributed.initialize` for this job, once all its processes are there. Must run before JAX starts its
    devices.

    The service of process 0 has no authentication: it listens on the coordinator's address alone, or on
    JAX_COORDINATOR_BIND_ADDRESS, also where JAX has to find out the job. Raises `MissingPeers`, naming the ranks, when
    some do not come within JAXDIST_JOIN_TIMEOUT seconds, or when a launcher's choice of a port is taken, and
    `UserError` for a port of the user's that is taken, a rank given twice, an address that is not this machine's.

    Args:
        job: What the environment says of the job. None is a process on its own: nothing is done.
        heartbeat: Seconds after which JAX ends the job, when a process is silent.
    """
    if job is None:
        return
    seconds = join_timeout(os.environ)
    options: dict[str, Any] = {"initialization_timeout": max(1, round(seconds)), "heartbeat_timeout_seconds": heartbeat}
    if job.gpus is not None:
        options["local_device_ids"] = list(job.gpus)  # an empty list is all; left out, SLURM gets one GPU a task
    if job.detect:
        job = _detect(job, seconds)
    assert job.processes is not None and job.rank is not None
    if job.rank == 0:
        coordinator = options["coordinator_bind_address"] = _lead(job, job.processes, seconds)
    else:
        coordinator = _follow(job, job.rank, job.processes, seconds)
    jax.distributed.initialize(coordinator, job.processes, job.rank, **options)


def _detect(job: Job, seconds: float) -> Job:
    """Let JAX find out what the job lacks. Raises `UserError`."""
    known = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        coordinator, processes, rank, _ = ClusterEnv.auto_detect_unset_distributed_params(
            known, None, None, [], None, max(1, round(seconds))
        )
    except (ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"the launcher of this job leaves out what JAX needs ({error}); give --init-method") from error
    other = job.processes not in (None, processes)  # SLURM's daemons of mpirun, in place of what mpirun has started
    if coordinator is None or processes is None or rank is None or not 0 <= rank < processes or other:
        found = f"coordinator {coordinator}, {processes} processes, rank {rank}"
        raise UserError(f"the launcher of this job leaves out what JAX needs ({found}); give --init-method")
    return job._replace(coordinator=coordinator, processes=processes, rank=rank, detect=False)


def _lead(job: Job, processes: int, seconds: float) -> str:
    """Take the roll, as process 0. Returns the "address:port" that it listened on, which is free again."""
    key, token = os.environ.get(JOB_ID) or job.name, read_token(os.environ)
    if job.file is None:
        assert job.coordinator is not None
        host, port = split_address(os.environ.get(BIND) or job.coordinator)
    else:
        host, port = os.environ.get("MASTER_ADDR") or rendezvous_file.own_address(), 0
    try:
        server = listen(host, port, min(NAME_S, seconds))
    except PortTaken as error:
        if os.environ.get(FREE_PORT):  # the launcher's choice, taken since: it makes another one
            raise MissingPeers(f"{error}") from error
        raise
    with server:
        bound = format_address(*server.getsockname()[:2])
        if job.file is None:
            take_roll(server, processes=processes, meeting=Meeting(host, port, key, token), seconds=seconds)
            return bound
        path = Path(job.file)
        meeting = rendezvous_file.announce(path, server, key, token)
        try:
            take_roll(server, processes=processes, meeting=meeting, seconds=seconds)
        finally:
            rendezvous_file.remove_meeting(path, meeting, token)
        return bound


def _follow(job: Job, rank: int, processes: int, seconds: float) -> str:
    """Answer the roll, as any other process. Returns the "address:port" of process 0's service."""
    key, token = os.environ.get(JOB_ID) or job.name, read_token(os.environ)

    def find() -> Meeting | None:
        if job.file is None:
            assert job.coordinator is not None
            return Meeting(*split_address(job.coordinator), key, token)
        meeting = rendezvous_file.read_meeting(Path(job.file), token)
        return meeting if meeting and meeting.key == key else None

    return format_address(*answer_roll(find, rank=rank, processes=processes, seconds=seconds))
