"""The job that a process belongs to, found in its environment: explicit flags, JAX's variables, torchrun's, SLURM, Open
MPI, Kubernetes. Imported before JAX is."""

import argparse
import functools
import logging
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from jaxdist.config.resolve import read_count
from jaxdist.errors import UserError
from jaxdist.files.launcher_notes import RANK_AND_SIZE
from jaxdist.runtime.network.addresses import split_address
from jaxdist.runtime.network.job_token import TOKEN, TOKEN_FILE

# Explicit flags are put into these variables, so that child processes find the same job.
INIT_METHOD, NUM_PROCESSES, RANK = "JAXDIST_INIT_METHOD", "JAXDIST_NUM_PROCESSES", "JAXDIST_RANK"
JOB_ID = "JAXDIST_JOB_ID"  # processes with different ones do not join each other
FREE_PORT = "JAXDIST_FREE_PORT"  # set by a launcher that has chosen the coordinator's port, and can choose another
KUBERNETES_PORT = 55527  # of the coordinator of a JobSet, where JOBSET_PORT gives none; JAX's own choice
FIRST_PORT, PORTS = 61440, 4096  # SLURM and Open MPI give no port: it is made of the job's number
PORTS_OF_JOB = 16  # ports from one SLURM job to the next: steps of neighbouring jobs may run on one host
# The variables of launchers for (rank, number of processes), for an init method that is given without them.
LAUNCHERS = (
    (RANK, NUM_PROCESSES),
    *RANK_AND_SIZE,
    ("JOB_COMPLETION_INDEX", NUM_PROCESSES),
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
)
KUBEFLOW = (("PROCESS_ID", "NUM_PROCESSES"),)  # of a JAXJob


class Job(NamedTuple):
    """A job of several processes, as the environment describes it."""

    coordinator: str | None  # "host:port" of process 0
    processes: int | None
    rank: int | None  # of this process
    gpus: tuple[int, ...] | None = ()  # indices of its GPUs; (): all that it sees; None: those of JAX_LOCAL_DEVICE_IDS
    detect: bool = False  # whether JAX must find out the rest: a SLURM or MPI job with variables missing
    file: str | None = None  # in place of a coordinator: where process 0 writes its address
    name: str = ""  # that its launcher gives it; processes of jobs with other names do not join each other


_integer = functools.partial(read_count, at_least=0)
_port = functools.partial(read_count, at_least=1, kind="port")


def find_job(environ: Mapping[str, str]) -> Job | None:
    """The job that the environment describes, or None for a single process. The first of these counts:

    1. JAXDIST_INIT_METHOD (a flag of scripts/train.py), tcp://HOST:PORT or file://PATH, with JAXDIST_NUM_PROCESSES and
       JAXDIST_RANK, or the rank and number that a launcher gives;
    2. JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID;
    3. torchrun's MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK;
    4. an Open MPI job, then a SLURM step, of more than one task;
    5. a Kubernetes JobSet: see `_jobset`. In an indexed Job, which tells a pod its index and nothing else,
       JOB_COMPLETION_INDEX stands in for the rank that 1, 2 or 3 lack.

    Raises `UserError` where variables make no sense, and where a launcher has started several processes and none of the
    above says where process 0 is: each would train alone.
    """
    gpus = local_gpus(environ)
    index = "JOB_COMPLETION_INDEX"
    if environ.get(INIT_METHOD):
        return _by_method(environ, gpus)
    if environ.get("JAX_COORDINATOR_ADDRESS") and environ.get("JAX_NUM_PROCESSES"):
        own = index if "JAX_PROCESS_ID" not in environ and index in environ else "JAX_PROCESS_ID"
        count, rank = _integer(environ, "JAX_NUM_PROCESSES"), _integer(environ, own, beside="JAX_NUM_PROCESSES")
        return _check_job(environ["JAX_COORDINATOR_ADDRESS"], count, rank, gpus)
    if environ.get("WORLD_SIZE") and environ.get("MASTER_ADDR"):
        # torchrun's own store listens on MASTER_PORT; without torchrun the port is free.
        port = _port(environ, "MASTER_PORT", beside="WORLD_SIZE") + (1 if "TORCHELASTIC_RUN_ID" in environ else 0)
        own = index if "RANK" not in environ and index in environ else "RANK"
        address = f"{environ['MASTER_ADDR']}:{port}"
        count, rank = _integer(environ, "WORLD_SIZE"), _integer(environ, own, beside="WORLD_SIZE")
        return _check_job(address, count, rank, gpus, environ.get("TORCHELASTIC_RUN_ID", ""))
    if _several(environ, "OMPI_COMM_WORLD_SIZE"):
        return _open_mpi(environ, gpus)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if _several(environ, "SLURM_STEP_NUM_TASKS") and environ.get("PMI_SIZE", tasks) == tasks:
        return _slurm(environ, gpus)
    if environ.get("JOBSET_NAME") and index in environ:
        return _jobset(environ, gpus)
    if environ.get("JAX_COORDINATOR_ADDRESS"):  # every process would train alone, all of them into one folder
        raise UserError("JAX_COORDINATOR_ADDRESS is set, but JAX_NUM_PROCESSES is not; set JAX_PROCESS_ID too")
    for rank_of, size in (*LAUNCHERS, *KUBEFLOW * bool(environ.get("COORDINATOR_ADDRESS"))):
        if environ.get(rank_of) and _several(environ, size):
            raise UserError(_unplaced(environ, rank_of, size))
    return None


