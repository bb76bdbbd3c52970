"""Sum one gradient a device over 8 devices by a hand-written ring: python docs/examples/collectives.py"""

import jax, jax.numpy as jnp  # noqa: E401, I001
from jax.sharding import PartitionSpec as P
import jaxdist
from jaxdist.collectives import all_reduce, claim_replicated, stack, stacked_specs

jax.config.update("jax_num_cpu_devices", 8)  # eight simulated devices; ignored on GPUs
mesh = jaxdist.make_mesh(data=8)
grads = jnp.arange(8.0 * 1000).reshape(8, 1000)  # row i belongs to device i


def region(grad):  # runs on each device, with its row; shard_map checks the types
    return stack(P(), all_reduce(grad[0], "data", algorithm="ring"))


summed = jax.shard_map(region, mesh=mesh, in_specs=P("data"), out_specs=stacked_specs(P(), mesh))
total = jax.jit(lambda grads: claim_replicated(summed(grads), P(), mesh))(grads)
print(total.sharding.is_fully_replicated, bool((total == grads.sum(0)).all()))
