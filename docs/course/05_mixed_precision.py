"""Lesson 5: number types of two bytes, what they lose, and the loss scale: python docs/course/05_mixed_precision.py"""

# %% [markdown]
# # 5. Mixed precision
#
# fp32 numbers have 4 bytes. Two types have 2 bytes, so that activations and messages are half as large, and GPUs multiply
# them faster:
#
# | | bits of exponent (range) | bits of mantissa (accuracy) |
# |---|---|---|
# | fp32 | 8 | 23 |
# | fp16 (float16) | 5 | 10 |
# | bf16 (bfloat16) | 8 | 7 |
#
# fp16 has little **range**, bf16 little **accuracy**. We look at both losses, and mend them.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _course import bars, devices, show

import jaxdist
from jaxdist.config.precision import LossScale
from jaxdist.precision.policy import Precision

devices()
for name in ("float32", "float16", "bfloat16"):
    info, one = jnp.finfo(name), jnp.ones((), name)
    print(f"{name:8}: largest {float(info.max):.3g}, 1e-8 becomes {float(jnp.asarray(1e-8, name)):.3g}, 1 + 0.001 becomes {float(one + jnp.asarray(0.001, name)):.4f}")
assert jnp.asarray(1e-8, "float16") == 0 and jnp.asarray(1e-8, "bfloat16") > 0

# %% [markdown]
# **Underflow**: 1e-8 becomes 0 in fp16. Gradients are often that small. In the network below most gradients vanish in fp16.
# The mending: multiply the loss by a large number S, the **loss scale**. By the chain rule all gradients are multiplied by S.
# After the backward pass, divide by S, in fp32.


# %%
params = {name: jax.random.normal(jax.random.key(i), (32, 32)) / 6 for i, name in enumerate(("first", "second"))}
x = jax.random.normal(jax.random.key(2), (64, 32))


def small_loss(params, x):
    return ((jnp.tanh(x @ params["first"]) @ params["second"]) ** 2).mean() * jnp.asarray(1e-4, x.dtype)


def gradients(dtype, scale):
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    scaled = jax.grad(lambda p: small_loss(p, x.astype(dtype)) * jnp.asarray(scale, dtype))(narrow)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) / scale, scaled)


def distance(grads):
    """How far from the gradients in fp32, relative to these."""
    right = gradients("float32", 1.0)
    return float(optax.global_norm(jax.tree.map(jnp.subtract, grads, right)) / optax.global_norm(right))


errors, zeros = {}, {}
for name, dtype, scale in (("fp16", "float16", 1.0), ("fp16, S = 4096", "float16", 4096.0), ("bf16", "bfloat16", 1.0)):
    grads = gradients(dtype, scale)
    errors[name] = distance(grads)
    zeros[name] = float(np.mean([np.mean(leaf == 0) for leaf in grads.values()]))
    print(f"{name:15}: {zeros[name]:4.0%} of the gradients are 0, distance from fp32: {errors[name]:.0%}")
assert zeros["fp16"] > 0.3 and zeros["fp16, S = 4096"] < 0.05 and errors["bf16"] < 0.05

# %% [markdown]
# **Small updates**: 1 + 0.001 is 1 in bf16. So a parameter of 1 never moves if it moves by 0.001 a step. Hence
# **master weights**: parameters are kept and updated in fp32, and cast to 2 bytes only to compute.

# %%
master, narrow = jnp.float32(1), jnp.asarray(1, jnp.bfloat16)
for _ in range(1000):
    master, narrow = master + jnp.float32(0.001), narrow + jnp.asarray(0.001, jnp.bfloat16)
print(f"1000 steps of 0.001 from 1: in fp32 {float(master):.2f}, in bf16 {float(narrow):.2f}")
assert abs(master - 2) < 0.01 and narrow == 1

# %% [markdown]
# **Overflow**: if S is too large, a gradient becomes infinite. Then the step is **skipped**: nothing is updated, and S is
# halved. After many good steps in a row S is doubled. This is a **dynamic** loss scale (PyTorch: `GradScaler`).


# %%
def next_scale(scale, good, finite, interval=2000):
    """The scale and the number of good steps after a step."""
    if not finite:
        return scale / 2, 0
    return (scale * 2, 0) if good + 1 == interval else (scale, good + 1)


def scale_after(scale, steps, interval=2000):
    """The scale after steps, of which each was finite (True) or not."""
    good = 0
    for finite in steps:
        scale, good = next_scale(scale, good, finite, interval)
    return scale


# %% [markdown]
# jaxdist does all of it with `precision="fp16"`: fp32 parameters, fp16 computing, a dynamic scale. Here with a scale that doubles
# after 3 good steps, and a loss that is too large for it at first. By hand beside it.

# %%
rule = LossScale(mode="dynamic", init_scale=2.0**16, growth_interval=3)
precision = Precision("float32", "float16", "float32", loss_scale=rule)


def loss(params, x, keys):
    rows = (jnp.tanh(x @ params["first"]) @ params["second"]) ** 2
    return (rows.astype(jnp.float32) * 4000).sum(), x.shape[0]


mesh, sgd = jaxdist.make_mesh(data=8), optax.sgd(1e-7)
state = jaxdist.init_state(params, sgd, mesh, precision=precision)
step = jaxdist.make_train_step(loss, sgd, mesh, precision=precision)
scale, good, history = 2.0**16, 0, []
for i in range(10):
    before = state.params["first"].sum()
    state, metrics = step(state, x)
    skipped = len(history) < 10 and int(metrics["skipped"]) > sum(not finite for _, finite in history)
    history.append((float(metrics["loss_scale"]), not skipped))
    print(f"step {i}: scale {history[-1][0]:8.0f}  {'skipped, nothing changed' if skipped else 'updated'}")
    assert history[-1][0] == scale and (state.params["first"].sum() == before) == skipped
    scale, good = next_scale(scale, good, not skipped, interval=3)
assert any(finite for _, finite in history) and not history[0][1]
show(bars("Gradients that are zero (percent)", {name: {"zero": 100 * share} for name, share in zeros.items()}, "%"))

# %% [markdown]
# ## What you learned
# - fp16 lacks range: small gradients become 0, and a loss scale saves them. bf16 has the range and needs no scale.
# - Both lack accuracy: keep master weights in fp32, add many numbers in fp32.
# - A dynamic scale skips a step that overflowed and halves; after many good steps it doubles.
#
# ## Exercise
# A run begins with the scale 65,536, which doubles after 2,000 good steps in a row. Its first 3 steps overflow, then 4,000 steps
# are good. Which scale has the next step? Check: `python docs/course/check.py 5 ANSWER`
