"""The bare loop: 8 devices under ZeRO-3: python docs/examples/bare_loop.py"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist

jax.config.update("jax_num_cpu_devices", 8)  # eight simulated devices; ignored on GPUs
mesh, adamw = jaxdist.make_mesh(fsdp=-1), optax.adamw(1e-2)
params = {"up": jax.random.normal(jax.random.key(0), (8, 32)) / 8**0.5, "down": jnp.zeros((32, 4))}


def batch_of(step):  # a function of the step: there is no position to save
    x = np.random.default_rng(step).normal(size=(64, 8)).astype(np.float32)
    return {"x": x, "y": x[:, :4].argmax(-1).astype(np.int32)}


def loss(params, batch, keys):  # keys: one random key a row, for dropout
    logits = jax.nn.relu(batch["x"] @ params["up"]) @ params["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = (logits.argmax(-1) == batch["y"]).sum()
    return losses.sum(), losses.size, {"accuracy": (right, losses.size)}


if __name__ == "__main__":
    state = jaxdist.init_state(params, adamw, mesh, strategy="zero3")
    step = jaxdist.make_train_step(loss, adamw, mesh, strategy="zero3")
    before = None
    for i in range(100):
        state, metrics = step(state, batch_of(i))
        if before is not None and i % 25 == 0:  # those of the step before: no device waits for this line
            print(f"step {i}: loss {before['loss']:.3f}, accuracy {before['accuracy']:.2f}")
        before = metrics
