"""Real launchers train the quickstart's model with the losses of one process, from the files of configs/launch.

Open MPI and SLURM come from Debian's packages (tests/launchers/install.sh); tests without them are skipped, loudly.
"""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import child
import numpy as np
import pytest
import yaml

from jaxdist.observe import read_metrics
from jaxdist.runtime.join.environment import Job, find_job
from jaxdist.runtime.network.job_token import new_token

pytestmark = pytest.mark.xdist_group("launchers")  # one reference run for all; each fills the machine

ROOT = Path(__file__).parents[2]
LAUNCH, HERE = ROOT / "configs" / "launch", ROOT / "tests" / "launchers"
STEPS = 20
OPTIONS = (
    f"train.steps={STEPS}",
    "data.global_batch=8",
    "data.seq_len=64",
    "train.eval_every=0",
    "train.sample_tokens=0",
    "checkpoint.every=0",
    "devices.platform=cpu",
    "observe.report=false",
)
SECONDS = 240.0
SLURM = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "unshare")


def environ(folder: Path) -> dict[str, str]:
    """Of a launcher: `python` is this one; programs are compiled in the same way for all."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"
    return child.environment() | child.QUICK | {"PATH": path, "JAX_ENABLE_COMPILATION_CACHE": "false"}


def needs(*programs: str) -> None:
    """Skip, loudly, where a program is not there."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [name for name in programs if shutil.which(name, path=path) is None]
    if absent:
        pytest.skip(f"LAUNCHER NOT TESTED: {', '.join(absent)} not there; run tests/launchers/install.sh as root")
    if "slurmctld" in programs and os.geteuid() != 0:
        pytest.skip("LAUNCHER NOT TESTED: a SLURM cluster in namespaces of its own needs root")


