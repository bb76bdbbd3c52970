"""scripts/train.py with a fault of the test's choice: faulty.py '{"kind": KIND, "rank": RANK, ...}' ARGUMENTS

Kinds, on one rank: exception, loop (in Python), hiccup (seconds), at the dispatch of a step; data: sleeps in its batch;
save: its third save hangs;
program: another one; slow, slow_data: sleeps between steps, or in data, each time; flip: a bit in the memory of one
device; late: its watch needs a second to notice a lost connection; failing: exception, and closing takes seconds;
finish: takes seconds after the last step, and then may fail; none.
The moment is written to the standard error as "fault SECONDS", by time.time().
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).parents[1] / "scripts"


def now() -> None:
    os.write(2, f"fault {time.time():.3f}\n".encode())


def flip(state: Any, leaf: int, device: int) -> Any:
    """The state with one bit of a leaf changed, on one device of this process."""
    import jax

    leaves, treedef = jax.tree.flatten(state)
    parts = []
    for i, shard in enumerate(leaves[leaf].addressable_shards):
        value = np.array(shard.data)
        if i == device:
            # Of a float a high bit of the fraction: the last one may be rounded away by the next update.
            value.reshape(-1).view(np.uint8)[max(0, value.itemsize - 2)] ^= 16
        parts.append(jax.device_put(value, shard.device))
    whole = leaves[leaf]
    leaves[leaf] = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, parts)
    return jax.tree.unflatten(treedef, leaves)


def in_step(fault: dict[str, Any], call: int, state: Any) -> Any:
    """What goes wrong when the step is called for the `call`-th time. Returns the state to call it with."""
    kind = fault["kind"]
    if call != fault.get("step"):
        return state
    if kind in ("exception", "failing"):
        now()
        raise RuntimeError("a bug of the user")
    if kind == "loop":
        now()
        while True:
            pass
    if kind == "hiccup":
        now()
        time.sleep(fault["seconds"])
    if kind == "flip":
        import jax

        now()
        with jax.transfer_guard("allow"):
            return flip(state, fault["leaf"], fault["device"])
    return state


def spoil(fault: dict[str, Any]) -> None:
    import jaxdist.step
    import jaxdist.trainer.train
    from jaxdist.checkpoint import Checkpoints
    from jaxdist.checkpoint.barrier import _SharedFuture
    from jaxdist.data import Loader
    from jaxdist.runtime.watch import watchdog
    from jaxdist.runtime.watch.watchdog import Watch
    from jaxdist.train_step import TrainStep

    watchdog.UNMOVED_S = fault.get("unmoved", watchdog.UNMOVED_S)
    if fault["kind"] == "program":
        made = jaxdist.step.norm_without
        jaxdist.step.norm_without = lambda *args, **kwargs: lambda grads: 2 * made(*args, **kwargs)(grads)
    call, batch, calls = TrainStep.__call__, Loader.batch, [0]

    def spoiled_call(self: Any, state: Any, batch: Any) -> Any:
        calls[0] += 1
        return call(self, in_step(fault, calls[0], state), batch)

    def spoiled_batch(self: Any, step: int) -> Any:
        if fault["kind"] == "data" and step == fault["step"]:
            now()
            time.sleep(1000)
        if fault["kind"] == "slow_data":
            time.sleep(fault["seconds"])
        return batch(self, step)

    def spoiled_result(self: Any, timeout: float | None = None) -> Any:
        if fault["kind"] == "save" and self._saves._save == 3:
            now()
            self._future = SimpleNamespace(result=lambda _: time.sleep(1000))
        return result(self, timeout)

    def spoiled_due(step: int, every: int, last: int) -> bool:
        if fault["kind"] == "slow":
            time.sleep(fault["seconds"])
        return due(step, every, last)

    def late_hear(self: Any, rank: int, message: Any, at: float) -> None:
        if fault["kind"] == "late" and message is None:
            time.sleep(1)
        hear(self, rank, message, at)

    def spoiled_close(self: Any) -> None:
        if fault["kind"] == "failing":
            time.sleep(fault["seconds"])
        close(self)

    def spoiled_finish(run: Any, samples: str) -> None:
        if fault["kind"] == "finish":
            now()
            time.sleep(fault["seconds"])
            if fault["fails"]:
                raise RuntimeError("a bug of the user")
        finish(run, samples)

    result, _SharedFuture.result = _SharedFuture.result, spoiled_result  # type: ignore[method-assign]
    close, Checkpoints.close = Checkpoints.close, spoiled_close  # type: ignore[method-assign]
    finish, jaxdist.trainer.train.write_summary = jaxdist.trainer.train.write_summary, spoiled_finish
    hear, Watch._hear = Watch._hear, late_hear  # type: ignore[method-assign]
    due, jaxdist.trainer.train.due = jaxdist.trainer.train.due, spoiled_due
    TrainStep.__call__ = spoiled_call  # type: ignore[method-assign]
    Loader.batch = spoiled_batch  # type: ignore[method-assign]


if __name__ == "__main__":
    chosen = json.loads(sys.argv.pop(1))
    if chosen.get("rank") == int(os.environ["RANK"]):
        spoil(chosen)
    sys.argv[0] = str(SCRIPTS / "train.py")
    from jaxdist.cli.runs.train import main

    sys.exit(main(sys.argv[1:], "train.py"))
