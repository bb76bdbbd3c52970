"""A small classifier on arrays of images, with jaxdist's sources and loader: python docs/examples/classify.py"""

import tempfile  # noqa: I001
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax  # noqa: E401
from jax.sharding import NamedSharding
import jaxdist
from jaxdist.config.schema import DataConfig
from jaxdist.data import load_source, make_eval_loader, make_loader
from jaxdist.specs import BATCH_SPEC

jax.config.update("jax_num_cpu_devices", 4)  # four simulated devices; ignored on GPUs
mesh, adamw = jaxdist.make_mesh(data=-1), optax.adamw(1e-2)
rng, folder = np.random.default_rng(0), Path(tempfile.mkdtemp())
label = rng.integers(0, 4, 2000)  # which quarter of the picture is bright
image = rng.integers(0, 128, (2000, 8, 8), np.uint8)
for i, quarter in enumerate(label):
    image[i, 4 * (quarter // 2) :, 4 * (quarter % 2) :][:4, :4] += 64
np.savez(folder / "quarters.npz", image=image, label=label)

source = load_source(DataConfig(source="images", path=str(folder / "quarters.npz"), held_out=0.1))
options = {"seq_len": 1, "global_batch": 64, "sharding": NamedSharding(mesh, BATCH_SPEC)}
loader = make_loader(source, **options, seed=0)
held_out = make_eval_loader(source, **options, batches=None)


def logits(params, batch):
    x = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32) / 255 - 0.4
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def loss(params, batch, keys):
    each = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch), batch["label"])
    return (each * batch["weights"]).sum(), batch["weights"].sum()


params = {"up": jnp.asarray(rng.normal(size=(64, 32)) / 8, jnp.float32), "down": jnp.zeros((32, 4))}
state = jaxdist.init_state(params, adamw, mesh, strategy="zero3")
step = jaxdist.make_train_step(loss, adamw, mesh, strategy="zero3")
for i in range(100):
    state, metrics = step(state, loader.batch(i))
right = lambda params, batch: ((logits(params, batch).argmax(-1) == batch["label"]) * batch["weights"]).sum()  # noqa: E731
batches = [held_out.batch(i) for i in range(held_out.batches)]
found = sum(float(jax.jit(right)(state.params, batch)) for batch in batches)
print(f"loss {metrics['loss']:.4f}, {found:.0f} of {source.info['held_out']} held-out images right")
