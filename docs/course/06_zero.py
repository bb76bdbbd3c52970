"""Lesson 6: ZeRO 1 to 3, which shard what DDP copies: python docs/course/06_zero.py"""

# %% [markdown]
# # 6. ZeRO 1 to 3
#
# Under DDP every device stores the same parameters, gradients and optimizer state: 8 devices store them 8 times.
# **ZeRO** (zero redundancy) gives each device one part, a **shard**:
#
# - **ZeRO-1**: each has 1/n of the optimizer state, and updates this part of the parameters only;
# - **ZeRO-2**: also of the gradients: a device keeps 1/n of the sums;
# - **ZeRO-3** (PyTorch: FSDP): also of the parameters: a layer is gathered when it runs, and dropped after it.
#
# By hand first, ZeRO-1 with a momentum (an optimizer that remembers one number a parameter). Lesson 2 said that
# all_reduce = reduce_scatter + all_gather. ZeRO-1 does the update between the two.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _course import bars, devices, quickstart, show
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.config.load import load_config
from jaxdist.plan.explain import explain

devices()
mesh = jaxdist.make_mesh(fsdp=8)
w = jax.random.normal(jax.random.key(0), (64,))
rows = jax.random.normal(jax.random.key(1), (64, 64))


def loss(w, rows):
    return ((rows @ w - 1) ** 2).mean()


def zero1(shard, momentum, rows):  # this device's eighth of parameters and momentum
    w = lax.all_gather(shard, "fsdp", tiled=True)
    grad = lax.psum_scatter(jax.grad(loss)(w, rows), "fsdp", tiled=True) / 8  # the sum of my eighth only
    momentum = 0.9 * momentum + grad
    return shard - 0.01 * momentum, momentum


def ddp(w, momentum, rows):
    momentum = 0.9 * momentum + jax.grad(loss)(w, rows)
    return w - 0.01 * momentum, momentum


by_hand = jax.jit(jax.shard_map(zero1, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp")))
one, eight = (w, jnp.zeros(64)), (w, jnp.zeros(64))
for _ in range(5):
    one, eight = jax.jit(ddp)(*one, rows), by_hand(*eight, rows)
print("ZeRO-1 by hand = one device after 5 steps:", np.allclose(one[0], eight[0], atol=1e-5))
print("momentum of one device:", eight[1].addressable_shards[0].data.shape, "of", eight[1].shape)
assert np.allclose(one[0], eight[0], atol=1e-5)

# %% [markdown]
# Now jaxdist, with Adam. The same model is trained by each strategy: the losses are the same, the bytes of the state
# are not.

# %%
params = {
    "up": jax.random.normal(jax.random.key(2), (32, 256)) / 6,
    "down": jax.random.normal(jax.random.key(3), (256, 32)) / 16,
}
batch, adam = jax.random.normal(jax.random.key(4), (64, 32)), optax.adam(1e-2)


def mlp_loss(params, x, keys):
    return ((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2).sum(), x.shape[0]


def on_one_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


all_losses = {}
for strategy in ("ddp", "zero1", "zero2", "zero3"):
    state = jaxdist.init_state(params, adam, mesh, strategy=strategy)
    step = jaxdist.make_train_step(mlp_loss, adam, mesh, strategy=strategy)
    stored = on_one_device((state.params, state.opt_state))
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    all_losses[strategy] = losses
    print(f"{strategy}: stores {stored / 1024:5.1f} KiB between two steps, losses {losses[0]:.2f} {losses[1]:.2f}")
assert all(np.allclose(each, all_losses["ddp"], rtol=1e-5) for each in all_losses.values())

# %% [markdown]
# Between two steps all three ZeROs store shards only. (In PyTorch's ZeRO-1 and 2 each device keeps whole parameters
# as well; jaxdist gathers them when the step begins.) The difference is *in* the step. `explain` traces a step and
# counts, without running it: a small GPT with 4 microbatches, one after the other.

# %%
table, sent = {}, {}
for strategy in ("ddp", "zero1", "zero2", "zero3"):
    sizes = ["mesh.fsdp=8", "mesh.data=1", "mesh.tensor=1", f"parallel.strategy={strategy}", "parallel.microbatches=4"]
    small = ["data.seq_len=16", "data.global_batch=32", "optimizer.name=adamw", "parallel.prefetch=0"]
    found = explain(load_config(quickstart(), [*sizes, *small]))
    names = ("parameters", "optimizer state", "gathered copies, the whole step", "gradients")
    table[strategy] = {name.partition(",")[0]: found.memory[name] / 1024 for name in names}
    sent[strategy] = found.ledger.wire_bytes / 1024
    each = ", ".join(f"{name} {size:.0f}" for name, size in table[strategy].items())
    print(f"{strategy}: {each} KiB; sends {sent[strategy]:.0f} KiB")


# %% [markdown]
# Read it line by line. ZeRO-1 gathers a copy once a step, and has whole gradients until the end: fewest bytes sent.
# ZeRO-2 adds each microbatch's gradients into the shard: less memory, more sent. ZeRO-3 gathers each block again for
# each microbatch and pass: least memory, most sent. (It is a little more than 1/8: jaxdist does not shard arrays of
# few numbers, such as biases, since a message for each would cost more than it saves.)
#
# With fp32 and Adam (16 bytes a parameter, lesson 1), on n devices:


# %%
def bytes_per_parameter(stage, devices):
    """Bytes of one device for each parameter, while a step runs. ZeRO shards from the last of the three."""
    parts = [4.0, 4.0, 8.0]  # parameters, gradients, optimizer state
    return sum(part / devices if index >= 3 - stage else part for index, part in enumerate(parts))


for stage in range(4):
    print(f"ZeRO-{stage}: {bytes_per_parameter(stage, 8):5.2f} bytes a parameter on 8 devices")
ddp_bytes, zero3_bytes = sum(table["ddp"].values()), sum(table["zero3"].values())
assert abs(zero3_bytes / ddp_bytes - bytes_per_parameter(3, 8) / bytes_per_parameter(0, 8)) < 0.03
assert table["zero2"]["gradients"] < table["zero1"]["gradients"] and sent["zero1"] < sent["zero2"] < sent["zero3"]
show(bars("Memory of one of 8 devices, activations left out", table, "KiB"))

# %% [markdown]
# ## What you learned
# - ZeRO stores each number once, not n times; the training is the same.
# - 1: optimizer state; 2: and gradients; 3: and parameters, gathered a layer at a time.
# - Memory is paid for by bytes sent. Take the lowest stage that fits.
#
# ## Exercise
# 7 billion parameters, fp32, Adam, 8 devices, ZeRO-2 with whole parameters on each device during the step. How many
# GB (10^9 bytes) are parameters, gradients and optimizer state of one device?
#
# Check: `python docs/course/check.py 6 ANSWER`
