"""From a configuration to running devices: platform, simulated devices, joining a multi-process job, the true mesh."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax

from jaxdist.config.checks import check_layout
from jaxdist.config.resolve import INSTALL_CUDA, gpu_plugins, only_cpus, resolve_mesh, unused_gpus
from jaxdist.config.schema import Config, DevicesConfig
from jaxdist.errors import UserError
from jaxdist.nn.matmul.plain import one_core
from jaxdist.precision.float8_devices import check_float8
from jaxdist.precision.policy import POLICIES, enable_x64
from jaxdist.processes import anywhere, place
from jaxdist.runtime.cache import set_up
from jaxdist.runtime.compiler import set_flags, set_options
from jaxdist.runtime.cpu_process import avoid_interruptions, keep_freed_memory
from jaxdist.runtime.exit_status import FAILED, status_of
from jaxdist.runtime.gpu_memory import take_memory
from jaxdist.runtime.join.environment import find_job
from jaxdist.runtime.join.join import HEARTBEAT_S, join_job
from jaxdist.runtime.watch.blame import LEAST_LIMIT_S

# Threads of XLA:CPU for each simulated device: steps are sent ahead, and each of their collectives holds one.
THREADS_ALONE, THREADS_IN_A_JOB = 2, 8
OWN_THREADS = "JAXDIST_NPROC"  # the NPROC that a process has set: those that it starts do not take it for a user's


def heartbeat_s(watchdog_s: float | None) -> int:
    """Seconds of silence after which JAX takes a process for dead and ends the others, naming nobody. It is more than
    the limit of the watchdog, where there is one."""
    return HEARTBEAT_S if watchdog_s == 0 else int(watchdog_s or LEAST_LIMIT_S) + 60


@contextlib.contextmanager
def fail_alone() -> Iterator[None]:
    """A context for the work of one process of a job: an exception is reported as usual, then the process ends at once.

    A normal exit would wait for the other processes to exit, too, and they wait for this one in a collective: minutes
    of silence. When the process ends at once, a launcher sees it, and so does JAX in the other processes. The status is
    that of `status_of`. A process without a job raises the exception.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if place().processes == 1:
            raise
        if (status := status_of(error)) != FAILED:
            print(f"error: {error}", file=sys.stderr)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def has_devices() -> bool:
    """Whether JAX has started its devices. To see it, try another number of simulated devices, which JAX then
    refuses."""
    count = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", 2 if count == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def expected_backend(devices: DevicesConfig) -> str:
    """The backend that JAX will choose, "gpu" or "cpu", as far as that is known before it starts."""
    return "cpu" if devices.platform == "cpu" or only_cpus(os.environ) else "gpu"


def choose_platform(devices: DevicesConfig, *, in_job: bool = False) -> None:
    """Set the platform, the number of simulated CPU devices and the threads of each. When JAX has its devices already,
    as in a notebook, they stay, and the mesh must fit them.

    in_job: whether the devices wait for those of other processes, too.
    """
    if not has_devices():
        jax.config.update("jax_num_cpu_devices", devices.simulated)
        if expected_backend(devices) == "cpu":
            _prepare_cpus(devices.simulated, in_job=in_job)
    if devices.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif devices.platform == "gpu":
        jax.config.update("jax_platforms", "cuda,cpu")


def _prepare_cpus(simulated: int, *, in_job: bool) -> None:
    """Prepare this process to compute on CPUs, as so many simulated devices."""
    if in_job:
        avoid_interruptions()
    if simulated == 1:
        keep_freed_memory(os.environ)  # several devices would leave too many gaps
    else:
        threads = (THREADS_IN_A_JOB if in_job else THREADS_ALONE) * simulated
        give_threads(threads, os.environ, cores=len(os.sched_getaffinity(0)))


def _one_core_each(config: Config) -> bool:
    """Whether kernels' gradients are multiplied as is fastest where every process of a job has one core, to which all
    must agree. Never where the same bits are promised in every layout: one process alone has more cores."""
    several = len(os.sched_getaffinity(0)) > 1 or jax.default_backend() != "cpu"
    return place().processes > 1 and not anywhere(several) and not config.parallel.grad_sync.deterministic


