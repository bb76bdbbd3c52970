"""Closed forms: the bytes that each device sends and receives in a step of DataParallel, of its balanced form, of ddp.

P devices hold equal shares of a batch, which lies on device 0 with the parameters. Every other device has the same
load as the next, so that a phase has four figures.
"""

from typing import NamedTuple

# In the order of a step. DataParallel has all of them; its balanced form computes loss and backward in "apply".
REPLICATE, SCATTER, APPLY, GATHER, LOSS = "replicate", "scatter", "apply", "gather", "loss"
SCATTER_BACK, PULL_BACK, REDUCE, ROOT_UPDATE = "scatter back", "backward", "reduce", "update"
STEP_PHASES = (REPLICATE, SCATTER, APPLY, GATHER, LOSS, SCATTER_BACK, PULL_BACK, REDUCE, ROOT_UPDATE)


class Sizes(NamedTuple):
    """Bytes of what travels.

    parameters: N. Their gradients have as many.
    state: of BatchNorm's running statistics, which travel with the parameters.
    inputs, labels: of the whole batch. Labels include the weights of the loss.
    outputs: O, of all devices together, which the loss is computed from.
    sums: of a device's loss and weight.
    """

    parameters: int
    state: int
    inputs: int
    labels: int
    outputs: int
    sums: int


class Load(NamedTuple):
    """Bytes that device 0, and each of the other devices, sends and receives."""

    root_sends: int = 0
    root_receives: int = 0
    other_sends: int = 0
    other_receives: int = 0

    def plus(self, other: "Load") -> "Load":
        """The sum, figure by figure."""
        return Load(*(a + b for a, b in zip(self, other, strict=True)))


def _to_others(each: int, devices: int) -> Load:
    """Device 0 sends `each` bytes to every other device."""
    return Load(root_sends=(devices - 1) * each, other_receives=each)


def _to_root(each: int, devices: int) -> Load:
    return Load(root_receives=(devices - 1) * each, other_sends=each)


def loads(sizes: Sizes, devices: int, *, balanced: bool) -> dict[str, Load]:
    """The bytes of each phase that sends any.

    >>> from jaxdist.lab.data_parallel.closed_forms import Sizes, loads
    >>> sizes = Sizes(parameters=100, state=0, inputs=40, labels=4, outputs=800, sums=8)
    >>> loads(sizes, 4, balanced=False)["gather"]
    Load(root_sends=0, root_receives=600, other_sends=200, other_receives=0)
    >>> loads(sizes, 4, balanced=True)["gather"]
    Load(root_sends=0, root_receives=24, other_sends=8, other_receives=0)
    """
    replicate = _to_others(sizes.parameters + sizes.state, devices)
    reduce = _to_root(sizes.parameters, devices)
    if balanced:
        scatter = _to_others((sizes.inputs + sizes.labels) // devices, devices)
        return {REPLICATE: replicate, SCATTER: scatter, GATHER: _to_root(sizes.sums, devices), REDUCE: reduce}
    share = sizes.outputs // devices
    return {
        REPLICATE: replicate,
        SCATTER: _to_others(sizes.inputs // devices, devices),
        GATHER: _to_root(share, devices),
        SCATTER_BACK: _to_others(share, devices),
        REDUCE: reduce,
    }


def total(loads: dict[str, Load]) -> Load:
    """The bytes of a whole step."""
    whole = Load()
    for each in loads.values():
        whole = whole.plus(each)
    return whole


def ddp_bytes(parameters: int, devices: int) -> float:
    """Bytes that each device sends, and receives, in a ring's all-reduce of the gradients: 2 (P-1)/P N."""
    return 2 * (devices - 1) / devices * parameters
