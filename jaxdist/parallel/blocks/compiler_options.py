"""The options of XLA:GPU with which a training step is compiled."""

import os

import jax
import jax.numpy as jnp

from jaxdist.config.rules.xla_flags import TRITON, names_given
from jaxdist.mesh import AnyMesh, on_cpu
from jaxdist.parallel.options import StrategyOptions
from jaxdist.specs import STACKED, PyTree, bytes_per_device, is_model, shard_of

AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
BY_TWO = "xla_gpu_enable_while_loop_double_buffering"
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
NO_ZEROS = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
THRESHOLD = "xla_gpu_{}_combine_threshold_bytes"
COMBINED = 1.2  # XLA may combine collectives up to so many times a block's bytes: one block, and a slice of the head


def compiler_options(params: PyTree, options: StrategyOptions, mesh: AnyMesh) -> dict[str, int | bool] | None:
    """Options of XLA:GPU for a program; None on CPUs. Figures: docs/plan.md.

    - Write no zeros into the memory of a loop's results, such as activations of all blocks, before the loop writes it.
    - With float8, and with fp32 at `jax_default_matmul_precision` "highest": take no products from Triton. XLA chooses
      between its kernels for minutes (docs/compiler.md).

    For blocks that run for two halves of the samples: combine no gathers and no reduce-scatters, which would make one
    collective for both halves. For a program that prefetches blocks:

    - Combine the collectives of one block, but not those of two. XLA's own thresholds, 30 MiB, would leave every large
      parameter apart.
    - Run two collectives at once, or three where shards are summed too.
    - Unroll loops by two. Otherwise a round would copy what it hands to the next: a gathered block, and gradients.
    - Hide latency, which XLA does by itself only from Hopper on.

    A flag in XLA_FLAGS wins, but not a flag in a file that XLA_FLAGS names.
    """
    if on_cpu(mesh):
        return None
    told: dict[str, int | bool] = {NO_ZEROS: True}
    exact = jax.config.jax_default_matmul_precision in ("highest", "float32")
    if options.precision.fp8 or (exact and options.precision.compute == jnp.float32):
        told[TRITON] = False
    if options.prefetch and is_model(params):
        told |= _prefetching(params, options, mesh)
    if options.batch_split > 1:  # which excludes prefetching, and a loss without blocks
        told |= {THRESHOLD.format(op): 0 for op in ("all_gather", "reduce_scatter")}
    given = names_given(os.environ.get("XLA_FLAGS", ""))
    return {name: value for name, value in told.items() if f"--{name}" not in given}


def _prefetching(params: PyTree, options: StrategyOptions, mesh: AnyMesh) -> dict[str, int | bool]:
    """The options for a program that prefetches blocks."""

    own = whole = 0  # elements, of one block; parameters that are no shards do not travel
    for leaf in jax.tree.leaves(params[STACKED]):
        if (shard := shard_of(leaf.sharding.spec)) is not None:
            elements = bytes_per_device(leaf, leaf.sharding.spec, mesh) // leaf.dtype.itemsize // leaf.shape[0]
            own, whole = own + elements, whole + elements * shard.parts(mesh)
    received, reduced = (jnp.dtype(each).itemsize for each in (options.precision.received, options.precision.reduce))
    least = 30 * 2**20  # XLA's own threshold
    gathered, summed = max(least, int(COMBINED * whole * received)), max(least, int(COMBINED * whole * reduced))
    sums = summed * own // max(1, whole)  # XLA counts the outputs of collectives
    limits = {"all_gather": gathered, "reduce_scatter": sums}
    if mesh.shape["data"] > 1:
        limits["all_reduce"] = max(least, sums)  # sums shards
    sizes = {THRESHOLD.format(op): size for op, size in limits.items()}
    at_once = 3 if mesh.shape["data"] > 1 else 2
    return {**sizes, BY_TWO: True, AT_ONCE: at_once, LATENCY_HIDING: True}