def _several(environ: Mapping[str, str], size: str) -> bool:
    """Whether this variable tells of more than one process."""
    return environ.get(size, "") not in ("", "0", "1")


def _unplaced(environ: Mapping[str, str], rank: str, size: str) -> str:
    """The message about a launcher that does not say where process 0 is."""
    if rank == "RANK":
        said = f"{rank} is {environ[rank]} and {size} {environ[size]}"
        mend = f"set it and MASTER_PORT to those of rank 0, or unset {rank} and {size}"
        return f"MASTER_ADDR: not set, though {said}; {mend}"
    return (
        f"{size}: {environ[size]}, but nothing says where process 0 is, and each process would train alone; give"
        f" --init-method tcp://HOST:PORT of process 0, or unset {size}"
    )


def _by_method(environ: Mapping[str, str], gpus: tuple[int, ...] | None) -> Job | None:
    """The job of JAXDIST_INIT_METHOD. Process 0 is at a URL, or writes its address into a file."""
    method = environ[INIT_METHOD]
    scheme, mark, rest = method.partition("://")
    if scheme not in ("tcp", "file") or not mark or not rest or "\0" in rest:
        raise UserError(
            f"--init-method: {method!r}; allowed: tcp://HOST:PORT of process 0, or file:///PATH of a file"
            " that no process has written yet, on storage that all share"
        )
    pair = next(((rank, count) for rank, count in LAUNCHERS if environ.get(rank) and environ.get(count)), None)
    if pair is None:
        raise UserError(
            f"--init-method: {method!r} needs a number of processes and a rank; add --num-processes and --rank"
        )
    count, rank = _integer(environ, pair[1]), _integer(environ, pair[0])
    if scheme == "tcp":
        return _check_job(rest.rstrip("/"), count, rank, gpus)
    if not Path(rest).is_absolute():
        raise UserError(f"--init-method: {method!r} is relative; give the whole path, as in file:///shared/job")
    checked = _check_job("file:1", count, rank, gpus)
    return checked and checked._replace(coordinator=None, file=rest)


def _slurm(environ: Mapping[str, str], gpus: tuple[int, ...] | None) -> Job:
    """A step of a SLURM job, coordinated by its first host. Where a variable is missing JAX may still find the job."""
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    if not all(environ.get(name, "").isdigit() for name in ("SLURM_JOB_ID", "SLURM_PROCID")) or not hosts:
        return Job(None, None, None, gpus, detect=True)
    # The first name ends at a comma outside of brackets: node7,... or node[007-015,020],... or rack[1-2]node[1-8]-ib
    match = re.match(r"(?:[^,\[\]]|\[\d[^\]]*\])+", hosts)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST: {hosts!r} names no host first; give --init-method tcp://HOST:PORT")
    step = environ.get("SLURM_STEP_ID", "0")  # two steps of one job may run at once
    number = int(environ["SLURM_JOB_ID"]) * PORTS_OF_JOB + (int(step) if step.isdigit() else 0)
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])
    address = f"{first}:{FIRST_PORT + number % PORTS}"
    count, rank = _integer(environ, "SLURM_STEP_NUM_TASKS"), _integer(environ, "SLURM_PROCID")
    name = f"{environ['SLURM_JOB_ID']}.{step}"
    return _check_job(address, count, rank, gpus, name) or Job(None, None, None, gpus, detect=True)


