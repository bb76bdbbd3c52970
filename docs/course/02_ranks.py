"""Lesson 2: processes, devices, ranks, meshes, and the collectives by their results: python docs/course/02_ranks.py"""

# %% [markdown]
# # 2. Ranks and groups
#
# In PyTorch each GPU has a **process** of its own. A process has a number, its **rank**. Several computers are
# **nodes** (here: hosts), with the same number of GPUs each. The **world size** is the number of all ranks, and a
# **local rank** is counted inside a node:

# %%
import math

import jax
import jax.numpy as jnp
import numpy as np
from _course import devices, grid, show
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist

devices()


def rank(node_rank, local_rank, gpus_per_node):
    """The rank in the whole job, counted from 0."""
    return node_rank * gpus_per_node + local_rank


nodes, gpus = 2, 4
for node in range(nodes):
    print(f"node {node}: ranks", *[rank(node, local, gpus) for local in range(gpus)])
assert [rank(n, g, gpus) for n in range(nodes) for g in range(gpus)] == list(range(nodes * gpus))

# %% [markdown]
# JAX counts **devices**. One process may have several, and all run the same program (SPMD: single program, multiple
# data). A **mesh** arranges the devices in a table, and its dims have names: its **axes**. jaxdist's axes are `pipe`,
# `data`, `fsdp`, `expert`, `context` and `tensor`; those of size 1 are not in use.

# %%
mesh = jaxdist.make_mesh(data=4, tensor=2)
ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
print("mesh: rows along data, columns along tensor")
print(ids)


# %% [markdown]
# An axis gives **groups** for nothing (PyTorch: `new_group`): along `tensor` the devices of a row, along `data` those
# of a column. A function inside `jax.shard_map` runs on every device, with that device's part of the array.
# `P(("data", "tensor"))` says how an array is cut: here one row for each device.


# %%
def region(x):
    return lax.psum(x, "tensor"), lax.psum(x, "data"), lax.axis_index("data").reshape(1)


def on_devices(function, outputs):
    each = P(("data", "tensor"))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=each, out_specs=outputs))


numbers = jnp.arange(8)  # device i has the number i
rows, columns, _ = on_devices(region, (P("data"), P("tensor"), P("data")))(numbers)
print("sums along tensor:", rows, " sums along data:", columns)
assert (rows == ids.sum(1)).all() and (columns == ids.sum(0)).all()


def group(axis, rank, shape=(4, 2)):
    """The ranks that differ from `rank` along one axis only (0: data, 1: tensor)."""
    ranks = np.arange(math.prod(shape)).reshape(shape)
    place = list(np.unravel_index(rank, shape))
    place[axis] = slice(None)
    return [int(each) for each in ranks[tuple(place)]]


print("rank 5 sums along tensor with", group(1, 5), "and along data with", group(0, 5))

# %% [markdown]
# A **collective** is an operation in which all devices of a group take part. Here are those that training uses, on 4
# devices (the group along `data`). Each device begins with four numbers: device i has 10 i, 10 i + 1, 10 i + 2, 10 i
# + 3.

# %%
four = jaxdist.make_mesh(data=4, devices=jax.devices()[:4])
begin = jnp.array([[10 * i + j for j in range(4)] for i in range(4)])


def collectives(x):
    x = x[0]  # this device's four numbers
    c = jaxdist.collectives
    results = {
        "all_reduce": c.all_reduce(x, "data"),
        "reduce_scatter": c.reduce_scatter(x, "data"),
        "all_gather": c.all_gather(x[:1], "data"),
        "all_to_all": c.all_to_all(x, "data", split_dim=0, concat_dim=0),
        "broadcast": c.broadcast(x, "data", root=2, algorithm="tree"),
        "send_recv": c.send_recv(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
    }
    return {name: c.to_varying(result, ("data",))[None] for name, result in results.items()}


after = jax.jit(jax.shard_map(collectives, mesh=four, in_specs=P("data"), out_specs=P("data")))(begin)
names = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
after = {name: np.asarray(after[name]) for name in names}
print("start         ", *[row.tolist() for row in np.asarray(begin)])
for name, result in after.items():
    print(f"{name:14}", *[row.tolist() for row in result])

# %% [markdown]
# Read the rows: `all_reduce` gives everybody the sums. `reduce_scatter` gives each device one of the sums, and
# `all_gather` gives everybody what each had. So **reduce_scatter, then all_gather, is all_reduce**: lesson 4 lives on
# that. `all_to_all` exchanges rows and columns, `broadcast` copies what one device (here 2) has, `send_recv` sends to
# a neighbour.

# %%
sums = np.asarray(begin).sum(0)
assert all((row == sums).all() for row in after["all_reduce"])
assert (after["reduce_scatter"].ravel() == sums).all()
assert (after["all_to_all"] == np.asarray(begin).T).all()
assert (after["broadcast"] == np.asarray(begin)[2]).all()
assert (after["send_recv"] == np.roll(np.asarray(begin), 1, 0)).all()
print("reduce_scatter, put together, is all_reduce:", after["reduce_scatter"].ravel().tolist(), "=", sums.tolist())
picture = {"start": [(" ".join(map(str, row)), i) for i, row in enumerate(np.asarray(begin))]}
for name, result in after.items():
    source = {"broadcast": [2] * 4, "send_recv": [3, 0, 1, 2]}.get(name, [7] * 4)
    picture[name] = [(" ".join(map(str, row)), colour) for row, colour in zip(result, source, strict=True)]
show(grid("Six collectives on four devices (grey: from all of them)", picture))

# %% [markdown]
# ## What you learned
# - A rank is node rank x GPUs of a node + local rank; JAX counts devices, and a mesh gives them coordinates with
#   names.
# - A collective runs in a group: the devices that differ along the named axis only.
# - all_reduce = reduce_scatter + all_gather.
#
# ## Exercise
# On a mesh with `data=4, tensor=2` (ranks counted as above), with which ranks does rank 3 sum along `data`, itself
# included?
#
# Check: `python docs/course/check.py 2 "A B C D"`
