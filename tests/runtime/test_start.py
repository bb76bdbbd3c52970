"""What a process gets before JAX starts: its part of a job's simulated devices, and threads for them."""

import subprocess
import sys

import jax
import pytest
from child import environment

from jaxdist.config.load import load_config
from jaxdist.config.resolve import has_gpus
from jaxdist.config.schema import DevicesConfig
from jaxdist.processes import Place
from jaxdist.runtime import start
from jaxdist.runtime.start import (
    OWN_THREADS,
    THREADS_ALONE,
    THREADS_IN_A_JOB,
    count_devices,
    give_threads,
    of_each_process,
)


@pytest.mark.parametrize(
    ("processes", "overrides", "devices"),
    [
        (2, (), 4),
        (8, (), 1),
        (None, (), 8),
        (3, (), 8),  # no whole number: what the mesh then says is clearer
        (2, ("devices.simulated=16",), 4),
        (2, ("devices.fit=exact",), 8),
        (4, ("mesh.data=1",), 1),
    ],
)
def test_processes_of_a_job_share_the_simulated_devices(
    processes: int | None, overrides: tuple[str, ...], devices: int
) -> None:
    assert of_each_process(load_config("configs/quickstart.yaml", overrides), processes).simulated == devices


def test_simulated_devices_have_threads_of_their_own() -> None:
    for cores, given in ((2, "16"), (16, None)):
        variables: dict[str, str] = {}
        give_threads(16, variables, cores=cores)
        assert variables.get("NPROC") == given
    variables = {"NPROC": "3"}
    give_threads(16, variables, cores=2)
    assert variables == {"NPROC": "3"}, "what a user has set stays"


def test_a_process_does_not_keep_the_threads_of_the_one_that_started_it() -> None:
    variables: dict[str, str] = {}
    for threads, given in ((16, "16"), (64, "64"), (2, None)):
        give_threads(threads, variables, cores=2)
        assert variables.get("NPROC") == given


@pytest.mark.parametrize(
    ("named", "platform", "words"),
    [
        ("nosuch", "auto", "JAX_PLATFORMS: 'nosuch' in the environment, but JAX cannot use it (Unable to initialize "),
        ("cuda", "auto", "JAX_PLATFORMS: 'cuda' in the environment, but JAX cannot use it ("),
        ("", "gpu", "--key: 'gpu', but JAX cannot use one ("),
        ("cpu", "gpu", "--key: 'gpu', but JAX cannot use one ("),
    ],
)
def test_a_platform_that_jax_lacks_is_one_line(named: str, platform: str, words: str) -> None:
    if has_gpus() and named != "nosuch":
        pytest.skip("SKIPPED: this machine has GPUs")
    program = (
        "from jaxdist.runtime.start import DevicesConfig, choose_platform, count_devices, fail_alone\n"
        f"devices = DevicesConfig(platform={platform!r})\n"
        "choose_platform(devices)\n"
        "try:\n"
        "    with fail_alone():\n"
        "        count_devices(devices, key='--key')\n"
        "except ValueError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environ = environment() | {"JAX_PLATFORMS": named}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert done.stdout.startswith(f"UserError {words}") and done.stdout.count("\n") == 1, done.stderr


def test_other_errors_of_jax_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("planted")

    monkeypatch.setattr(jax, "device_count", broken)
    for platform in ("auto", "gpu"):
        with pytest.raises(RuntimeError, match="planted"):
            count_devices(DevicesConfig(platform=platform))


@pytest.mark.parametrize(
    ("processes", "cores", "elsewhere", "overrides", "one"),
    [
        (2, 1, False, (), True),
        (2, 1, True, (), False),  # another rank has more: their programs must be alike
        (2, 2, False, (), False),
        (2, 1, False, ("parallel.grad_sync.deterministic=true", "optimizer.name=adamw"), False),
        (1, 1, False, (), False),
    ],
)
def test_ranks_agree_on_having_one_core_each(
    processes: int, cores: int, elsewhere: bool, overrides: tuple[str, ...], one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "place", lambda: Place(0, processes))
    monkeypatch.setattr(start, "anywhere", lambda own: own or elsewhere)
    monkeypatch.setattr(start.os, "sched_getaffinity", lambda process: set(range(cores)))
    assert start._one_core_each(load_config("configs/quickstart.yaml", overrides)) == one


@pytest.mark.parametrize(
    ("before", "simulated", "job", "given"),
    [
        ("", 8, "", 8 * THREADS_ALONE),
        ("", 8, ", in_job=True", 8 * THREADS_IN_A_JOB),
        ("", 1, "", None),
        ("start.jax.config.update('jax_num_cpu_devices', 8); start.jax.devices()", 8, "", None),
    ],
)
def test_they_are_given_before_jax_starts(before: str, simulated: int, job: str, given: int | None) -> None:
    program = (
        "import os, jaxdist.runtime.start as start\n"
        "from jaxdist.config.schema import DevicesConfig\n"
        "start.os.sched_getaffinity = lambda pid: {0, 1}\n"
        f"{before}\n"
        f"start.choose_platform(DevicesConfig(simulated={simulated}){job})\n"
        "print(os.environ.get('NPROC'), start.jax.device_count())\n"
    )
    clean = {name: text for name, text in environment().items() if name not in ("NPROC", OWN_THREADS)}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout == f"{given} {simulated}\n"
