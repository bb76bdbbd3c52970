"""What each mode of `memory.remat` keeps and costs, and what a loss in chunks saves, on ONE device.

    python scripts/bench/memory.py [--depths 4,8,16,32,64] [--steps 20] [--json OUT]

Three tables. Temporary bytes of the compiled step by number of blocks (compiled, not run), with FLOPs counted in the
program. Seconds of a step, all modes compiled, warmed up and run in turn in one process: medians. Temporary bytes with
and without `model.loss_chunk`.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from typing import Any

from jaxdist.config.arguments import numeric, output_file
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import CommandParser, reports_mistakes

PyTree = Any
NAMED = ("attention.out", "mlp.hidden")
MODES: tuple[str | tuple[str, ...], ...] = ("none", "dots", NAMED, "full", "sqrt")
DEEP = ModelConfig(layers=4, width=64, heads=1, vocab=16, mlp_width=64, bias=False)
TIMED = ModelConfig(layers=16, width=256, heads=4, vocab=256)
LENGTH = 64  # of a sequence, for memory by depth
VOCABULARY = ModelConfig(layers=1, width=64, heads=1, vocab=50304)


def lowered(config: ModelConfig, rows: int, length: int, **options: Any) -> tuple[Any, float]:
    """(lowered step on one device, FLOPs of its matrix products). Nothing is allocated."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxdist.init import state_target
    from jaxdist.mesh import make_mesh
    from jaxdist.models.gpt import gpt
    from jaxdist.plan.traced.flops import flops_of
    from jaxdist.step import make_train_step

    model, optimizer, mesh = gpt(config, max_length=length), optax.sgd(0.1), make_mesh()
    step = make_train_step(model, optimizer, mesh, **options)
    state = state_target(model, optimizer, mesh)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((rows, length), dtype) for name, dtype in kinds.items()}
    traced = step.jitted(state).trace(state, batch)
    return traced.lower(), flops_of(traced.jaxpr)


def temporary(config: ModelConfig, rows: int, length: int, **options: Any) -> tuple[int, float]:
    """(temporary bytes of the compiled step, FLOPs)."""
    program, flops = lowered(config, rows, length, **options)
    return int(program.compile().memory_analysis().temp_size_in_bytes), flops


def by_depth(depths: list[int], mode: str | tuple[str, ...]) -> tuple[list[int], list[float]]:
    """(bytes of activations, FLOPs), by number of blocks.

    Of activations: what 24 sequences need more than 8, as bytes of 16. What does not depend on the batch, such as
    gradients, is in both.
    """
    sizes, flops = [], []
    for layers in depths:
        config = DEEP.replace(layers=layers)
        (small, _), (large, count) = (temporary(config, rows, LENGTH, remat=mode) for rows in (8, 24))
        sizes.append(large - small)
        flops.append(count)
    return sizes, flops


def exponent(depths: list[int], sizes: list[int], full: list[int]) -> float:
    """Slope of log(size) over log(depth), by least squares, without what a block needs while it runs.

    That does not depend on the depth: it is what is left of the mode "full" at depth 0.
    """
    workspace = full[0] - depths[0] * (full[-1] - full[0]) / (depths[-1] - depths[0])
    x, y = [math.log(depth) for depth in depths], [math.log(size - workspace) for size in sizes]
    middle, level = statistics.fmean(x), statistics.fmean(y)
    return sum((a - middle) * (b - level) for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def times(steps: int, rows: int = 4, length: int = 256) -> dict[str, float]:
    """Median seconds of a step of `TIMED`, by mode."""
    import jax
    import numpy as np
    import optax

    from jaxdist.init import init_state
    from jaxdist.mesh import make_mesh
    from jaxdist.models.gpt import gpt
    from jaxdist.step import make_train_step

    model, optimizer, mesh = gpt(TIMED, max_length=length), optax.sgd(0.1), make_mesh()
    ids = np.random.default_rng(0).integers(0, TIMED.vocab, (rows, length + 1), np.int32)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((rows, length), np.float32)}
    running = {}
    for mode in MODES:
        running[mode] = make_train_step(model, optimizer, mesh, remat=mode), init_state(model, optimizer, mesh)
    seconds: dict[Any, list[float]] = {mode: [] for mode in MODES}
    for i in range(steps + 2):
        for mode in MODES:
            step, state = running[mode]
            begun = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            running[mode] = step, state
            if i > 1:
                seconds[mode].append(time.perf_counter() - begun)
    return {name(mode): statistics.median(seconds[mode]) for mode in MODES}


def name(mode: str | tuple[str, ...]) -> str:
    """As it is written in a configuration."""
    return mode if isinstance(mode, str) else f"[{','.join(mode)}]"


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="4,8,16,32,64")
    parser.add_argument("--steps", type=numeric(int, at_least=0), default=20, help="timed steps of each mode; 0: none")
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    import jax

    found: dict[str, Any] = {"jax": jax.__version__, "cpus": os.cpu_count(), "machine": platform.machine()}
    depths = [int(each) for each in arguments.depths.split(",")]
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    print("activations in MiB of 16 sequences, by blocks", depths)
    for mode in MODES:
        found[name(mode)] = dict(zip(("bytes", "flops"), by_depth(depths, mode), strict=True))
    for mode in MODES:
        sizes, flops = found[name(mode)].values()
        shown = "  ".join(f"{size / 2**20:8.2f}" for size in sizes)
        again, slope = flops[-1] / found["none"]["flops"][-1], exponent(depths, sizes, found["full"]["bytes"])
        print(f"{name(mode):30}{shown}  exponent {slope:.2f}, FLOPs x {again:.3f}", flush=True)
    if arguments.steps:
        found["seconds"] = times(arguments.steps)
        for mode in MODES:
            _, flops = lowered(TIMED, 4, 256, remat=mode)
            seconds = found["seconds"][name(mode)]
            ratio = seconds / found["seconds"]["none"]
            print(f"{name(mode):30}{1000 * seconds:8.0f} ms, x {ratio:.3f}, {flops:.4g} FLOPs", flush=True)
    for chunk in (0, None):
        found[f"loss_chunk {chunk}"], _ = temporary(VOCABULARY.replace(loss_chunk=chunk), 256, 128)
        print(f"model.loss_chunk={chunk}: {found[f'loss_chunk {chunk}'] / 2**20:.0f} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
