"""What a checkpoint costs: python scripts/bench_save.py [--width 1024] [--layers 6] [--steps 40] [--json FILE]

Trains a GPT on random ids, saves in the middle, and compares the steps that run beside the save with those before. Then
verifies and restores what was saved. With the default sizes the state is about 1 GB; --width 128 --layers 4 is small.
Run it on a machine that does nothing else.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist import init_state, make_mesh, make_optimizer, make_train_step, state_target
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.integrity import check
from jaxdist.config import ModelConfig, OptimizerConfig, resolve_model
from jaxdist.data import Loader
from jaxdist.models.gpt import gpt
from jaxdist.specs import BATCH_SPEC


def timed(step: Any, state: Any, batch: Any) -> tuple[Any, float]:
    """The state after a step, and the seconds until it was there."""
    begun = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return state, time.perf_counter() - begun


def save_beside_steps(step: Any, state: Any, loader: Loader, folder: Path, steps: int) -> tuple[Any, dict[str, Any]]:
    """Seconds of steps before, beside and after a save, of the call of `save`, and of the whole save."""
    usual, beside, after = [], [], []
    for i in range(steps):
        state, seconds = timed(step, state, loader.batch(i))
        usual.append(seconds)
    with Checkpoints(folder, keep=2) as checkpoints:
        begun = time.perf_counter()
        checkpoints.save(1, state, {})
        blocked = time.perf_counter() - begun
        while not (folder / "1").exists():
            state, seconds = timed(step, state, loader.batch(0))
            beside.append(seconds)
        saved = time.perf_counter() - begun
        for i in range(steps):
            state, seconds = timed(step, state, loader.batch(i))
            after.append(seconds)
    usual = usual[2:]  # compilation, and what comes after it
    found = {"usual_s": usual, "beside_s": beside, "after_s": after, "blocked_s": blocked, "save_s": saved}
    return state, found


def restore(folder: Path, target: Any) -> dict[str, Any]:
    """Seconds of verifying and of restoring, each alone, from files that the system has in memory."""
    begun = time.perf_counter()
    assert not check(folder / "1", 1).problem
    verified = time.perf_counter() - begun
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.newest_intact(print) == 1  # `restore` will not verify once more
        begun = time.perf_counter()
        jax.block_until_ready(checkpoints.restore(1, target))
        return {"verify_s": verified, "restore_s": time.perf_counter() - begun}


def main() -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description="Time steps beside a save, verification and restoring.")
    for name, default in (("width", 1024), ("layers", 6), ("steps", 40), ("seq-len", 128), ("batch", 8), ("data", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="where to save; default: the system's temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    config = resolve_model(ModelConfig(layers=arguments.layers, width=arguments.width, heads=8, vocab=8192))
    model, mesh = gpt(config, max_length=arguments.seq_len), make_mesh(data=arguments.data)
    optimizer = make_optimizer(OptimizerConfig(), steps=10**6)
    state = init_state(model, optimizer, mesh, seed=0)
    step = make_train_step(model, optimizer, mesh)
    ids = np.random.default_rng(0).integers(0, 8192, 10**6).astype(np.uint16)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    loader = Loader(ids, seq_len=arguments.seq_len, global_batch=arguments.batch, sharding=sharding)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e9
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        state, found = save_beside_steps(step, state, loader, Path(folder), arguments.steps)
        del state
        found |= restore(Path(folder), state_target(model, optimizer, mesh))
    usual, beside = statistics.median(found["usual_s"]), found["beside_s"]
    print(f"state {size:.2f} GB on {mesh.size} {jax.devices()[0].device_kind}; step {usual * 1e3:.1f} ms (median of"
          f" {len(found['usual_s'])})\nsave: {found['blocked_s']:.3f} s until training goes on, {found['save_s']:.2f} s"
          f" in all")  # fmt: skip
    if beside:
        print(f"{len(beside)} steps beside it: median {statistics.median(beside) / usual:.3f} x, longest"
              f" {max(beside) / usual:.3f} x")  # fmt: skip
    print(f"verify {found['verify_s']:.2f} s, restore {found['restore_s']:.2f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bytes": size * 1e9, "devices": mesh.size, **found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
