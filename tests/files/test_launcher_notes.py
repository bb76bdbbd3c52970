"""What a process without a job is told, by the variables of each launcher."""

import pytest

from jaxdist.files.launcher_notes import not_joined

MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "3", "WORLD_SIZE": "4"},
        {"JAX_PROCESS_ID": "3", "JAX_NUM_PROCESSES": "4"},
        {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"},
        MPI,
        {"RANK": "0", "WORLD_SIZE": "1"} | MPI,  # torchrun of one process, inside of a job
    ],
)
def test_a_process_that_should_have_joined(environ: dict[str, str]) -> None:
    rank, size = [*environ][-2:]
    said = not_joined(environ, 1)
    assert said.startswith(f"{rank} is 3 and {size} 4, and this process has joined no job") and f"unset {size}" in said
    assert not_joined(environ, 4) == ""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "all"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the script of a batch job, or the shell of salloc: no step
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_process_of_its_own(environ: dict[str, str]) -> None:
    assert not_joined(environ, 1) == ""
