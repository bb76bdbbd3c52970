# kind: CTC, forward dynamic programme over time, padded frames and labels, weight = number of labels
import jax
import jax.numpy as jnp
import numpy as np

NEG = -1e5


def extend(labels):
    """[L] -> [2L + 1], blanks (0) in between"""
    out = jnp.zeros(2 * labels.shape[0] + 1, labels.dtype)
    return out.at[1::2].set(labels)


def ctc_row(logp, frames, labels, length):
    ext = extend(labels)
    size = ext.shape[0]
    before = jnp.concatenate([jnp.full(2, -1, ext.dtype), ext[:-2]])
    skip = (ext != 0) & (ext != before)
    alpha = jnp.full(size, NEG, logp.dtype).at[0].set(logp[0, 0]).at[1].set(logp[0, ext[1]])

    def step(alpha, inputs):
        t, lp = inputs
        pad = lambda n: jnp.concatenate([jnp.full(n, NEG, alpha.dtype), alpha[: size - n]])  # noqa: E731
        paths = jnp.stack([alpha, pad(1), jnp.where(skip, pad(2), NEG)])
        new = jax.nn.logsumexp(paths, axis=0) + lp[ext]
        return jnp.where(t < frames, new, alpha), None

    alpha, _ = jax.lax.scan(step, alpha, (jnp.arange(1, logp.shape[0]), logp[1:]))
    return -jnp.logaddexp(alpha[2 * length], alpha[2 * length - 1])


def loss_fn(params, batch, keys):
    x = batch["audio"]
    real = (jnp.arange(x.shape[1]) < batch["frames"][:, None])[..., None]
    mean = (x * real).sum(1, keepdims=True) / batch["frames"][:, None, None]  # over time, of each utterance
    h = jnp.tanh((x - mean) @ params["w1"])
    logp = jax.nn.log_softmax(h @ params["w2"])
    losses = jax.vmap(ctc_row)(logp, batch["frames"], batch["labels"], batch["length"])
    return losses.sum(), batch["length"].sum()


def example():
    rng = np.random.default_rng(102)
    normal = lambda *s: (rng.normal(size=s) * 0.6).astype(np.float32)  # noqa: E731
    labels, length = rng.integers(1, 5, (16, 4)).astype(np.int32), rng.integers(1, 5, 16).astype(np.int32)
    labels[np.arange(4) >= length[:, None]] = 0
    batch = {"audio": normal(16, 12, 3), "frames": rng.integers(9, 13, 16).astype(np.int32)}
    return {"w1": normal(3, 8), "w2": normal(8, 5)}, batch | {"labels": labels, "length": length}
