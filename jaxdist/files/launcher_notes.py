"""What a launcher and its processes tell each other, by environment variables and files. Imported before JAX is."""

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxdist.files.regular import open_to_append

RUN_DIR = "JAXDIST_RUN_DIR"  # set by a launcher, so that a restarted run finds its checkpoints
ATTEMPT = "JAXDIST_ATTEMPT"  # set by a launcher: of the job, from 1
STOP_NOTE = "JAXDIST_STOP_NOTE"  # set by a launcher: a file that a run makes when it was asked to stop
# The variables in which launchers give a process its rank and the number of processes. SLURM is the last: mpirun starts
# a daemon on each host by it, and what the daemons start has their variables, too.
RANK_AND_SIZE = (
    ("RANK", "WORLD_SIZE"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),  # mpirun of MPICH and of Intel MPI; srun with some of its plugins, too
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def not_joined(environ: Mapping[str, str], processes: int) -> str:
    """What says that this process should have joined a job, and has not; "" where nothing does.

    processes: of the job that it has joined; 1 outside of one.
    """
    for rank, size in RANK_AND_SIZE:
        count = environ.get(size, "")
        if processes == 1 and environ.get(rank) and count.isdecimal() and int(count) > 1:
            return (
                f"{rank} is {environ[rank]} and {size} {count}, and this process has joined no job: each would train"
                " alone; call join_job(find_job(os.environ)) before anything asks for devices (docs/own_loop.md), or"
                f" unset {size}"
            )
    return ""


def latest_step(run: Path) -> int:
    """The step of the newest finished checkpoint of a run, or of a folder of `Checkpoints`; -1 where there is none."""
    names = []
    for folder in (run, run / "checkpoints"):
        with contextlib.suppress(OSError):
            names += [entry.name for entry in folder.iterdir()]
    return max((int(name) for name in names if re.fullmatch("[0-9]{1,18}", name)), default=-1)


def folders_note(stop_note: str | Path) -> Path:
    """The file beside a note of `STOP_NOTE` in which processes say where they keep checkpoints."""
    return Path(f"{stop_note}-folders")


def note_checkpoints(environ: Mapping[str, str], folder: Path) -> None:
    """Tell the launcher, where there is one, of a folder of checkpoints, as a loop of one's own has it: it counts
    restarts from the newest. A line is the newest step that is there, and the path."""
    given = environ.get(RUN_DIR)
    known = given is not None and folder in (Path(given).absolute(), Path(given).absolute() / "checkpoints")
    if not environ.get(STOP_NOTE) or known or environ.get("LOCAL_RANK", "0") != "0" or "\n" in str(folder):
        return
    try:
        with os.fdopen(open_to_append(folders_note(environ[STOP_NOTE])), "a", encoding="utf-8") as file:
            file.write(f"{latest_step(folder)} {folder}\n")
    except OSError as error:
        print(f"warning: the launcher is not told of {str(folder)!r}: {error.strerror}", file=sys.stderr)
