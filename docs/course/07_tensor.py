"""Lesson 7: tensor parallelism, one layer on several devices: python docs/course/07_tensor.py"""

# %% [markdown]
# # 7. Tensor parallelism
#
# What if one layer is too large, or a step must be faster than one device can be? **Tensor parallelism** splits the
# weights of a layer, and all devices work on the *same* rows. Take the MLP of a transformer, `gelu(x @ up) @ down`.
# There are two ways to split a matrix between t devices:
#
# - by **columns** (column-parallel): each device computes some of the outputs. Every device needs all of x, and
#   nothing is added;
# - by **rows** (row-parallel): each device multiplies some of the inputs. The results are parts of a sum: one
#   all_reduce (`psum`).
#
# Megatron-LM's idea: columns first, then rows. The outputs of the first are just the inputs that the second needs,
# and gelu works number by number. So the pair needs **one psum** forward.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _course import devices, grid, show
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.nn import ColumnParallelLinear, RowParallelLinear

devices()
mesh = jaxdist.make_mesh(data=2, tensor=4)
WIDTH, HIDDEN, ROWS = 16, 64, 8
up = jax.random.normal(jax.random.key(0), (WIDTH, HIDDEN)) / WIDTH**0.5
down = jax.random.normal(jax.random.key(1), (HIDDEN, WIDTH)) / HIDDEN**0.5
x = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))


def mlp(x, up, down):
    return jax.nn.gelu(x @ up) @ down


def split_mlp(x, up_t, down_t):  # up_t: my columns of up; down_t: my rows of down
    return lax.psum(jax.nn.gelu(x @ up_t) @ down_t, "tensor")


specs = (P("data"), P(None, "tensor"), P("tensor", None))
split = jax.shard_map(split_mlp, mesh=mesh, in_specs=specs, out_specs=P("data"))
assert np.allclose(jax.jit(split)(x, up, down), mlp(x, up, down), atol=1e-5)
print("column then row by hand = one device:", np.allclose(jax.jit(split)(x, up, down), mlp(x, up, down), atol=1e-5))
print(
    "a device has up",
    jax.device_put(up, jax.NamedSharding(mesh, specs[1])).addressable_shards[0].data.shape,
    "of",
    up.shape,
)


# %% [markdown]
# Backward, x gets a gradient from every device's columns: one more psum. Nobody has to write it, `jax.grad` finds it.
# We count the psums over `tensor` in the programs. (`jax.make_jaxpr` gives the program as text.)


# %%
def psums(function, *args):
    return sum("tensor" in line and "psum" in line for line in str(jax.make_jaxpr(function)(*args)).splitlines())


def gradient(x, up, down):
    return jax.grad(lambda x: (split(x, up, down) ** 2).sum())(x)


forward, both = psums(split, x, up, down), psums(gradient, x, up, down)
expected = jax.grad(lambda x: (mlp(x, up, down) ** 2).sum())(x)
close = np.allclose(jax.jit(gradient)(x, up, down), expected, atol=1e-4)
print(f"psums over tensor: forward {forward}, forward and backward {both}; the gradient is right: {close}")
assert (forward, both) == (1, 2) and close

# %% [markdown]
# jaxdist has these layers: they know their own split, and a model of them names no axis. Below is a model of two
# blocks. On `tensor=1` it is an ordinary one; on `tensor=4` each device has a quarter of each block. The losses are
# the same.


# %%
class Embed(nnx.Module):
    def __call__(self, batch, keys):
        return batch["x"]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = ColumnParallelLinear(rngs, WIDTH, (HIDDEN,), bias=False)
        self.down = RowParallelLinear(rngs, HIDDEN, WIDTH, bias=False)

    def __call__(self, h, keys):
        return h + self.down(jax.nn.gelu(self.up(h)))


class Head(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, h, batch, embed):
        return ((h * self.scale[...] - batch["x"][..., ::-1]) ** 2).sum(), h.shape[0]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = Embed(), Head(rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])


model, sgd = jaxdist.model_def(Model), optax.sgd(1e-3)
batch = {"x": jax.random.normal(jax.random.key(3), (ROWS, 4, WIDTH))}  # [B, S, D]: rows, positions, width
losses = {}
for sizes in ({"data": 2}, {"data": 2, "tensor": 4}):
    where = jaxdist.make_mesh(**sizes, devices=jax.devices()[: 2 * sizes.get("tensor", 1)])
    state = jaxdist.init_state(model, sgd, where)
    step = jaxdist.make_train_step(model, sgd, where)
    found = jaxdist.ledger(step, state, batch)
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params))
    losses[len(sizes)] = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses[len(sizes)].append(float(metrics["loss"]))
    print(f"{sizes}: losses {losses[len(sizes)][0]:.2f} {losses[len(sizes)][1]:.2f}, a device stores {stored} bytes")
assert np.allclose(losses[1], losses[2], rtol=1e-5)

# %% [markdown]
# The **ledger** lists all collectives of the step before it runs. Over `tensor`:

# %%
over_tensor = [each for each in found.collectives if "tensor" in each.axes]
for each in over_tensor:
    print(f"{each.op} over {'+'.join(each.axes)}, {each.phase}: {each.calls} calls of {each.bytes_per_call} bytes")


def tensor_bytes(activations, tensor, sums):
    """Bytes that a device sends in a block: `sums` ring all_reduces of the activations."""
    return sums * 2 * (tensor - 1) / tensor * activations


activations = ROWS // 2 * 4 * WIDTH * 4  # my rows, positions, width, 4 bytes
blocks = [each for each in over_tensor if each.bytes_per_call == activations]
sent = sum(each.wire_bytes for each in blocks)
formula = 2 * tensor_bytes(activations, 4, 2)  # two blocks, one sum forward and one backward
print(f"activations sent: {sent:.0f} bytes, by the formula {formula:.0f}")
assert sent == formula
picture = {"x (whole)": [("x", 7)] * 4, "up, by columns": [(f"columns of device {i}", i) for i in range(4)]}
picture |= {
    "gelu": [(f"hidden of device {i}", i) for i in range(4)],
    "down, by rows": [(f"rows of device {i}", i) for i in range(4)],
}
picture |= {"psum": [("sum (whole)", 7)] * 4}
show(grid("Column, then row: each device keeps to its colour until the one psum", picture))

# %% [markdown]
# ## What you learned
# - Split by columns, then by rows: one psum forward and one backward for a pair of layers.
# - What is sent are activations, in the middle of every block, while all wait: `tensor` wants the fastest links.
# - A transformer block is two such pairs, attention (split by heads) and MLP: 4 psums in a step.
#
# ## Exercise
# A block's activations are 8 rows x 2048 positions x width 4096 in bf16 (2 bytes), `tensor=4`, all_reduce by a ring.
# How many MiB (2^20 bytes) does a device send in one transformer block, forward and backward?
#
# Check: `python docs/course/check.py 7 ANSWER`
