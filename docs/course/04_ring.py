"""Lesson 4: DDP, and a ring all-reduce of twenty lines: python docs/course/04_ring.py"""

# %% [markdown]
# # 4. DDP and the ring
#
# **DDP** (distributed data parallel): every device has the parameters *and* the optimizer state, computes the
# gradient of its own rows, and all add their gradients by an **all_reduce**. Then each updates its own copy, and all
# copies stay equal. There is no master. What is left is: how do n devices add an array of N bytes with the fewest
# bytes sent?
#
# The **ring**: cut the array into n chunks. In each round a device sends one chunk to its right neighbour, and adds
# the chunk that it gets from the left. After n-1 rounds every device has one chunk with the sum of all: a
# reduce_scatter. In n-1 more rounds the finished chunks go round: an all_gather. `lax.ppermute` sends to a neighbour.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _course import devices, grid, show
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.plan.traced.rounds import rounds_of

devices()


def ring_all_reduce(x, axis):
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    right = [(i, (i + 1) % n) for i in range(n)]
    chunks = x.reshape(n, -1)
    part = chunks[me]
    for step in range(1, n):  # reduce_scatter: the part travels, and each device adds its own chunk
        part = lax.ppermute(part, axis, right) + chunks[(me - step) % n]
    place = (me + 1) % n  # this device has the sum of this chunk
    sums = jnp.zeros_like(chunks).at[place].set(part)
    for step in range(1, n):  # all_gather: finished chunks go round
        part = lax.ppermute(part, axis, right)
        sums = sums.at[(place - step) % n].set(part)
    return sums.reshape(x.shape)


# %%
mesh = jaxdist.make_mesh(data=8)


def three_ways(x):
    x = x[0]
    ways = ring_all_reduce(x, "data"), lax.psum(x, "data"), jaxdist.collectives.all_reduce(x, "data", algorithm="ring")
    return tuple(jaxdist.collectives.to_varying(way, ("data",))[None] for way in ways)


x = jax.random.normal(jax.random.key(0), (8, 64))
run = jax.jit(jax.shard_map(three_ways, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
ours, native, library = map(np.asarray, run(x))
print("ours = JAX's psum:", np.allclose(ours, native, atol=1e-5))
print("ours = jaxdist's ring:", np.allclose(ours, library, atol=1e-5))
assert np.allclose(ours, np.asarray(x).sum(0), atol=1e-5) and np.allclose(ours, library, atol=1e-5)

# %% [markdown]
# How much did each device send? We do not believe a formula, we read it from the program. Each round sends a chunk of
# N/n bytes, and there are 2(n-1) rounds: **2 (n-1)/n N**. That is less than 2 N for any number of devices.


# %%
def ring_bytes(devices, size):
    """Bytes that each device sends in a ring all-reduce of `size` bytes."""
    return 2 * (devices - 1) / devices * size


array = jax.ShapeDtypeStruct((840,), jnp.float32)
size = 840 * 4
for n in (2, 4, 7, 8):
    rounds = rounds_of(lambda x: ring_all_reduce(x, "data"), array, mesh={"data": n})
    sent = sum(message.nbytes for messages in rounds for message in messages if message.source == 0)
    print(f"{n} devices: {len(rounds):2} rounds, a device sends {sent / size:.3f} N = 2 (n-1)/n N")
    assert sent == round(ring_bytes(n, size)) and len(rounds) == 2 * (n - 1)

# %% [markdown]
# Two weak points are left. A round costs time even if it sends nothing, and there are 2(n-1) of them: for small
# arrays and many devices a tree is faster. And all wait for the slowest link: lesson 9.
#
# Now DDP in one function: gradient of my rows, ring, update. Beside it jaxdist's step with the same ring.

# %%
params = {"w": jax.random.normal(jax.random.key(1), (8, 8)) / 3}
batch = jax.random.normal(jax.random.key(2), (64, 8))
sgd = optax.sgd(0.1)


def loss(params, rows, keys=None):
    return ((rows @ params["w"] - rows[:, ::-1]) ** 2).sum(), rows.shape[0]


def ddp(w, rows):  # w: [1, 8, 8], this device's copy
    value, grad = jax.value_and_grad(lambda w: loss({"w": w}, rows)[0])(w[0])
    return (w[0] - 0.1 * ring_all_reduce(grad, "data") / 64)[None], value[None]


step_by_hand = jax.jit(jax.shard_map(ddp, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
sync = jaxdist.GradSync(algorithm="ring")
step = jaxdist.make_train_step(loss, sgd, mesh, strategy="ddp", grad_sync=sync)
state = jaxdist.init_state(params, sgd, mesh, strategy="ddp")
copies = jnp.stack([params["w"]] * 8)
for i in range(3):
    copies, losses = step_by_hand(copies, batch)
    state, metrics = step(state, batch)
    print(f"step {i}: loss by hand {losses.sum() / 64:.2f}, jaxdist {metrics['loss']:.2f}")
    assert np.isclose(losses.sum() / 64, metrics["loss"], rtol=1e-5)
print("all 8 copies are equal:", bool((copies == copies[0]).all()))
assert (copies == copies[0]).all()

# %% [markdown]
# The picture: which chunks are complete (coloured) on each of 4 devices, round by round.

# %%
rows = {}
for done in (0, 3, 4, 6):
    for device in range(4):
        whole = [(device + 1 - k) % 4 for k in range(max(done - 2, 0))]
        row = [(f"chunk {c}: sum", c) if c in whole else (f"chunk {c}", -1) for c in range(4)]
        rows[f"round {done}, device {device}"] = row
show(grid("The ring on 4 devices: after 3 rounds each has one sum, after 6 all", rows))

# %% [markdown]
# ## What you learned
# - DDP: equal copies, other rows, one all_reduce of the gradients a step, no master.
# - The ring is a reduce_scatter and an all_gather: 2(n-1) rounds, 2 (n-1)/n N bytes a device. Nothing sends fewer.
# - Latency grows with n, and the slowest link sets the pace.
#
# ## Exercise
# 16 devices add gradients of 172 MB in a ring. How many MB does each device send?
#
# Check: `python docs/course/check.py 4 ANSWER`
