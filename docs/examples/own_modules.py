"""A Flax NNX module with BatchNorm and dropout, on 8 devices under ZeRO-3: python docs/examples/own_modules.py"""

import jax, numpy as np, optax  # noqa: E401, I001
from flax import nnx
import jaxdist

jax.config.update("jax_num_cpu_devices", 8)  # eight simulated devices; ignored on GPUs
mesh, adamw, rng = jaxdist.make_mesh(fsdp=-1), optax.adamw(1e-2), np.random.default_rng(0)
x = rng.normal(size=(64, 8)).astype(np.float32)
batch = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 2, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(32, momentum=0.9, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def classify(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.sum(), losses.size, {"accuracy": ((logits.argmax(-1) == batch["y"]).sum(), losses.size)}


model = Net(nnx.Rngs(0))
loss = jaxdist.nnx_loss(model, classify)
state = jaxdist.init_state(loss, adamw, mesh, strategy="zero3")
step = jaxdist.make_train_step(loss, adamw, mesh, strategy="zero3")
for _ in range(60):
    state, metrics = step(state, batch)
print(f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}")
jaxdist.nnx_update(model, state).eval()  # trained parameters and running statistics, in the module again
print(f"with running statistics: accuracy {(model(x).argmax(-1) == batch['y']).mean():.3f}")