def _open_mpi(environ: Mapping[str, str], gpus: tuple[int, ...] | None) -> Job:
    """A job of Open MPI. Before version 5 it tells every process the host of mpirun, which is taken for that of process
    0, as JAX does. Version 5 does not: JAX asks mpi4py, where it can."""
    match = re.match(r"(\d+)\.\d+;tcp6?://(?:\[([^,\]]+)|([^,:\[]+))", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if match is None or not environ.get("OMPI_COMM_WORLD_RANK"):
        return Job(None, _integer(environ, "OMPI_COMM_WORLD_SIZE"), None, gpus, detect=True)
    host = f"[{match[2]}]" if match[2] else match[3]
    address = f"{host}:{FIRST_PORT + int(match[1]) // 4096 % PORTS}"  # its job numbers are multiples of 4096
    count, rank = _integer(environ, "OMPI_COMM_WORLD_SIZE"), _integer(environ, "OMPI_COMM_WORLD_RANK")
    return _check_job(address, count, rank, gpus, match[1]) or Job(None, None, None, gpus, detect=True)


def _jobset(environ: Mapping[str, str], gpus: tuple[int, ...] | None) -> Job | None:
    """A Kubernetes JobSet, one process a pod: pod 0 of job 0 coordinates, by the name that the JobSet gives it.

    A JobSet sets no variables; its manifest does, from annotations and by hand: JOBSET_NAME, REPLICATED_JOB_NAME,
    JOB_INDEX (default 0), REPLICATED_JOB_REPLICAS (default 1), PODS_PER_JOB (the Job's `completions`), and, where they
    are not the defaults, JOBSET_SUBDOMAIN and JOBSET_PORT. Kubernetes sets JOB_COMPLETION_INDEX.
    """
    name, replicated = environ["JOBSET_NAME"], environ.get("REPLICATED_JOB_NAME", "")
    if not replicated:
        raise UserError(f"REPLICATED_JOB_NAME is not set, but JOBSET_NAME is ({name!r}); set it in the manifest")
    pods = _integer(environ, "PODS_PER_JOB", beside="JOBSET_NAME")
    defaults = {"JOB_INDEX": "0", "REPLICATED_JOB_REPLICAS": "1", "JOBSET_PORT": str(KUBERNETES_PORT)} | dict(environ)
    index, pod = _integer(defaults, "JOB_INDEX"), _integer(environ, "JOB_COMPLETION_INDEX")
    if pod >= pods:
        raise UserError(f"PODS_PER_JOB: {pods}, but this is pod {pod}; allowed: the Job's number of completions")
    host = f"{name}-{replicated}-0-0.{environ.get('JOBSET_SUBDOMAIN') or name}"
    count = pods * _integer(defaults, "REPLICATED_JOB_REPLICAS")
    return _check_job(f"{host}:{_port(defaults, 'JOBSET_PORT')}", count, index * pods + pod, gpus)


def local_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[int, ...] | None:
    """The GPUs of this process: see `Job.gpus`. Processes that share a host, and see all its GPUs, take equal parts of
    them in the order of their local ranks: two processes on 8 GPUs have 0 to 3 and 4 to 7.

    A process that is alone on its host has all GPUs that it sees. So has a process that sees its own ones only: one in
    CUDA_VISIBLE_DEVICES, or those that SLURM has bound to its task. (JAX gives every SLURM task the one GPU of its
    local rank, and leaves the others idle.)

    dev: the folder with the devices, where CUDA_VISIBLE_DEVICES does not say how many there are.
    """
    if environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    rank, size, bound = _place_on_host(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if size == 1 or bound or (visible and "," not in visible):
        return ()
    listed = [each for each in visible.split(",") if each.strip()]
    gpus = len(listed) if listed else sum(1 for _ in dev.glob("nvidia[0-9]*"))
    each = max(gpus // size, 1)
    if gpus > each * size and rank == 0 and environ.get("JAX_PLATFORMS") != "cpu":
        _tell_idle(gpus, size)
    return tuple(range(rank * each, (rank + 1) * each))


@functools.cache  # once
def _tell_idle(gpus: int, processes: int) -> None:
    each = gpus // processes
    logging.getLogger("jaxdist").warning(
        "%d of the %d GPUs of this host are idle: its %d processes have %d each; start a number that divides them",
        gpus - each * processes,
        gpus,
        processes,
        each,
    )


def _place_on_host(environ: Mapping[str, str]) -> tuple[int, int, bool]:
    """(rank among the processes of this host, their number, whether the launcher has bound GPUs to each); (0, 1, False)
    where the environment does not say it."""
    for rank, size, bound in (
        ("LOCAL_RANK", environ.get("LOCAL_WORLD_SIZE", "1"), False),
        ("OMPI_COMM_WORLD_LOCAL_RANK", environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"), False),
        ("SLURM_LOCALID", _slurm_tasks_here(environ), _slurm_binds(environ)),
    ):
        if size != "1" and rank in environ:
            return _integer(environ, rank), _integer({rank: size}, rank, at_least=1), bound
    return 0, 1, False


def _slurm_binds(environ: Mapping[str, str]) -> bool:
    """Whether SLURM shows each task its own GPUs only: by --gpu-bind or --tres-bind, or else by --gpus-per-task or
    --tres-per-task."""
    given = re.search(r"gres/gpu:(\S+)", environ.get("SLURM_TRES_BIND", ""))
    bind = re.sub(r"^v(erbose)?(,|$)", "", environ.get("SLURM_GPU_BIND") or (given[1] if given else ""))
    if bind:
        return not bind.startswith("none")
    return bool(environ.get("SLURM_GPUS_PER_TASK")) or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")


def _slurm_tasks_here(environ: Mapping[str, str]) -> str:
    """The number of tasks of this node, from SLURM_STEP_TASKS_PER_NODE, such as "4(x2),3" for nodes with 4, 4 and 3."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    tasks = [count for count, times in counts for _ in range(int(times or 1))]
    node = environ.get("SLURM_NODEID", "0")
    return tasks[int(node)] if node.isdigit() and int(node) < len(tasks) else max(tasks, key=int, default="1")


def _check_job(coordinator: str, processes: int, rank: int, gpus: tuple[int, ...] | None, name: str = "") -> Job | None:
    split_address(coordinator)
    if rank >= processes:
        raise UserError(f"rank {rank} of a job of {processes} processes; allowed: 0 to the number of processes - 1")
    return Job(coordinator, processes, rank, gpus, name=name) if processes > 1 else None


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a job on a command line; `take_job_flags` reads them."""
    group = parser.add_argument_group("a job of several processes", "found in the environment where left out")
    group.add_argument(
        "--init-method",
        metavar="URL",
        help="tcp://HOST:PORT of process 0, or file:///PATH on storage that all processes share",
    )
    group.add_argument("--num-processes", metavar="N", help="in the whole job")
    group.add_argument("--rank", metavar="R", help="of this process, from 0")
    group.add_argument("--token-file", metavar="FILE", help=f"that holds the job's secret, in place of {TOKEN}")


def take_job_flags(options: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    """Put the flags of `add_job_flags` into the environment, where they win over everything else."""
    given = {INIT_METHOD: options.init_method, NUM_PROCESSES: options.num_processes, RANK: options.rank}
    given[TOKEN_FILE] = options.token_file
    if not options.init_method and (options.num_processes or options.rank):
        raise UserError("--num-processes and --rank need the address of process 0; add --init-method")
    environ.update({name: value for name, value in given.items() if value is not None})
