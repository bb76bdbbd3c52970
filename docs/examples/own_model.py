"""Your own Flax NNX model, and a plain pytree, on 8 devices under ZeRO-3: python docs/examples/own_model.py"""

import jax, jax.numpy as jnp, numpy as np, optax  # noqa: E401, I001
from flax import nnx
import jaxdist

jax.config.update("jax_num_cpu_devices", 8)  # eight simulated devices; ignored on GPUs
mesh = jaxdist.make_mesh(fsdp=-1)  # all devices
adamw, rng = optax.adamw(1e-2), np.random.default_rng(0)
batch = {"x": rng.normal(size=(64, 8)).astype(np.float32), "y": rng.integers(0, 4, 64)}


def cross_entropy(logits, y):  # a loss returns (sum, weight): exact for ragged batches, in every layout
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum(), jnp.float32(y.size)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def plain_loss(params, batch, keys):  # keys: one random key a sample, for dropout
    return cross_entropy(batch["x"] @ params["w"] + params["b"], batch["y"])


plain_params = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
nnx_loss = jaxdist.nnx_loss(MLP(nnx.Rngs(0)), lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]))
for loss_fn, params in ((nnx_loss, nnx_loss), (plain_loss, plain_params)):
    state = jaxdist.init_state(params, adamw, mesh, strategy="zero3")
    step = jaxdist.make_train_step(loss_fn, adamw, mesh, strategy="zero3", microbatches=2)
    for _ in range(30):
        state, metrics = step(state, batch)
    print(f"loss {metrics['loss']:.4f}", [str(x.sharding.spec) for x in jax.tree.leaves(state.params)])