def run(command: list[str], folder: Path, **more: str) -> str:
    """What the command prints, both streams. It must succeed; nothing of it outlives the call."""
    done = subprocess.run(
        ["timeout", "--kill-after=1", "--signal=KILL", str(SECONDS), *command],
        cwd=ROOT,
        env=environ(folder) | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def losses(run_dir: Path) -> list[float]:
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    train = ["python", "scripts/train.py", "--config", "configs/quickstart.yaml", "--run-dir", str(folder / "run")]
    out = run([*train, *OPTIONS, "devices.simulated=8"], folder)
    assert "(8 simulated CPU devices, 1 process)" in out
    found = losses(folder / "run")
    assert found[-1] < found[0] - 1
    return found


def check(out: str, run_dir: Path, alone: list[float], processes: int) -> None:
    assert re.search(rf"8 simulated CPU devices, {processes} processes", out), out[-3000:]
    np.testing.assert_allclose(losses(run_dir), alone, rtol=1e-6)


@pytest.mark.exhaustive
def test_plain_hosts_by_ssh(alone: list[float], tmp_path: Path) -> None:
    """torchrun's variables, set by hand. What stands in for ssh runs the command here."""
    environ(tmp_path)
    (tmp_path / "bin" / "ssh").write_text('#!/bin/sh\nshift 2\nexec sh -c "$*"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(LAUNCH / "ssh.sh"), "localhost localhost 127.0.0.1 127.0.0.1", str(tmp_path / "run"), *OPTIONS]
    out = run([*command, "devices.simulated=2"], tmp_path, PORT=str(port))
    check(out, tmp_path / "run", alone, 4)
    assert re.search(r"^\[0\] mesh ", out, re.MULTILINE)


@pytest.mark.slow
def test_open_mpi(alone: list[float], tmp_path: Path) -> None:
    needs("mpirun")
    command = [str(LAUNCH / "mpirun.sh"), "4", str(tmp_path / "run"), *OPTIONS, "devices.simulated=2"]
    check(run(command, tmp_path), tmp_path / "run", alone, 4)


def in_slurm(folder: Path, *command: str) -> str:
    needs(*SLURM)
    return run([str(HERE / "slurm.sh"), str(folder / "cluster"), *command], folder)


@pytest.mark.exhaustive  # slow runs have sbatch, which calls it
def test_srun(alone: list[float], tmp_path: Path) -> None:
    """Two nodes, two tasks each."""
    train = ["python", "scripts/train.py", "--config", "configs/quickstart.yaml", "--run-dir", str(tmp_path / "run")]
    srun = ["env", f"JAXDIST_TOKEN={new_token()}", "srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    check(in_slurm(tmp_path, *srun, *train, *OPTIONS, "devices.simulated=2"), tmp_path / "run", alone, 4)


@pytest.mark.slow
def test_open_mpi_in_an_allocation_of_slurm(alone: list[float], tmp_path: Path) -> None:
    """mpirun starts a daemon on each node by srun: SLURM's variables are of two tasks, those of Open MPI of four."""
    needs("mpirun")
    on_lo = [f"OMPI_MCA_{name}_tcp_if_include=lo" for name in ("oob", "btl")]
    mpirun = [str(LAUNCH / "mpirun.sh"), "4", str(tmp_path / "run"), *OPTIONS, "devices.simulated=2"]
    allocate = ["env", *on_lo, "salloc", "--quiet", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    check(in_slurm(tmp_path, *allocate, *mpirun), tmp_path / "run", alone, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "processes"),
    [
        ("slurm_node.sbatch", [], 2),
        pytest.param("slurm_gpu.sbatch", ["--ntasks-per-node=2"], 4, marks=pytest.mark.exhaustive),
    ],
)
def test_sbatch(alone: list[float], tmp_path: Path, name: str, options: list[str], processes: int) -> None:
    log = tmp_path / "log"
    sbatch = ["sbatch", "--wait", f"--output={log}", *options, str(LAUNCH / name), str(tmp_path / "run")]
    in_slurm(tmp_path, *sbatch, *OPTIONS, f"devices.simulated={8 // processes}")
    check(log.read_text(), tmp_path / "run", alone, processes)


STOP = """
job=$(sbatch --parsable --output={log} {recipe} {run} {options})
until [ "$(cat {run}/metrics.jsonl 2> /dev/null | wc -l)" -ge 3 ]; do sleep 0.2; done
scancel {whom} --signal=TERM "$job"
until scontrol show job "$job" > {folder}/job && ! grep -Eq 'JobState=(RUNNING|COMPLETING)' {folder}/job; do
    sleep 0.2
done
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "end"),
    [
        ("--batch", "JobState=PENDING"),  # what SLURM does before the time limit
        pytest.param("", "JobState=FAILED", marks=pytest.mark.exhaustive),  # the user: srun is ended, not the script
    ],
)
def test_a_job_that_slurm_stops_is_queued_again(tmp_path: Path, whom: str, end: str) -> None:
    """With a checkpoint after the last step. srun meanwhile ends tasks that stay a little longer than the first."""
    options = " ".join((*OPTIONS, "train.steps=100000", "devices.simulated=4"))
    script = STOP.format(
        log=tmp_path / "log",
        recipe=LAUNCH / "slurm_node.sbatch",
        run=tmp_path / "run",
        options=options,
        whom=whom,
        folder=tmp_path,
    )
    in_slurm(tmp_path, "sh", "-c", script)
    job, log = (tmp_path / "job").read_text(), (tmp_path / "log").read_text()
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {last}; the same command" in log
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()
    assert end in job and f"Restarts={int(bool(whom))}" in job, job


@pytest.mark.slow
def test_srun_exits_with_the_highest_status(tmp_path: Path) -> None:
    """What the scripts cannot rely on: 75 beside 1; 143 where --kill-on-bad-exit has ended a task."""
    needs(*SLURM)
    # A busy machine may start the other task late, and a task that has not begun is not ended with 143.
    task = "[ $SLURM_PROCID = 1 ] && sleep 2 && exit 75; sleep {}; exit 1"
    srun = "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit={} sh -c '{}'; echo status=$?"
    out = in_slurm(tmp_path, "sh", "-c", "\n".join((srun.format(0, task.format(0)), srun.format(1, task.format(20)))))
    assert re.findall(r"^status=(\d+)$", out, re.MULTILINE) == ["75", "143"]


@pytest.mark.slow
def test_a_task_that_fails_fails_the_job(tmp_path: Path) -> None:
    """A wrong configuration: its status, and its one line, come through srun."""
    needs(*SLURM)
    train = "python scripts/train.py --config configs/quickstart.yaml optimizer.name=adam"
    command = f"srun --nodes=2 --ntasks-per-node=1 {train}; echo status=$?"
    out = in_slurm(tmp_path, "sh", "-c", command)
    assert "status=2" in out
    assert "error: optimizer.name: 'adam'" in out


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_a_recipe_says_how_it_is_started(path: Path) -> None:
    """Every file of the folder: its command and what to expect, as comments; scripts parse."""
    comments = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert f"configs/launch/{path.name} " in comments + " " or f"configs/launch/{path.name}\n" in comments
    assert "What to expect:" in comments
    if path.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", str(path)], check=True)
    if path.suffix == ".sh":
        assert path.stat().st_mode & stat.S_IXUSR


def pods() -> list[dict[str, str]]:
    """The environment of every pod of the JobSet, as Kubernetes makes it from the manifest."""
    (manifest,) = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    found = []
    for index in range(job["completions"]):
        fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
        environ = {"JOB_COMPLETION_INDEX": str(index)}  # set by Kubernetes in an indexed Job
        for variable in container["env"]:
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            secret = variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name")
            environ[variable["name"]] = fields[field] if field else secret or variable["value"]
        found.append(environ)
    return found


def test_the_jobset_describes_the_job() -> None:
    """As joining reads it; counts agree; the coordinator is the name that JobSet gives pod 0."""
    (manifest,) = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], manifest["metadata"]["name"]
    assert (job["completionMode"], job["completions"]) == ("Indexed", job["parallelism"])
    host = f"{name}-{replicated['name']}-0-0.{name}"
    (container,) = job["template"]["spec"]["containers"]
    for rank, environ in enumerate(pods()):
        assert environ["RANK"] == environ["JOB_COMPLETION_INDEX"]
        described = find_job(environ)
        assert isinstance(described, Job)
        assert described[:3] == (f"{host}:29500", job["completions"], rank)
    assert [port["containerPort"] for port in container["ports"]] == [29500]
    assert (ROOT / container["command"][1]).is_file()
    assert (ROOT / container["command"][3]).is_file()


def test_install_says_what_is_missing(tmp_path: Path) -> None:
    """Without root or apt-get nothing is installed, in one line, with status 3."""
    for name in ("id", "head"):
        (tmp_path / name).write_text("#!/bin/sh\necho 1000\n")
        (tmp_path / name).chmod(0o755)
    script = (HERE / "install.sh").read_text().replace("PATH=$PATH:/usr/sbin:/sbin", "")
    (tmp_path / "install.sh").write_text(script)
    done = subprocess.run(
        [shutil.which("bash") or "bash", str(tmp_path / "install.sh")],
        env={"PATH": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 3, done
    assert "missing: mpirun, srun, sbatch, slurmctld, slurmd, munged" in done.stdout
    assert "needs root" in done.stdout


@pytest.mark.parametrize(
    ("layout", "jobs"),
    [
        pytest.param(layout, ["2", "4", "8", "2hosts", "4hosts"], marks=pytest.mark.exhaustive)
        for layout in ("zero3_tensor", "ddp", "pipe", "ddp_deterministic", "zero3_deterministic")
    ],
)
def test_losses_by_number_of_processes(tmp_path: Path, layout: str, jobs: list[str]) -> None:
    """1e-6 in fp32, the same bits in deterministic mode."""
    out = tmp_path / "out.json"
    command = ["python", "scripts/bench/processes.py", "--layouts", layout, "--jobs", *jobs, "--json", str(out)]
    done = subprocess.run([*command, "--steps", "10"], cwd=ROOT, env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["job"] for row in rows] == [job for job in jobs if "LEFT OUT" not in done.stderr or "hosts" not in job]
    assert all(row["holds"] and row["steps"] == 10 for row in rows)
