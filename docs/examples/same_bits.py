"""The same bits on 1, 2, 4 and 8 devices, under ddp and zero3: python docs/examples/same_bits.py

Ten AdamW steps of a small GPT with dropout. Printed: how many 32-bit words of the parameters differ from one device's.
"""

import jax, numpy as np, optax  # noqa: E401, I001
import jaxdist
from jaxdist.config.schema import ModelConfig
from jaxdist.models.gpt import gpt
from jaxdist.optim import clip_by_ordered_norm

jax.config.update("jax_num_cpu_devices", 8)  # eight simulated devices; ignored on GPUs
model = gpt(ModelConfig(layers=2, width=32, heads=4, dropout=0.1), max_length=16)
rng = np.random.default_rng(0)
batches = [
    {
        "inputs": rng.integers(0, 256, (16, 16), np.int32),
        "targets": rng.integers(0, 256, (16, 16), np.int32),
        "weights": np.ones((16, 16), np.float32),
    }
    for _ in range(10)
]


def train(strategy, deterministic, **sizes):
    mesh, sync = jaxdist.make_mesh(**sizes), jaxdist.GradSync(deterministic=deterministic)
    clip = clip_by_ordered_norm if deterministic else optax.clip_by_global_norm
    optimizer = optax.chain(clip(1.0), optax.adamw(1e-2))
    state = jaxdist.init_state(model, optimizer, mesh, strategy=strategy)
    step = jaxdist.make_train_step(model, optimizer, mesh, strategy=strategy, grad_sync=sync)
    for batch in batches:
        state, metrics = step(state, batch)
    words = [np.asarray(leaf).ravel().view(np.uint32) for leaf in jax.tree.leaves(state.params)]
    return np.concatenate(words), float(metrics["loss"])


for deterministic in (True, False):
    print("deterministic" if deterministic else "native sums")
    one, _ = train("ddp", deterministic, data=1)
    for strategy, sizes in (("ddp", {"data": 2}), ("ddp", {"data": 8}), ("zero3", {"data": 2, "fsdp": 2})):
        words, loss = train(strategy, deterministic, **sizes)
        print(f"  {strategy:5} {sizes}: loss {loss:.9g}, {(words != one).sum():,} of {words.size:,} words differ")
