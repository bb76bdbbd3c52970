"""A Flax module of your own on 8 devices under ZeRO-3: python docs/examples/own_model_short.py"""

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist

jax.config.update("jax_num_cpu_devices", 8)  # eight simulated devices; ignored on GPUs
model = nnx.Sequential(nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 2, rngs=nnx.Rngs(1)))
x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
batches = [{"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}]  # or a generator, a DataLoader, a dataset


def cross_entropy(model, batch):  # (sum, weight) of a device's rows; sharding and sums are jaxdist's
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return losses.sum(), losses.size


loss = jaxdist.nnx_loss(model, cross_entropy)
done = jaxdist.fit(loss, optax.adamw(1e-2), batches, steps=60, mesh=jaxdist.make_mesh(fsdp=-1), strategy="zero3")
print(f"loss {done.metrics['loss']:.4f}, kept in {done.run_dir}")
