"""A GPT with experts written apart from jaxdist, on one device: every expert computes every token, and what is dropped
is found by comparing all choices of a group with each other."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from layouts import initial, make_batch, optimizer

PyTree = Any


def kept(experts: jax.Array, scores_of_group: int, places: int) -> jax.Array:
    """[B, S, K] whether a choice has a place: fewer than `places` choices of its expert come before it in its group."""
    batch, length, choices = experts.shape
    group = experts.reshape(-1, scores_of_group, choices)
    rank = np.arange(choices)[None, :] * scores_of_group + np.arange(scores_of_group)[:, None]  # first choices first
    flat, rank = group.reshape(len(group), -1), rank.ravel()
    before = (flat[:, None, :] == flat[:, :, None]) & (rank[None, None, :] < rank[None, :, None])
    return (before.sum(-1) < places).reshape(batch, length, choices)


def experts(x: jax.Array, params: PyTree, config: Any, weight_B: jax.Array) -> tuple[jax.Array, PyTree]:
    """(result, (losses of this block, chosen [E], dropped [E]))."""
    moe, router = config.moe, params["router"]
    logits = x @ router["kernel"]
    scores = jax.nn.sigmoid(logits) if moe.scores == "sigmoid" else jax.nn.softmax(logits)
    ranked = scores if moe.bias_rate is None else scores + router["bias"]
    # The k largest, by sorting: the first of equal ones wins in neither.
    chosen = jnp.argsort(-jax.lax.stop_gradient(ranked), axis=-1)[..., : moe.top_k]
    hot = (chosen[..., None] == jnp.arange(moe.experts)).astype(x.dtype)
    gates = (hot * scores[..., None, :]).sum(-1)
    gates = moe.scaling * (gates / gates.sum(-1, keepdims=True) if moe.normalised else gates)
    has_place = jnp.ones(chosen.shape, bool)
    if moe.dispatch == "capacity":
        places = max(1, int(np.ceil(np.float32(moe.group * moe.top_k / moe.experts * moe.factor))))
        has_place = kept(chosen, moe.group, places)

    def mlp(up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jnp.tensordot(x, up, 1)
        if config.mlp == "swiglu":
            return (hidden[..., 0, :] * jax.nn.sigmoid(hidden[..., 0, :]) * hidden[..., 1, :]) @ down
        return jax.nn.gelu(hidden, approximate=True) @ down

    every = jnp.stack(
        [
            mlp(up, down)
            for up, down in zip(params["experts"]["up"]["kernel"], params["experts"]["down"]["kernel"], strict=True)
        ]
    )
    y = jnp.einsum("bske,bsk,ebsd->bsd", hot, gates * has_place, every)
    if moe.shared:
        y = y + oracle.mlp(x, params["shared"], config)
    shares = scores / scores.sum(-1, keepdims=True)
    balance_B = moe.experts / moe.top_k * (hot.sum(2).mean(1) * shares.mean(1)).sum(-1)
    z_B = (jnp.log(jnp.exp(logits).sum(-1)) ** 2).mean(1)
    losses = (weight_B * (moe.balance_loss * balance_B + moe.z_loss * z_B)).sum()
    return y, (losses, hot.sum((0, 1, 2)), (hot * ~has_place[..., None]).sum((0, 1, 2)))


def loss(params: PyTree, batch: PyTree, config: Any) -> tuple[jax.Array, PyTree]:
    """(what is differentiated, (mean cross-entropy, chosen [L, E], dropped [L, E]))."""
    embed, head = params["embed"], params["head"]
    starts = jnp.asarray(batch.get("documents", jnp.zeros_like(batch["inputs"])), jnp.int32)
    options = {"eps": config.norm_eps, "centre": config.norm == "layernorm"}
    h = embed["tokens"]["table"][batch["inputs"]]
    weights = batch["weights"].astype(h.dtype)
    if config.positions == "learned":
        h = h + embed["positions"]["table"][np.arange(h.shape[1], dtype=np.int32) - starts]

    def attended(h: jax.Array, block: PyTree) -> jax.Array:
        return h + oracle.attention(oracle.norm(h, block["norm1"], **options), block["attention"], config, starts)

    for i in range(config.moe.dense):
        block = embed["dense"][i]
        h = attended(h, block)
        h = h + oracle.mlp(oracle.norm(h, block["norm2"], **options), block["mlp"], config)

    def through(h: jax.Array, block: PyTree) -> tuple[jax.Array, PyTree]:
        h = attended(h, block)
        y, found = experts(oracle.norm(h, block["norm2"], **options), block["mlp"], config, weights.sum(1))
        return h + y, found

    h, (losses, chosen, dropped) = jax.lax.scan(through, h, params["blocks"])
    table = (embed["tokens"] if config.tied else head["projection"])["table"]
    logits = oracle.norm(h, head["norm"], **options) @ table.T
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    mean = (entropy * weights).sum() / weights.sum()
    return mean + losses.sum() / weights.sum(), (mean, chosen, dropped)


COUNTED = ("bias", "statistics")  # of a router


def split(params: PyTree) -> tuple[PyTree, PyTree]:
    """(the parameters that are trained, the router's others)."""
    mlp = params["blocks"]["mlp"]
    own = {name: leaf for name, leaf in mlp["router"].items() if name in COUNTED}
    router = {name: leaf for name, leaf in mlp["router"].items() if name not in COUNTED}
    return {**params, "blocks": {**params["blocks"], "mlp": {**mlp, "router": router}}}, own


def joined(trained: PyTree, own: PyTree) -> PyTree:
    mlp = trained["blocks"]["mlp"]
    return {**trained, "blocks": {**trained["blocks"], "mlp": {**mlp, "router": {**mlp["router"], **own}}}}


class Reference(NamedTuple):
    losses: list[float]
    grads: list[Any]  # of trained parameters
    chosen: list[Any]
    dropped: list[Any]
    params: Any


@functools.cache
def reference(config: Any, rows: int, *, documents: bool = False) -> Reference:
    """Three steps on one device by plain optax, and by DeepSeek's rule for the bias."""
    (params, own), tx = split(initial(config, "fp64")), optimizer()

    @jax.jit
    def step(params: Any, own: Any, opt_state: Any, batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            objective = lambda params: loss(joined(params, own), batch, config)  # noqa: E731
            grads, found = jax.grad(objective, has_aux=True)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
        mean, chosen, dropped = found
        if "bias" in own:
            moved = config.moe.bias_rate * jnp.sign(chosen.mean(1, keepdims=True) - chosen)
            own = {**own, "bias": own["bias"] + moved.astype(own["bias"].dtype)}
        return mean, grads, chosen, dropped, optax.apply_updates(params, updates), own, opt_state

    found, opt_state = Reference([], [], [], [], None), jax.jit(tx.init)(params)
    for i in range(3):
        batch = make_batch(rows, i, documents=documents)
        mean, grads, chosen, dropped, params, own, opt_state = step(params, own, opt_state, batch)
        found.losses.append(float(mean))
        for into, value in ((found.grads, grads), (found.chosen, chosen), (found.dropped, dropped)):
            into.append(jax.device_get(value))
    return found._replace(params=jax.device_get(joined(params, own)))
