# kind: graph network on graphs flattened to one big graph, segment sums with offsets, DETR-like set loss per graph
import jax
import jax.numpy as jnp
import numpy as np


def flatten(batch):
    b, n = batch["node_mask"].shape
    offset = (jnp.arange(b) * n)[:, None]
    send, receive = (batch["edges"][..., i] + offset for i in (0, 1))
    nodes = batch["nodes"].reshape(b * n, -1)
    graph_of = jnp.repeat(jnp.arange(b), n)
    return nodes, send.reshape(-1), receive.reshape(-1), batch["edge_mask"].reshape(-1), graph_of


def message_pass(w, nodes, send, receive, edge_mask):
    message = jax.nn.relu(nodes[send] @ w["msg"]) * edge_mask[:, None]
    score = jnp.where(edge_mask > 0, (nodes[send] * (nodes[receive] @ w["att"])).sum(-1), -1e9)
    top = jax.ops.segment_max(jax.lax.stop_gradient(score), receive, nodes.shape[0])
    raw = jnp.exp(score - jnp.maximum(top, -1e8)[receive]) * edge_mask
    total = jax.ops.segment_sum(raw, receive, nodes.shape[0])
    weights = raw / jnp.maximum(total, 1e-9)[receive]
    pooled = jax.ops.segment_sum(weights[:, None] * message, receive, nodes.shape[0])
    return nodes + jnp.tanh(pooled)


def chamfer(predicted, targets, target_mask):
    cost = ((predicted[:, :, None] - targets[:, None]) ** 2).sum(-1)
    to_target = jnp.where(target_mask, cost.min(1), 0).sum(-1) / target_mask.sum(-1)
    to_slot = jnp.where(target_mask[:, None], cost, jnp.inf).min(2).mean(-1)
    return to_target + to_slot


def loss_fn(params, batch, keys):
    b = batch["nodes"].shape[0]
    nodes, send, receive, edge_mask, graph_of = flatten(batch)
    step = lambda h, w: (message_pass(w, h, send, receive, edge_mask), None)  # noqa: E731
    h, _ = jax.lax.scan(step, nodes @ params["embed"], params["layers"])
    real = batch["node_mask"].reshape(-1)
    pooled = jax.ops.segment_sum(h * real[:, None], graph_of, num_segments=b)
    pooled = pooled / jax.ops.segment_sum(real, graph_of, num_segments=b)[:, None]
    slots = jnp.einsum("bd,dse->bse", pooled, params["slots"])
    losses = chamfer(slots, batch["targets"], batch["target_mask"])
    return losses.sum(), jnp.ones_like(losses).sum()


def example():
    rng = np.random.default_rng(110)
    normal = lambda *s: (rng.normal(size=s) * 0.6).astype(np.float32)  # noqa: E731
    size = rng.integers(3, 7, 16)
    edges = (rng.integers(0, 1000, (16, 10, 2)) % size[:, None, None]).astype(np.int32)
    batch = {"nodes": normal(16, 6, 4), "edges": edges, "targets": normal(16, 4, 2)}
    batch["node_mask"] = (np.arange(6) < size[:, None]).astype(np.float32)
    batch["edge_mask"] = (np.arange(10) < rng.integers(4, 11, 16)[:, None]).astype(np.float32)
    batch["target_mask"] = np.arange(4) < rng.integers(1, 5, 16)[:, None]
    layers = {"msg": normal(2, 5, 5), "att": normal(2, 5, 5)}
    return {"embed": normal(4, 5), "layers": layers, "slots": normal(5, 3, 2)}, batch
