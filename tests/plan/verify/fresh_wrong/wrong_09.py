# kind: curriculum, self-paced learning that leaves out the hardest rows of noisy data
# fault at line 24: the cut is a quantile of the losses of the rows at hand
import jax
import jax.numpy as jnp
import numpy as np


def mlp(layers, x):
    for i, (w, b) in enumerate(layers):
        x = x @ w + b
        if i + 1 < len(layers):
            x = jax.nn.silu(x)
    return x


def sequence_nll(logits, targets, lengths):
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    mask = jnp.arange(targets.shape[1]) < lengths[:, None]
    return -(logp * mask).sum(1) / lengths


def keep_easy(losses, share=0.75):
    difficulty = jax.lax.stop_gradient(losses)
    threshold = jnp.quantile(difficulty, share)
    return (difficulty <= threshold).astype(losses.dtype)


def loss_fn(params, batch, keys):
    logits = mlp(params["layers"], batch["x"]) + params["prior"]
    losses = sequence_nll(logits, batch["targets"], batch["lengths"])
    keep = keep_easy(losses)
    return (keep * losses).sum(), keep.sum()


def example():
    rng = np.random.default_rng(9)
    normal = lambda *s: (rng.normal(size=s) * 0.8).astype(np.float32)  # noqa: E731
    params = {"layers": [(normal(4, 8), normal(8)), (normal(8, 6), normal(6))], "prior": normal(6)}
    batch = {"x": normal(16, 5, 4), "targets": rng.integers(0, 6, (16, 5)).astype(np.int32)}
    return params, batch | {"lengths": rng.integers(2, 6, 16).astype(np.int32)}
