# kind: recurrent tagger with padding, batch-first data given to a time-major scan
# fault at line 25: the scan runs over dim 0, the rows, so the hidden state flows from row to row
import jax
import jax.numpy as jnp
import numpy as np


def gru_cell(p, h, x):
    gates = jax.nn.sigmoid(x @ p["wx"] + h @ p["wh"] + p["b"])
    reset, update = jnp.split(gates, 2, axis=-1)
    new = jnp.tanh(x @ p["cx"] + (reset * h) @ p["ch"])
    return update * h + (1 - update) * new


def encode(p, x, mask):
    """x: [time, batch, features]"""

    def step(h, inputs):
        x_t, m_t = inputs
        new = gru_cell(p, h, x_t)
        h = jnp.where(m_t[:, None], new, h)
        return h, h

    h0 = jnp.zeros((x.shape[1], p["wh"].shape[0]), x.dtype)
    _, hs = jax.lax.scan(step, h0, (x, mask))
    return hs


def loss_fn(params, batch, keys):
    x = params["embed"][batch["tokens"]]
    mask = batch["tokens"] != 0
    hs = encode(params["gru"], x, mask)
    logp = jax.nn.log_softmax(hs @ params["out"])
    nll = -jnp.take_along_axis(logp, batch["tags"][..., None], axis=-1)[..., 0]
    return jnp.where(mask, nll, 0).sum(), mask.sum()


def example():
    rng = np.random.default_rng(3)
    normal = lambda *s: (rng.normal(size=s) * 0.5).astype(np.float32)  # noqa: E731
    gru = {"wx": normal(5, 12), "wh": normal(6, 12), "b": normal(12), "cx": normal(5, 6), "ch": normal(6, 6)}
    tokens = rng.integers(1, 20, (16, 9)).astype(np.int32)
    tokens[np.arange(9) >= rng.integers(3, 10, 16)[:, None]] = 0
    params = {"embed": normal(20, 5), "gru": gru, "out": normal(6, 4)}
    return params, {"tokens": tokens, "tags": rng.integers(0, 4, (16, 9)).astype(np.int32)}
