"""What a checkpoint costs: python scripts/bench/save.py [--width 1024] [--layers 6] [--saves 5] [--orbax] [--json FILE]

Trains a GPT on random ids, saves now and then, and compares the steps that run beside a save with the others. Then
verifies and restores what was saved. With --orbax the same run follows with saves by orbax alone. With the default
sizes the state is about 1 GB; --width 128 --layers 4 is small. Run it on a machine that does nothing else. On a machine
with a GPU the processor is free for the save; NPROC=1 leaves it all cores but one where XLA trains on the processor.
"""

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from jaxdist import init_state, make_mesh, make_optimizer, make_train_step, state_target
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.checksums import check_files
from jaxdist.config.arguments import COUNT, numeric, output_file
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.data import Loader
from jaxdist.errors import CommandParser, reports_mistakes
from jaxdist.models.gpt import gpt
from jaxdist.observe import measured_on
from jaxdist.specs import BATCH_SPEC


def timed(step: Any, state: Any, batch: Any) -> tuple[Any, float]:
    """The state after a step, and the seconds until it was there."""
    begun = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return state, time.perf_counter() - begun


def touch(gigabytes: int) -> None:
    """Use memory and let it go. The host of a virtual machine may take back what is free, within seconds; the system
    then waits for each page, in the save and in the step."""
    if gigabytes:
        mmap.mmap(-1, gigabytes * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


class Orbax:
    """Saves by orbax's own manager, in the background, as `Checkpoints` does without its checks and checksums."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, number: int, state: Any, _: Any) -> None:
        """Begin a save."""
        self._manager.save(number, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state._asdict())))

    def wait(self) -> None:
        """Wait until it is complete."""
        self._manager.wait_until_finished()

    def __enter__(self) -> "Orbax":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()


def save_beside_steps(
    step: Any, state: Any, loader: Loader, folder: Path, arguments: argparse.Namespace, saver: Callable[[Path], Any]
) -> tuple[Any, dict[str, Any]]:
    """Seconds of steps alone, of steps beside each save, of the calls of `save`, of what training lost to each save
    (the call, and what the next step takes longer), and of the whole saves."""
    found: dict[str, Any] = {"alone_s": [], "beside_s": [], "blocked_s": [], "lost_s": [], "save_s": []}

    def alone(state: Any, count: int) -> Any:
        for i in range(count):
            state, seconds = timed(step, state, loader.batch(i))
            found["alone_s"].append(seconds)
        return state

    state = alone(state, 2)  # compilation, and what comes after it
    found["alone_s"].clear()
    with saver(folder) as checkpoints:
        for number in range(1, arguments.saves + 1):
            state = alone(state, arguments.steps)
            touch(arguments.touch)
            begun = time.perf_counter()
            checkpoints.save(number, state, {})
            found["blocked_s"].append(time.perf_counter() - begun)
            beside = []
            while not (folder / str(number)).exists():
                state, seconds = timed(step, state, loader.batch(0))
                beside.append(seconds)
            found["beside_s"].append(beside)
            after = beside[0] if beside else timed(step, state, loader.batch(0))[1]
            found["lost_s"].append(found["blocked_s"][-1] + after - statistics.median(found["alone_s"]))
            checkpoints.wait()
            ended = max(path.stat().st_mtime for path in (folder / str(number)).rglob("*"))
            found["save_s"].append(ended - (time.time() - (time.perf_counter() - begun)))
    return state, found


def restore(folder: Path, number: int, target: Any) -> dict[str, Any]:
    """Seconds of verifying and of restoring, each alone, from files that the system has in memory."""
    begun = time.perf_counter()
    assert not check_files(folder / str(number), number).problem
    verified = time.perf_counter() - begun
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.newest_intact(print) == number  # `restore` will not verify once more
        begun = time.perf_counter()
        jax.block_until_ready(checkpoints.restore(number, target))
        return {"verify_s": verified, "restore_s": time.perf_counter() - begun}


def report(found: dict[str, Any], what: str) -> None:
    """Medians, and the longest."""
    alone, steps = statistics.median(found["alone_s"]), [step for save in found["beside_s"] for step in save]
    spread = max(found["alone_s"]) / alone
    print(
        f"{what}; step {alone * 1e3:.1f} ms (median of {len(found['alone_s'])}, longest {spread:.3f} x)\n"
        f"{len(found['save_s'])} saves: {statistics.median(found['blocked_s']):.3f} s until training goes on (the"
        f" first {found['blocked_s'][0]:.3f} s), {statistics.median(found['lost_s']):.3f} s with what the next"
        f" step takes longer, {statistics.median(found['save_s']):.2f} s in all"
    )
    if steps:
        firsts = [save[0] for save in found["beside_s"] if save]
        print(
            f"{len(steps)} steps beside them: median {statistics.median(steps) / alone:.3f} x, longest"
            f" {max(steps) / alone:.3f} x; the first of each {statistics.median(firsts) / alone:.3f} x"
        )
    if "verify_s" in found:
        print(f"verify {found['verify_s']:.2f} s, restore {found['restore_s']:.2f} s")


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments."""
    parser = CommandParser(description="Time steps beside a save, verification and restoring.")
    sizes = {"width": 1024, "layers": 6, "seq-len": 128, "batch": 8, "data": 1, "saves": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=COUNT, default=default)
    parser.add_argument("--steps", type=COUNT, default=8, help="alone, before each save")
    parser.add_argument(
        "--touch",
        type=numeric(int, at_least=0),
        default=0,
        metavar="GB",
        help="memory to use and let go before each save",
    )
    parser.add_argument("--folder", type=Path, help="where to save; default: the system's temporary folder")
    parser.add_argument("--orbax", action="store_true", help="saves by orbax alone follow")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    config = ModelConfig(layers=arguments.layers, width=arguments.width, heads=8, vocab=8192).resolved()
    model, mesh = gpt(config, max_length=arguments.seq_len), make_mesh(data=arguments.data)
    optimizer = make_optimizer(OptimizerConfig(), steps=10**6)
    state = init_state(model, optimizer, mesh, seed=0)
    step = make_train_step(model, optimizer, mesh)
    ids = np.random.default_rng(0).integers(0, 8192, 10**6).astype(np.uint16)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    loader = Loader(ids, seq_len=arguments.seq_len, global_batch=arguments.batch, sharding=sharding)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e9
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        state, found = save_beside_steps(
            step, state, loader, Path(folder), arguments, lambda own: Checkpoints(own, keep=2)
        )
        if arguments.orbax:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as other:
                state, beside = save_beside_steps(step, state, loader, Path(other), arguments, Orbax)
        del state
        found |= restore(Path(folder), arguments.saves, state_target(model, optimizer, mesh))
    what = f"state {size:.2f} GB on {mesh.size} {jax.devices()[0].device_kind}"
    report(found, what)
    if arguments.orbax:
        report(beside, f"orbax alone: {what}")
        found["orbax"] = beside
    if arguments.json is not None:
        found = {**measured_on(), "bytes": round(size * 1e9), "devices": mesh.size, **found}
        arguments.json.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
