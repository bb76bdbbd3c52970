"""Lesson 9: several hosts, and what to do when the link between them is slow: python docs/course/09_slow_links.py"""

# %% [markdown]
# # 9. Several hosts and slow links
#
# A **link** is what connects two devices. Inside a host it is fast (NVLink: hundreds of GB/s); between hosts it may
# be a network of 10 Gbit/s, which is 1.25 GB/s. The time of a message is about **bytes / bandwidth**. With a ring
# (lesson 4) of n hosts:

# %%
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _course import bars, devices, show
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.collectives import Link, all_reduce, cost
from jaxdist.plan.traced.rounds import rounds_of

devices()


def ring_seconds(size, hosts, gbit_per_s):
    """Seconds of a ring all_reduce of `size` bytes over links of `gbit_per_s`."""
    return 2 * (hosts - 1) / hosts * size / (gbit_per_s * 1e9 / 8)


def speed_up(compute_s, size, hosts, gbit_per_s):
    """How many times as many samples a second as one host, if nothing is hidden behind the computation."""
    return hosts * compute_s / (compute_s + ring_seconds(size, hosts, gbit_per_s))


# %% [markdown]
# An example from real life: ViT-Base has 86 million parameters; its gradients in 2-byte numbers are 172 MB. One host
# with 8 GPUs computes a step in 0.42 s. What are three such hosts worth?

# %%
size = 86e6 * 2
print(f"the gradients: {size / 1e6:.0f} MB; limit of large n over 10 Gbit/s: {2 * size / 1.25e9:.3f} s")
for gbit in (1, 10, 100):
    seconds, times = ring_seconds(size, 3, gbit), speed_up(0.42, size, 3, gbit)
    print(f"3 hosts over {gbit:3} Gbit/s: {seconds:.3f} s for the ring, {times:.2f} times as fast as one host")
print(f"lecture notes count 0.4 s and the limit of large n: {3 * 0.42 / (0.4 + 0.275):.2f} times as fast")
assert 2 < speed_up(0.42, size, 3, 10) < 2.2 and speed_up(0.42, size, 3, 1) < 1

# %% [markdown]
# Over 1 Gbit/s three hosts are *slower* than one. jaxdist's cost model says the same, and adds a latency for every
# round:

# %%
ring = cost("all_reduce", int(size), 3, algorithm="ring", itemsize=2)
model = ring.seconds(Link(latency_s=0.4e-3, bytes_per_s=1.25e9))
print(f"cost model: {ring.rounds} rounds, {ring.busiest / 1e6:.1f} MB a device, {model:.3f} s")
assert np.isclose(model, ring_seconds(size, 3, 10) + ring.rounds * 0.4e-3, rtol=1e-3)

# %% [markdown]
# **Remedy 1: send less over the slow link.** Two hosts with 4 devices each. A ring over all 8 devices does not know
# hosts. `two_level` adds inside each host first (reduce_scatter), then each device adds *its quarter* with its
# partner in the other host, then the hosts gather inside. We count the bytes that cross from one host to the other.

