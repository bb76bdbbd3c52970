"""Lesson 8: pipeline parallelism, its bubble and its memory: python docs/course/08_pipeline.py"""

# %% [markdown]
# # 8. Pipeline
#
# **Pipeline parallelism** gives each device some of the layers, a **stage**. A device sends its activations to the
# next one, once a microbatch: few bytes, also over slow links. But while the first microbatch is in stage 0, the
# other stages have nothing to do.
#
# By hand: p stages, one layer each, m microbatches. In tick t, stage s computes microbatch t - s, and `ppermute`
# passes the result on. After m + p - 1 ticks the last microbatch has left the last stage.

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
from jaxdist.parallel.schedules import gpipe, one_f_one_b
from jaxdist.plan.report.timeline import simulate, table_text

devices()
STAGES, MICRO, WIDTH = 4, 6, 16
mesh = jaxdist.make_mesh(pipe=STAGES, devices=jax.devices()[:STAGES])
kernels = jax.random.normal(jax.random.key(0), (STAGES, WIDTH, WIDTH)) / WIDTH**0.5
micro = jax.random.normal(jax.random.key(1), (MICRO, 2, WIDTH))


def pipeline(kernel, micro):
    kernel, stage = kernel[0], lax.axis_index("pipe")
    right = [(i, i + 1) for i in range(STAGES - 1)]
    h = outputs = jaxdist.collectives.to_varying(jnp.zeros((2, WIDTH)), ("pipe",))
    outputs = []
    for tick in range(MICRO + STAGES - 1):
        h = jnp.where(stage == 0, micro[min(tick, MICRO - 1)], h)  # the first stage reads a microbatch
        h = jnp.tanh(h @ kernel)
        outputs.append(h)
        h = lax.ppermute(h, "pipe", right)
    return jnp.stack(outputs[STAGES - 1 :])[None]  # right on the last stage


def sequential(kernels, micro):
    for kernel in kernels:
        micro = jnp.tanh(micro @ kernel)
    return micro


piped = jax.shard_map(pipeline, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P("pipe"))
forward = jax.jit(lambda kernels: piped(kernels, micro)[-1])
gradient = jax.jit(jax.grad(lambda kernels: (piped(kernels, micro)[-1] ** 2).sum()))(kernels)
expected = jax.grad(lambda kernels: (sequential(kernels, micro) ** 2).sum())(kernels)
same = np.allclose(forward(kernels), sequential(kernels, micro), atol=1e-5), np.allclose(gradient, expected, atol=1e-4)
print("pipeline by hand = one device after the other: outputs", same[0], "gradients", same[1])
assert all(same)

# %% [markdown]
# `jax.grad` runs the pipeline backward as well: from the last stage to the first. This is **GPipe**: all forwards,
# then all backwards. jaxdist has a table of each schedule; F is forward, B backward, numbers are microbatches.

# %%
print(table_text(gpipe.table(STAGES, MICRO)))


# %% [markdown]
# The dots are the **bubble**. Of m + p - 1 ticks forward a stage works in m, and backward the same. So it waits for
# **(p - 1) / (m + p - 1)** of the time. We compare this with the table, in which B costs twice as much as F.


# %%
def bubble(stages, microbatches):
    """The part of the time in which a stage waits."""
    return (stages - 1) / (microbatches + stages - 1)


for m in (1, 6, 24):
    found = simulate(gpipe.table(STAGES, m)).bubble
    print(f"{STAGES} stages, {m:2} microbatches: bubble {found:.1%}")
    assert np.isclose(found, bubble(STAGES, m))

# %% [markdown]
# More microbatches, less bubble. But GPipe keeps the activations of *all* m microbatches until their backward passes.
# **1F1B** (one forward, one backward) starts the backward pass of a microbatch as soon as it has left the last stage:

# %%
print(table_text(one_f_one_b.table(STAGES, MICRO)))
for m in (6, 24):
    kept = {name: simulate(table(STAGES, m)) for name, table in (("gpipe", gpipe.table), ("1F1B", one_f_one_b.table))}
    each = ", ".join(f"{name} keeps {line.most_live[0]} (bubble {line.bubble:.1%})" for name, line in kept.items())
    print(f"{m} microbatches: stage 0 of {each}")
    assert kept["gpipe"].most_live[0] == m and kept["1F1B"].most_live[0] == min(m, 2 * STAGES - 1)
    assert np.isclose(kept["gpipe"].bubble, kept["1F1B"].bubble)

# %% [markdown]
# The same bubble, but 1F1B keeps at most 2p - 1 microbatches here, however many there are. (In the papers p: there a
# tick has either an F or a B, here it may have both.) Now a model of jaxdist's in both schedules. The pipeline is an
# argument of the step.


# %%
class Part(nnx.Module):  # embedding and head, with one parameter each
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))


class Embed(Part):
    def __call__(self, batch, keys):
        return batch["x"] * self.scale[...]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h, keys):
        return h + jnp.tanh(self.linear(h))


class Head(Part):
    def __call__(self, h, batch, embed):
        return ((h * self.scale[...] - 1) ** 2).sum(), h.shape[0]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = Embed(rngs), Head(rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(STAGES)])


model, sgd = jaxdist.model_def(Model), optax.sgd(1e-3)
batch = {"x": jax.random.normal(jax.random.key(2), (12, WIDTH))}
losses = {}
for name, sizes, schedule in (("one device", {}, "accumulate"), ("1F1B", {"pipe": STAGES}, "one_f_one_b")):
    where = jaxdist.make_mesh(**sizes, devices=jax.devices()[: sizes.get("pipe", 1)])
    state = jaxdist.init_state(model, sgd, where)
    step = jaxdist.make_train_step(model, sgd, where, schedule=schedule, microbatches=MICRO)
    losses[name] = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses[name].append(float(metrics["loss"]))
    print(f"{name:10}: losses {losses[name][0]:.2f} {losses[name][1]:.2f}")
assert np.allclose(losses["one device"], losses["1F1B"], rtol=1e-5)

rows = {}
for name, ticks in (("gpipe", gpipe.table(STAGES, 4)), ("1F1B", one_f_one_b.table(STAGES, 4))):
    for stage in range(STAGES):
        cells = []
        for f, b in zip(ticks.forward[:, stage, 0], ticks.backward[:, stage, 0], strict=True):
            text = " ".join([f"F{f}"] * int(f >= 0) + [f"B{b}"] * int(b >= 0))
            cells.append((text, -1 if not text else 0 if b < 0 else 2 if f < 0 else 4))
        rows[f"{name}, stage {stage}"] = cells
show(grid("4 stages, 4 microbatches, tick by tick (grey: waiting)", rows))

# %% [markdown]
# ## What you learned
# - A pipeline sends few bytes and waits: the bubble is (p - 1) / (m + p - 1), so m should be several times p.
# - GPipe keeps m microbatches of activations; 1F1B keeps a number that does not grow with m, with the same bubble.
# - The result is that of one device, in any schedule.
#
# ## Exercise
# With 4 stages, what is the smallest number of microbatches with a bubble of at most 10 %?
#
# Check: `python docs/course/check.py 8 ANSWER`
