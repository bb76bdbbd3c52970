"""What a process gets before JAX starts: its part of a job's simulated devices, and threads for them."""

import pytest

from jaxdist.config.load import load_config
from jaxdist.runtime.start import THREADS_A_DEVICE, give_threads, of_each_process


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


def test_each_simulated_device_of_a_job_has_threads_of_its_own() -> None:
    devices = load_config("configs/quickstart.yaml").devices
    for cores, threads in ((2, 8 * THREADS_A_DEVICE), (128, 128)):
        environment: dict[str, str] = {}
        give_threads(devices, environment, cores=cores)
        assert environment == {"NPROC": str(threads)}
    environment = {"NPROC": "3"}
    give_threads(devices, environment, cores=2)
    assert environment == {"NPROC": "3"}, "what a user has set stays"
