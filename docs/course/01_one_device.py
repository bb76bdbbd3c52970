"""Lesson 1: what fills the memory of one device, and three remedies: python docs/course/01_one_device.py"""

# %% [markdown]
# # 1. One device, its memory and its remedies
#
# A **device** is a GPU, or, in this course, a simulated one. Training fills its memory with four things:
#
# - **parameters**: the numbers that are learned;
# - **gradients**: for each parameter, in which direction the loss falls;
# - **optimizer state**: what the update rule remembers. Adam remembers two numbers for each parameter;
# - **activations**: values of the forward pass that the backward pass reads again.
#
# The first three have the size of the model. Activations grow with the **batch**, the rows that are computed
# together.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _course import bars, devices, show

devices()
LAYERS, WIDTH, ROWS = 8, 64, 256
keys = jax.random.split(jax.random.key(0), LAYERS)
params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def layer(h, kernel):
    return jnp.tanh(h @ kernel)


def loss(params, x):
    for kernel in params:
        x = layer(x, kernel)
    return (x**2).mean()


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# %% [markdown]
# `jax.vjp` runs the forward pass and returns the backward pass, with all that it reads. `jax.eval_shape` does it
# without computing: we only count bytes. The parameters are read too; the part that grows with the batch are the
# activations.


# %%
def activation_bytes(loss, params, rows):
    def kept(rows):
        batch = jax.ShapeDtypeStruct((rows, WIDTH), jax.tree.leaves(params)[0].dtype)
        return nbytes(jax.eval_shape(lambda params, x: jax.vjp(loss, params, x)[1], params, batch))

    return kept(2 * rows) - kept(rows)


model = nbytes(params)
memory = {
    "parameters": model,
    "gradients": nbytes(jax.eval_shape(jax.grad(loss), params, x)),
    "optimizer": nbytes(jax.eval_shape(optax.adam(1e-3).init, params)),
    "activations": activation_bytes(loss, params, ROWS),
}
for name, size in memory.items():
    print(f"{name:12} {size / 1024:6.0f} KiB = {size / model:.1f} x the parameters")
assert memory["gradients"] == model and round(memory["optimizer"] / model) == 2

# %% [markdown]
# **Remedy 1, accumulation.** Compute 4 small batches one after the other, add their gradients, divide by 4, and
# update once. (A small batch is called a **microbatch**.) The gradient is that of the large batch; the activations
# are a quarter.

# %%
grad = jax.jit(jax.grad(loss))
whole = jax.grad(loss)(params, x)
parts = [grad(params, part) for part in jnp.split(x, 4)]
summed = jax.tree.map(lambda *each: sum(each) / 4, *parts)
error = max(float(abs(a - b).max() / abs(a).max()) for a, b in zip(whole, summed, strict=True))
accumulated = activation_bytes(loss, params, ROWS // 4)
print(f"accumulation: {accumulated / 1024:.0f} KiB of activations; gradients are equal: {error < 1e-5}")
assert error < 1e-5 and accumulated * 4 == memory["activations"]

# %% [markdown]
# **Remedy 2, rematerialisation** (PyTorch: gradient checkpointing). Keep only the input of each pair of layers, and
# compute the pair again in the backward pass. It costs up to one more forward pass.


# %%
def remat_loss(params, x):
    pair = jax.checkpoint(lambda x, first, second: layer(layer(x, first), second))
    for i in range(0, LAYERS, 2):
        x = pair(x, params[i], params[i + 1])
    return (x**2).mean()


again = activation_bytes(remat_loss, params, ROWS)
close = np.allclose(jax.jit(jax.grad(remat_loss))(params, x)[0], whole[0], rtol=1e-4, atol=1e-7)
print(f"remat:        {again / 1024:.0f} KiB of activations; gradients are equal: {close}")
assert close and again < memory["activations"]

# %% [markdown]
# **Remedy 3, mixed precision.** Compute in a number type of 2 bytes, bfloat16, in place of 4. Activations are half.
# Lesson 5 says what is lost.

# %%
half = activation_bytes(loss, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), ROWS)
print(f"bfloat16:     {half / 1024:.0f} KiB of activations")
assert half * 2 == memory["activations"]


# %% [markdown]
# The state of Adam in fp32 (numbers of 4 bytes) is therefore 16 bytes a parameter, whatever the model:


# %%
def state_bytes(parameters):
    """Parameters, gradients and the two memories of Adam, 4 bytes each."""
    return parameters * (4 + 4 + 4 + 4)


assert abs(state_bytes(LAYERS * WIDTH**2) - sum(memory[name] for name in ("parameters", "gradients", "optimizer"))) <= 8
print(f"state of 86 million parameters (ViT-Base): {state_bytes(86e6) / 1e9:.2f} GB")
rows = {"as it is": memory}
for name, size in {"accumulation": accumulated, "remat": again, "bfloat16": half}.items():
    rows[name] = memory | {"activations": size}
kib = {name: {part: size / 1024 for part, size in row.items()} for name, row in rows.items()}
show(bars("Memory of one device, with one remedy at a time", kib, "KiB"))

# %% [markdown]
# ## What you learned
# - Memory is parameters + gradients + optimizer state + activations; with Adam in fp32 the first three are 16 bytes a
#   parameter.
# - Activations grow with the batch: accumulation, rematerialisation and 2-byte numbers make them smaller.
# - The three remedies need one device only. Try them before you buy a second one.
#
# ## Exercise
# A model has 7 billion parameters and is trained by Adam in fp32. How many GB (10^9 bytes) are parameters, gradients
# and optimizer state together?
#
# Check: `python docs/course/check.py 1 ANSWER`
