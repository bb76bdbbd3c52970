"""BatchNorm with running statistics, and accuracy beside the loss, on 8 devices: python docs/examples/batch_norm.py"""

import jax, jax.numpy as jnp, numpy as np, optax  # noqa: E401, I001
import jaxdist

jax.config.update("jax_num_cpu_devices", 8)  # eight simulated devices; ignored on GPUs
mesh, adamw, rng = jaxdist.make_mesh(data=-1), optax.adamw(1e-2), np.random.default_rng(0)
x = rng.normal(size=(64, 8)).astype(np.float32)
batch = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.int32)}


def logits(params, x, mean, var):
    h = x @ params["up"]
    h = (h - mean(h)) * jax.lax.rsqrt(var(h) + 1e-5) * params["scale"]
    return jax.nn.relu(h) @ params["down"]


def loss_fn(params, batch, keys, state):
    mean = jaxdist.batch_mean  # over all 64 rows, though a device has 8 of them
    var = lambda h: mean((h - mean(h)) ** 2)  # noqa: E731
    out, h = logits(params, batch["x"], mean, var), batch["x"] @ params["up"]
    losses = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
    right = (out.argmax(-1) == batch["y"]).sum()
    state = {"mean": 0.9 * state["mean"] + 0.1 * mean(h), "var": 0.9 * state["var"] + 0.1 * var(h)}
    return losses.sum(), losses.size, {"accuracy": (right, losses.size)}, state


params = {"up": jnp.asarray(rng.normal(size=(8, 32)) / 8**0.5), "scale": jnp.ones(32), "down": jnp.zeros((32, 2))}
statistics = {"mean": jnp.zeros(32), "var": jnp.ones(32)}
state = jaxdist.init_state(params, adamw, mesh, model_state=statistics)
step = jaxdist.make_train_step(loss_fn, adamw, mesh)
for _ in range(60):
    state, metrics = step(state, batch)
print(f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}")
params, running = jax.device_get((state.params, state.model_state))  # for evaluation: the running statistics
out = logits(params, x, lambda h: running["mean"], lambda h: running["var"])
print(f"with running statistics: accuracy {(out.argmax(-1) == batch['y']).mean():.3f}")
