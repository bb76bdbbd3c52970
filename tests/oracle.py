"""A GPT written apart from jaxdist, on one device: no shard_map, no psum, no modules. What every layout must agree
with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


def drawn(shapes: PyTree) -> PyTree:
    """Parameters of these shapes and dtypes: no bias at 0 and no scale at 1, so that none can be left out unseen. By
    NumPy, which compiles nothing."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return (0.1 * rng.standard_normal(leaf.shape) + (path[-1].key == "scale")).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def norm(x: jax.Array, params: PyTree, *, eps: float, centre: bool) -> jax.Array:
    if centre:
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * params["scale"]
    return x + params["bias"] if "bias" in params else x


def turns(config: Any) -> list[float]:
    """The frequency of each pair of a head, as Llama 3.1's own code has it (llama_models/llama3/model.py)."""
    found, width = [], config.head_width
    for pair in range(0, width, 2):
        frequency = config.rope_theta ** -(pair / width)
        wavelength = 2 * np.pi / frequency
        if config.rope_type == "linear" or (
            config.rope_type == "llama3" and wavelength > config.rope_positions / config.rope_low
        ):
            frequency /= config.rope_factor
        elif config.rope_type == "llama3" and wavelength > config.rope_positions / config.rope_high:
            smooth = (config.rope_positions / wavelength - config.rope_low) / (config.rope_high - config.rope_low)
            frequency = (1 - smooth) * frequency / config.rope_factor + smooth * frequency
        found.append(frequency)
    return found


def rotate(x: jax.Array, frequencies: list[float], at: jax.Array) -> jax.Array:
    width = x.shape[-1]
    turn = jnp.exp(1j * at[..., None] * np.asarray(frequencies))[:, :, None, :]
    pair = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn.astype(jnp.result_type(x.dtype, jnp.complex64))
    return jnp.concatenate([pair.real, pair.imag], -1).astype(x.dtype)


def linear(x: jax.Array, params: PyTree) -> jax.Array:
    kernel = params["kernel"].reshape(params["kernel"].shape[0], -1)
    y = x @ kernel
    return y + params["bias"].reshape(-1) if "bias" in params else y


def attention(x: jax.Array, params: PyTree, config: Any, starts: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    kv, group = config.kv_heads, config.heads // config.kv_heads
    qkv = linear(x, params["qkv"]["linear"]).reshape(batch, length, kv, group + 2, config.head_width)
    q = qkv[..., :group, :].reshape(batch, length, config.heads, -1)
    k, v = (jnp.repeat(qkv[..., group + i, :], group, axis=2) for i in range(2))
    if config.qk_norm:
        q, k = (norm(y, params[f"{one}_norm"], eps=config.norm_eps, centre=False) for y, one in ((q, "q"), (k, "k")))
    if config.positions == "rope":
        q, k = (rotate(y, turns(config), np.arange(length, dtype=np.int32) - starts) for y in (q, k))
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(q.shape[-1]).astype(x.dtype)
    ago = np.arange(length)[:, None] - np.arange(length)
    own = np.arange(length, dtype=np.int32) >= starts[:, None, :, None]  # not of an earlier document
    seen = (ago >= 0) & (ago < (config.window or length)) & own
    scores = jnp.where(seen, scores, -jnp.inf)
    mixed = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores), v)
    return linear(mixed.reshape(batch, length, -1), params["out"])


def mlp(x: jax.Array, params: PyTree, config: Any) -> jax.Array:
    hidden = linear(x, params["up"])
    if config.mlp == "swiglu":
        gate, up = jnp.split(hidden, 2, axis=-1)
        hidden = gate * jax.nn.sigmoid(gate) * up
    else:
        hidden = jax.nn.gelu(hidden, approximate=True)
    return linear(hidden, params["down"])


def loss(params: PyTree, batch: PyTree, config: Any) -> jax.Array:
    """Mean cross-entropy over the weights of the whole batch. `config` is a resolved ModelConfig."""
    embed, head = params["embed"], params["head"]
    # Where the document of each token begins.
    starts = jnp.asarray(batch.get("documents", jnp.zeros_like(batch["inputs"])), jnp.int32)
    options = {"eps": config.norm_eps, "centre": config.norm == "layernorm"}
    h = embed["tokens"]["table"][batch["inputs"]]
    if config.positions == "learned":
        h = h + embed["positions"]["table"][np.arange(h.shape[1], dtype=np.int32) - starts]

    def through(h: jax.Array, block: PyTree) -> tuple[jax.Array, None]:
        h = h + attention(norm(h, block["norm1"], **options), block["attention"], config, starts)
        return h + mlp(norm(h, block["norm2"], **options), block["mlp"], config), None

    h, _ = jax.lax.scan(through, h, params["blocks"])
    table = (embed["tokens"] if config.tied else head["projection"])["table"]
    logits = norm(h, head["norm"], **options) @ table.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weights = batch["weights"].astype(losses.dtype)
    return (losses * weights).sum() / weights.sum()


def error(got: PyTree, want: PyTree) -> float:
    """The largest norm-wise relative error over the leaves."""

    def one(got: Any, want: Any) -> float:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, (got.shape, want.shape)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    return max(jax.tree.leaves(jax.tree.map(one, jax.device_get(got), jax.device_get(want))))
