"""What a training loop moves between devices and the host. CPU devices refuse no transfer; GPUs do."""

from typing import Any

import jax

from jaxdist.trainer.recorder import Recorder


class Metric:
    """A metric that notes whether its copy would have been allowed on a GPU."""

    guard = ""

    def copy_to_host_async(self) -> None:
        self.guard = jax.config.jax_transfer_guard_device_to_host  # type: ignore[attr-defined]


def test_metrics_are_copied_where_transfers_are_disallowed() -> None:
    """The first run on a GPU ended at its first step: "Disallowed device-to-host transfer"."""
    recorder: Any = Recorder.__new__(Recorder)
    recorder._dispatched, metric = None, Metric()
    with jax.transfer_guard("disallow"):  # as the loop calls it
        recorder.dispatched(1, {"loss": metric})
    assert metric.guard == "allow"
