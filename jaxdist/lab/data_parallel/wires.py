"""An account of the devices that one program drives: what they send and receive, their memory, and their time."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

from jaxdist.specs import PyTree


class Wires:
    """Moves arrays between devices and runs programs on them, and writes down both.

    A transfer counts as sent by the device that has the array and as received by the one that gets it, in the phase
    that is named. The memory of a device is taken whenever a program runs there: the arrays that are alive on it, and
    the program's temporary memory and results, as its compiler states them. Arrays that were alive before the account
    was opened do not count.

    fenced: whether each transfer and each program is waited for, so that its seconds can be told from others'. JAX
        goes on without waiting otherwise, so that the devices work at the same time.
    """

    def __init__(self, *, fenced: bool = False) -> None:
        self.sent, self.received = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        self.seconds, self.peak = dict[tuple[str, int], float](), dict[int, int]()
        self.fenced, self._programs = fenced, dict[Any, Any]()
        self._foreign = frozenset(_buffers(jax.live_arrays()))

    def restart(self) -> None:
        """Forget what was counted, and keep the compiled programs."""
        for each in (self.sent, self.received, self.seconds, self.peak):
            each.clear()

    def put(self, phase: str, tree: PyTree, device: jax.Device) -> PyTree:
        """The tree on this device. What is there already stays as it is."""
        began, nbytes = time.perf_counter(), 0
        for leaf in jax.tree.leaves(tree):
            (source,) = leaf.devices()
            if source != device:
                self.sent[phase, source.id] += leaf.nbytes
                self.received[phase, device.id] += leaf.nbytes
                nbytes += leaf.nbytes
        return self._timed(phase, device, began, jax.device_put(tree, device)) if nbytes else tree

    def run(self, phase: str, program: Any, *arguments: PyTree) -> Any:
        """program(*arguments), a `jax.jit` function, on the one device on which the arguments are."""
        leaves = jax.tree.leaves(arguments)
        (device,) = leaves[0].devices()
        key = program, device, jax.tree.structure(arguments), tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._programs:
            self._programs[key] = program.lower(*arguments).compile()
        compiled = self._programs[key]
        memory = compiled.memory_analysis()
        now = self._alive(device) + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        self.peak[device.id] = max(self.peak.get(device.id, 0), now)
        return self._timed(phase, device, time.perf_counter(), compiled(*arguments))

    def _timed(self, phase: str, device: jax.Device, began: float, result: Any) -> Any:
        if self.fenced:
            jax.block_until_ready(result)
            key = phase, device.id
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - began
        return result

    def _alive(self, device: jax.Device) -> int:
        """Bytes of the arrays on this device. Those that share a buffer count once."""
        found = _buffers(array for array in jax.live_arrays() if device in array.devices())
        return sum(size for (where, _), size in found.items() if where == device.id and (where, _) not in self._foreign)


def _buffers(arrays: Iterable[jax.Array]) -> dict[tuple[int, int], int]:
    """{(device, address): bytes}."""
    shards = [shard for array in arrays for shard in array.addressable_shards]
    return {(shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes for shard in shards}