def of_each_process(config: Config, processes: int | None) -> DevicesConfig:
    """The section `devices` of each process of a job. With `fit: shrink` the processes share the mesh's devices, if
    their number divides it. Else each would have as many as a process alone, the first one's would be all of the mesh,
    and the others would have none."""
    devices, need = config.devices, config.mesh.devices
    if not processes or devices.fit != "shrink" or need < 1 or need % processes:
        return devices
    return replace(devices, simulated=min(devices.simulated, need // processes))


def give_threads(threads: int, environment: MutableMapping[str, str], *, cores: int) -> None:
    """Give a process as many threads as its simulated CPU devices may block at once, before JAX starts.

    A device that waits for another one holds a thread, and steps are sent ahead. By itself XLA:CPU has as many threads
    as there are cores or devices. On few cores the collectives of a device then left each other without one, and the
    process hung (jax 0.12). More threads cost speed: 16 in place of 8 took 5 % of the quickstart's on two cores.
    """
    if environment.get("NPROC") == environment.pop(OWN_THREADS, None):
        environment.pop("NPROC", None)
    if threads > cores and "NPROC" not in environment:
        environment["NPROC"] = environment[OWN_THREADS] = str(threads)


def count_devices(devices: DevicesConfig, *, key: str = "devices.platform") -> int:
    """The number of devices of the job. JAX starts here, for every command that runs on devices.

    key: what messages call the platform that is wished. Raises `UserError` where JAX cannot use it, or has no such
    platform as JAX_PLATFORMS says.
    """
    named, reason = os.environ.get("JAX_PLATFORMS"), "none is here"
    try:
        count = jax.device_count()
        if devices.platform != "gpu" or jax.default_backend() != "cpu":
            return count
        reason = f"it found {count} x cpu"  # a GPU that is not there is left out without a word
    except (RuntimeError, AssertionError) as error:  # jax has an assertion where it left out all that it was told
        if isinstance(error, RuntimeError):
            reason = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
            if not reason.startswith("Unable to initialize backend"):
                raise
        if devices.platform != "gpu" and not named:
            raise
    if devices.platform == "gpu":
        mend = "mend its driver (see nvidia-smi) or CUDA_VISIBLE_DEVICES" if gpu_plugins() else INSTALL_CUDA
        raise UserError(f"{key}: 'gpu', but JAX cannot use one ({reason}); allowed: auto or cpu; for a GPU {mend}")
    raise UserError(
        f"JAX_PLATFORMS: {named!r} in the environment, but JAX cannot use it ({reason}); allowed: cpu, cuda where there"
        " is an NVIDIA GPU, or another platform that JAX has here; unset it, and JAX chooses"
    )


def fit_to_devices(config: Config) -> Config:
    """The configuration with the mesh that the devices allow. Raises `UserError` where they do not fit it."""
    config = replace(config, mesh=resolve_mesh(config.mesh, count_devices(config.devices), config.devices.fit))
    check_layout(config)
    check_float8(POLICIES[config.precision.policy], jax.devices())
    return config


def _greet(devices: DevicesConfig) -> None:
    """A line from each rank other than 0, which else prints nothing; from rank 0, about GPUs that jax cannot use."""
    rank, processes = place()
    if rank:
        print(f"rank {rank} of {processes} joined; rank 0 prints", flush=True)
    elif devices.platform == "auto" and os.environ.get("JAX_PLATFORMS") != "cpu" and (found := unused_gpus()):
        print(f"warning: {found}", file=sys.stderr, flush=True)


def start(config: Config, watched: Callable[[Config], AbstractContextManager[Any]] = contextlib.nullcontext) -> Config:
    """Start JAX and its compiler for a configuration, which is returned with the mesh that the devices allow.

    Raises `UserError` when the mesh does not fit the devices, or they cannot multiply in the precision; `MissingPeers`
    when processes of the job do not come.

    Args:
        config: The configuration.
        watched: Makes the context in which everything after joining the job is done; by default one that does nothing.
    """
    enable_x64(config.precision.policy)
    backend, started = expected_backend(config.devices), has_devices()
    set_flags(config, backend, started=started)
    if backend == "gpu" and not started:
        take_memory(os.environ)
    job = find_job(os.environ)
    devices = config.devices if job is None else of_each_process(config, job.processes)
    choose_platform(devices, in_job=job is not None)
    if job is not None and not jax.distributed.is_initialized():
        join_job(job, heartbeat_s(config.train.watchdog_s))
    _greet(config.devices)
    with fail_alone(), watched(config):
        config = fit_to_devices(config)
        set_options(config, jax.default_backend())
        one_core.set_global(_one_core_each(config))
        set_up(config.devices.compilation_cache, jax.default_backend())
        return config
