"""Lesson 3: DataParallel, in which one device gathers everything: python docs/course/03_data_parallel.py"""

# %% [markdown]
# # 3. DataParallel, and why not
#
# **Data parallelism**: every device has a copy of the model and computes other rows of the batch. The oldest form of
# it is PyTorch's `DataParallel`: one process, in which device 0 is the **master**. In each step it
#
# 1. **replicates** the parameters: sends them to all others;
# 2. **scatters** the batch: sends each its rows;
# 3. lets all compute (**parallel_apply**);
# 4. **gathers** the gradients, adds them, and updates the parameters alone.
#
# We write it by hand, and count what each device sends and receives.

# %%
from collections import Counter

import jax
import jax.numpy as jnp
import optax
from _course import bars, devices, show

import jaxdist
from jaxdist.plan.traced.rounds import rounds_of

N, WIDTH, ROWS = 4, 128, 64
four = devices()[:N]
sent, received = Counter(), Counter()


def send(tree, source, target):
    """A tree of arrays from one device to another, counted."""
    if source != target:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        sent[source] += size
        received[target] += size
    return jax.device_put(tree, four[target])


def loss(params, x, y):
    return ((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2).mean()


make = jax.random.normal
params = {"up": make(jax.random.key(0), (WIDTH, WIDTH)) / 12, "down": make(jax.random.key(1), (WIDTH, WIDTH)) / 12}
params = jax.device_put(params, four[0])
batch = jax.device_put((make(jax.random.key(2), (ROWS, WIDTH)), make(jax.random.key(3), (ROWS, WIDTH))), four[0])
adam = optax.adam(1e-3)
state = adam.init(params)
grad = jax.jit(jax.grad(loss))

# %%
replicas = [send(params, 0, i) for i in range(N)]  # 1. replicate
shares = [[jnp.split(part, N)[i] for part in batch] for i in range(N)]
shares = [send(share, 0, i) for i, share in enumerate(shares)]  # 2. scatter
grads = [grad(replica, *share) for replica, share in zip(replicas, shares, strict=True)]  # 3. parallel_apply
gathered = [send(each, i, 0) for i, each in enumerate(grads)]  # 4. gather
total = jax.tree.map(lambda *each: sum(each) / N, *gathered)
expected = grad(params, *batch)
error = max(float(abs(total[name] - expected[name]).max() / abs(expected[name]).max()) for name in params)
print(f"the gradient is that of the whole batch: {error < 1e-5}")
assert error < 1e-5

# %% [markdown]
# It is right. But look at who works. We add up the arrays of this step on each device (an array that has two names,
# once).

# %%
buffers = {}
for array in jax.tree.leaves((replicas, shares, grads, gathered, total, state)):
    (device,) = array.devices()
    buffers[device.id, array.unsafe_buffer_pointer()] = array.nbytes
held = Counter()
for (device, _), nbytes in buffers.items():
    held[device] += nbytes
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(f"parameters: {size / 1024:.0f} KiB")
for i in range(N):
    kib = [counter[i] / 1024 for counter in (sent, received, held)]
    print(f"device {i}: sends {kib[0]:4.0f} KiB, receives {kib[1]:4.0f} KiB, holds {kib[2]:5.0f} KiB")
assert received[0] == (N - 1) * size and held[0] > 2 * held[1]

# %% [markdown]
# The master receives the gradients of all others: with P devices and N bytes of parameters, **(P-1) N**. Each added
# device adds work to the one that is already the slowest. The others have one copy and wait.
#
# "Balanced" DataParallel lets each device compute its own loss, as we did here; the plain form even gathers the
# outputs and computes the loss on the master, which needs more memory there.
#
# Now the same exchange as a collective. jaxdist has it for comparison: `algorithm="master_worker"`. `rounds_of` reads
# all messages from the program, without running it.


# %%
def master_receives(devices, size):
    """Bytes that the master receives in one all-reduce of `size` bytes."""
    return (devices - 1) * size


def traffic(algorithm):
    """Bytes that each device sends and receives, in all rounds together."""
    array = jax.ShapeDtypeStruct((size // 4,), jnp.float32)
    rounds = rounds_of(
        lambda x: jaxdist.collectives.all_reduce(x, "data", algorithm=algorithm), array, mesh={"data": N}
    )
    both = Counter()
    for message in (message for messages in rounds for message in messages):
        both[message.source, "sends"] += message.nbytes
        both[message.target, "receives"] += message.nbytes
    return both


rows = {}
for algorithm in ("master_worker", "ring"):
    both = traffic(algorithm)
    for i in range(N):
        rows[f"{algorithm} {i}"] = {way: both[i, way] / 1024 for way in ("sends", "receives")}
    first, second = (both[i, "receives"] / size for i in (0, 1))
    print(f"{algorithm:13}: device 0 receives {first:.2f} N, device 1 {second:.2f} N")
    assert algorithm == "ring" or both[0, "receives"] == master_receives(N, size)

show(bars("What a device sends and receives in one all-reduce (4 devices)", rows, "KiB"))

# %% [markdown]
# The second line is another algorithm for the same sum. Nobody is the master, and everybody receives the same. It is
# lesson 4.
#
# ## What you learned
# - Data parallelism: the same parameters on every device, other rows of the batch, gradients added.
# - DataParallel does it through one device, which receives (P-1) N bytes, holds all gradients and updates alone.
# - So it gets worse with every device that you add.
#
# ## Exercise
# ViT-Base has 86 million parameters, and its gradients are in half precision (2 bytes each). How many MB (10^6 bytes)
# does the master receive in a step with 8 devices?
#
# Check: `python docs/course/check.py 3 ANSWER`
