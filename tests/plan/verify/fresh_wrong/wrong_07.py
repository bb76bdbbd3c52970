# kind: image classification with random shift and brightness augmentation
# fault at line 31: the augmentation key of a row is made of its place among the rows at hand (and a fixed seed)
import jax
import jax.numpy as jnp
import numpy as np


def random_shift(key, image, pad=2):
    height, width, channels = image.shape
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode="reflect")
    dy, dx = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    return jax.lax.dynamic_slice(padded, (dy, dx, 0), (height, width, channels))


def augment(key, image):
    k1, k2, k3 = jax.random.split(key, 3)
    image = random_shift(k1, image)
    image = jnp.where(jax.random.bernoulli(k2), image[:, ::-1], image)
    return image * jax.random.uniform(k3, (), image.dtype, 0.7, 1.3)


def patches(image, size=3):
    height, width, channels = image.shape
    image = image.reshape(height // size, size, width // size, size, channels)
    return image.transpose(0, 2, 1, 3, 4).reshape(-1, size * size * channels)


def loss_fn(params, batch, keys):
    images = batch["image"]
    base = jax.random.key(1234)
    row_keys = jax.vmap(lambda i: jax.random.fold_in(base, i))(jnp.arange(images.shape[0]))
    tokens = jax.vmap(lambda k, im: patches(augment(k, im)))(row_keys, images)
    h = jax.nn.gelu(tokens @ params["embed"] + params["pos"])
    logits = h.mean(1) @ params["head"]
    logp = jax.nn.log_softmax(logits)
    losses = -(0.9 * jnp.take_along_axis(logp, batch["label"][:, None], 1)[:, 0] + 0.1 * logp.mean(-1))
    return losses.sum(), losses.size


def example():
    rng = np.random.default_rng(7)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    params = {"embed": normal(9, 8), "pos": normal(9, 8), "head": normal(8, 4)}
    return params, {"image": normal(16, 9, 9, 1), "label": rng.integers(0, 4, 16).astype(np.int32)}
