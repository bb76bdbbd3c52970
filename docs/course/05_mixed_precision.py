"""Lesson 5: number types of two bytes, what they lose, and the loss scale: python docs/course/05_mixed_precision.py"""

# %% [markdown]
# # 5. Mixed precision
#
# fp32 numbers have 4 bytes. Two types have 2 bytes, so that activations and messages are half as large, and GPUs
# multiply them faster:
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
from jaxdist.config.sections.precision import LossScale
from jaxdist.precision.policy import Precision

devices()
for name in ("float32", "float16", "bfloat16"):
    info, one = jnp.finfo(name), jnp.ones((), name)
    tiny, near = float(jnp.asarray(1e-8, name)), float(one + jnp.asarray(0.001, name))
    print(f"{name:8}: largest {float(info.max):.3g}, 1e-8 becomes {tiny:.3g}, 1 + 0.001 becomes {near:.4f}")
assert jnp.asarray(1e-8, "float16") == 0 and jnp.asarray(1e-8, "bfloat16") > 0

# %% [markdown]
# **Underflow**: 1e-8 becomes 0 in fp16. Gradients are often that small. Below, a loss gets smaller and smaller, and
# fp16 loses its gradients; the last ones all become 0. The mending: multiply the loss by a large number S, the **loss
# scale**. By the chain rule all gradients are multiplied by S. After the backward pass, divide by S, in fp32.


# %%
params = {name: jax.random.normal(jax.random.key(i), (32, 32)) / 6 for i, name in enumerate(("first", "second"))}
x = jax.random.normal(jax.random.key(2), (64, 32))


def gradients(dtype, factor, scale):
    def loss(params, x):
        squares = (jnp.tanh(x @ params["first"]) @ params["second"]) ** 2
        return squares.mean() * jnp.asarray(factor * scale, dtype)

    grads = jax.grad(loss)(jax.tree.map(lambda leaf: leaf.astype(dtype), params), x.astype(dtype))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) / scale, grads)


errors = {}
for factor in (2.0**-10, 2.0**-12, 2.0**-14):
    right = gradients("float32", factor, 1.0)
    for name, dtype, scale in (
        ("fp16", "float16", 1.0),
        ("fp16 with S", "float16", 2.0**14),
        ("bf16", "bfloat16", 1.0),
    ):
        difference = jax.tree.map(np.subtract, gradients(dtype, factor, scale), right)
        errors[name, factor] = float(optax.global_norm(difference) / optax.global_norm(right))
    each = ", ".join(f"{name} {errors[name, factor]:.1%}" for name in ("fp16", "fp16 with S", "bf16"))
    print(f"loss x {factor:.0e}: gradients differ from fp32 by {each}")
    assert errors["fp16 with S", factor] < errors["bf16", factor] < 0.01
assert errors["fp16", 2.0**-14] == 1  # all of them are 0

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
# **Overflow**: if S is too large, a gradient becomes infinite. Then the step is **skipped**: nothing is updated, and
# S is halved. After many good steps in a row S is doubled. This is a **dynamic** loss scale (PyTorch: `GradScaler`).


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
# jaxdist does all of it with `precision="fp16"`: fp32 parameters, fp16 computing, a dynamic scale. Here with a scale
# that doubles after 3 good steps, and a loss that is too large for it at first. By hand beside it.

# %%
rule = LossScale(mode="dynamic", init_scale=2.0**16, growth_interval=3)
precision = Precision("float32", "float16", "float32", loss_scale=rule)


def loss(params, x, keys):
    rows = (jnp.tanh(x @ params["first"]) @ params["second"]) ** 2
    return (rows.astype(jnp.float32) * 4).sum(), x.shape[0]


mesh, sgd = jaxdist.make_mesh(data=8), optax.sgd(1e-7)
state = jaxdist.init_state(params, sgd, mesh, precision=precision)
step = jaxdist.make_train_step(loss, sgd, mesh, precision=precision)
scale, good, history = 2.0**16, 0, []
for i in range(10):
    before, skipped = state.params["first"] + 0, int(state.guard.skipped)
    state, metrics = step(state, x)
    finite = int(state.guard.skipped) == skipped
    scale, good = next_scale(scale, good, finite, interval=3)
    history.append(finite)
    what = "updated" if finite else "skipped"
    print(f"step {i}: {what}, the next scale is {metrics['loss_scale']:.0f}, by hand {scale:.0f}")
    assert metrics["loss_scale"] == scale and (state.params["first"] == before).all() == (not finite)
assert any(history) and not history[0]
rows = {f"{name}, loss x {factor:.0e}": {"error": 100 * error} for (name, factor), error in errors.items()}
show(bars("How far gradients are from those of fp32, S = 2^14", rows, "%"))

# %% [markdown]
# ## What you learned
# - fp16 lacks range: small gradients become 0, and a loss scale saves them. bf16 has the range and needs no scale.
# - Both lack accuracy: keep master weights in fp32, add many numbers in fp32.
# - A dynamic scale skips a step that overflowed and halves; after many good steps it doubles.
#
# ## Exercise
# A run begins with the scale 65,536, which doubles after 2,000 good steps in a row. Its first 3 steps overflow, then
# 4,000 steps are good. Which scale has the next step?
#
# Check: `python docs/course/check.py 5 ANSWER`