# %%
array = jax.ShapeDtypeStruct((1024,), jnp.float32)
axes = {"data": 2, "fsdp": 4}  # ranks 0 to 3 are host 0
crossing = {}
for algorithm in ("ring", "two_level"):
    rounds = rounds_of(partial(all_reduce, axis=tuple(axes), algorithm=algorithm), array, mesh=axes)
    bytes_of = Counter()
    for message in (message for messages in rounds for message in messages):
        bytes_of["between" if message.source // 4 != message.target // 4 else "inside"] += message.nbytes
    crossing[algorithm] = {name: bytes_of[name] / 1024 for name in ("between", "inside")}
    print(
        f"{algorithm:9}: {len(rounds):2} rounds, {bytes_of['between']} bytes between hosts, {bytes_of['inside']} inside"
    )
assert crossing["two_level"]["between"] < crossing["ring"]["between"]

# %% [markdown]
# The devices of a host share its link, so these bytes are what takes time.
#
# **Remedy 2: fewer bytes for each number.** `wire_dtype="bfloat16"` sends 2 bytes a number and adds in fp32; `int8`
# sends 1 byte and a scale for every 256 numbers. The error of int8 is kept and added to the next step (**error
# feedback**), so that it averages out:

# %%
mesh = jaxdist.make_mesh(data=8)
big = jax.ShapeDtypeStruct((16384,), jnp.float32)
wire = {}
for dtype in (None, "bfloat16", "int8"):
    sum_on_wire = partial(all_reduce, axis="data", algorithm="ring", wire_dtype=dtype)
    rounds = rounds_of(sum_on_wire, big, mesh={"data": 8})
    sent = sum(message.nbytes for messages in rounds for message in messages if message.source == 0)
    wire[dtype or "float32"] = sent
print("a device sends:", ", ".join(f"{name} {sent / wire['float32']:.3f}" for name, sent in wire.items()), "of fp32")
assert wire["bfloat16"] * 2 == wire["float32"] and wire["int8"] < 0.26 * wire["float32"]


def region(x, lost):
    total, lost = jaxdist.collectives.all_reduce_with_feedback(x[0], lost[0], "data", op="mean")
    return total[None], lost[None]


reduce = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
x = jax.random.normal(jax.random.key(0), (8, 2048))
lost, added, errors = jnp.zeros_like(x), 0.0, {}
for number in range(1, 33):  # the same gradients again and again: the mean of what was sent approaches the truth
    mean, lost = reduce(x, lost)
    added = jax.block_until_ready(added + mean[0])
    errors[number] = float(abs(added / number - x.mean(0)).max())
print(f"int8 with error feedback: error {errors[1]:.3f} after 1 step, {errors[32]:.4f} after 32")
assert errors[32] < errors[1] / 10

# %% [markdown]
# **Remedy 3: send less often.** Accumulate (lesson 1) before each all_reduce: the same bytes for more samples. And
# **remedy 4**, lesson 10: put what sends much inside a host. Which link a collective takes, the ledger says before
# any run; here a host has 4 of 8 devices, `fsdp` is inside, `data` between:

# %%


def loss(params, x, keys):
    return ((x @ params["w"]) ** 2).sum(), x.shape[0]


params, sgd, mesh = {"w": jnp.ones((256, 64))}, optax.sgd(0.1), jaxdist.make_mesh(data=2, fsdp=4)
step = jaxdist.make_train_step(loss, sgd, mesh, strategy="zero3")
state = jaxdist.init_state(params, sgd, mesh, strategy="zero3")
found = jaxdist.ledger(step, state, jnp.ones((8, 256)), devices_per_host=4)
links = found.total("link")
for name, sent in links.items():
    print(f"{name}: a device sends {sent / 1024:.0f} KiB a step")
assert links["inside a host"] > 4 * links["between hosts"]
rows = {"1 Gbit/s": 1, "10 Gbit/s": 10, "10, int8": 10 * 1024 / 260 / 2, "100 Gbit/s": 100}
times = {name: {"computing": 0.42, "ring": ring_seconds(size, 3, gbit)} for name, gbit in rows.items()}
show(bars("Seconds of a step of ViT-Base on 3 hosts", times, "s"))

# %% [markdown]
# These seconds are calculated. `python scripts/bench/slow_links.py` measures them on one machine with virtual hosts
# (root, Linux).
#
# ## What you learned
# - Time is bytes / bandwidth (and a latency for each round): calculate before you buy hosts.
# - Keep large traffic inside a host; send fewer bytes a number; send less often.
# - The ledger names the link of every collective before a run.
#
# ## Exercise
# ViT-Huge: 632 million parameters, gradients in 2 bytes, 4 hosts, links of 25 Gbit/s. How many seconds does the ring
# take?
#
# Check: `python docs/course/check.py 9 ANSWER`
