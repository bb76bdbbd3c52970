"""Attention that is not causal, key masks and cross-attention, under tensor parallelism and by cuDNN's kernel."""

import functools
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import make_mesh
from jaxdist.nn import Attention, CrossAttention
from jaxdist.nn.attention.kernels import attention, cudnn_attention
from jaxdist.nn.param import specs_of
from jaxdist.specs import map_specs, without_idle

BATCH, LENGTH, OTHER, WIDTH, MEMORY, HEADS, KV_HEADS = 4, 6, 10, 32, 24, 16, 8
# The first sample has no key that may be seen; the second begins with padding, so that its first queries see nothing
# where attention is causal; of the third the end is padding, of the fourth nothing.
SEEN = np.ones((BATCH, OTHER), bool)
SEEN[0], SEEN[1, :3], SEEN[2, 4:] = False, False, False
CASES = {  # (causal, key mask, cross)
    "causal, masked": (True, True, False),
    "both ways": (False, False, False),
    "both ways, masked": (False, True, False),
    "cross": (False, False, True),
    "cross, masked": (False, True, True),
}


def layer_of(case: tuple[bool, bool, bool]) -> Any:
    rngs = nnx.Rngs(0)
    if case[2]:
        return CrossAttention(rngs, WIDTH, MEMORY, HEADS, KV_HEADS, bias=True)
    return Attention(rngs, WIDTH, HEADS, KV_HEADS, bias=True, causal=case[0])


def arrays(name: str) -> Any:
    """(parameters, h, memory, cotangent) in float64."""
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: layer_of(CASES[name])), nnx.Param))
    shapes = [(BATCH, LENGTH, WIDTH), (BATCH, OTHER, MEMORY), (BATCH, LENGTH, WIDTH)]
    params = oracle.drawn(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float64), state))
    rng = np.random.default_rng(1)
    return params, *(rng.normal(size=shape) for shape in shapes)


def written_out(name: str, params: Any, h: jax.Array, memory: jax.Array) -> jax.Array:
    """The same by plain sums: of each query over the keys that it may see."""
    causal, masked, cross = CASES[name]

    def project(x: jax.Array, layer: Any) -> jax.Array:
        return jnp.tensordot(x, layer["kernel"], 1) + layer["bias"]

    if cross:
        q, kv = project(h, params["q"]), project(memory, params["kv"])
        k, v = kv[..., 0, :], kv[..., 1, :]
    else:
        qkv = project(h, params["qkv"]["linear"])
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    allowed = SEEN[:, None, : k.shape[1]] if masked else np.ones((BATCH, 1, k.shape[1]), bool)
    allowed = np.broadcast_to(allowed, (BATCH, LENGTH, k.shape[1]))
    if causal:
        allowed = allowed & np.tril(np.ones((LENGTH, LENGTH), bool))
    scores = jnp.exp(jnp.einsum("bsngk,btnk->bsngt", q, k) / np.sqrt(q.shape[-1]))
    scores = jnp.where(allowed[:, :, None, None, :], scores, 0)
    total = scores.sum(-1, keepdims=True)
    context = jnp.einsum("bsngt,btnk->bsngk", scores / jnp.where(total == 0, 1, total), v)
    return project(context.reshape(BATCH, LENGTH, -1), params["out"])


def by_layer(name: str, tensor: int, params: Any, h: Any, memory: Any, weights: Any) -> Any:
    """(output, gradients of parameters, h and memory) of the layer, its heads split over that many devices."""
    graph, state = nnx.split(nnx.eval_shape(lambda: layer_of(CASES[name])), nnx.Param)
    mesh, masked, cross = make_mesh(tensor=tensor), CASES[name][1], CASES[name][2]
    specs = map_specs(lambda spec: without_idle(spec, mesh), specs_of(state))
    keys = jax.random.split(jax.random.key(0), BATCH)

    def loss(params: Any, h: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        given = (memory, keys) if cross else (keys,)
        seen = jnp.asarray(SEEN[:, : memory.shape[1] if cross else h.shape[1]])
        out = nnx.merge(graph, params)(h, *given, *([seen] if masked else []))
        return (out * weights).sum(), out

    def region(*given: Any) -> Any:
        grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*given)
        return out, grads

    split = (specs, P(), P())
    return jax.shard_map(region, mesh=mesh, in_specs=split, out_specs=(P(), split))(params, h, memory)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 8))])
def test_layers_are_plain_attention(tensor: int) -> None:
    """Outputs and gradients of everything, to 1e-12 in float64. All cases are one program."""
    with jax.enable_x64(True):
        given = {name: arrays(name) for name in CASES}
        got = jax.jit(lambda given: {name: by_layer(name, tensor, *given[name]) for name in CASES})(given)
        for name, (*arguments, weights) in given.items():
            out, pull = jax.vjp(functools.partial(written_out, name), *arguments)
            want = out, pull(jnp.asarray(weights))
            flat, (_, grads) = jax.tree.leaves(want), got[name]
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got[name]))
            for ours, theirs in zip(jax.tree.leaves(got[name]), flat, strict=True):
                assert np.linalg.norm(ours - theirs) <= 1e-12 * max(np.linalg.norm(theirs), 1), name
            if CASES[name][1]:  # sample 0 sees nothing: its output is the bias, and no gradient reaches its h
                np.testing.assert_array_equal(
                    got[name][0][0], np.broadcast_to(given[name][0]["out"]["bias"], (LENGTH, WIDTH))
                )
                assert not np.any(grads[1][0])


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(("causal", "masked", "cross"), CASES.values(), ids=CASES)
def test_cudnn_is_asked_for_the_same(causal: bool, masked: bool, cross: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call, with jax's own path in place of the kernel."""
    call, asked = jax.nn.dot_product_attention, []

    def stand_in(*args: Any, implementation: str, **options: Any) -> jax.Array:
        asked.append(implementation)
        return call(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    length = OTHER if cross else LENGTH
    q, k, v = random(4, LENGTH, 2, 3, 8, seed=0), random(4, length, 2, 8, seed=1), random(4, length, 2, 8, seed=2)
    seen = jnp.asarray(SEEN[:, :length]) if masked else None
    want = attention(q, k, v, jax.random.split(jax.random.key(0), 4), dropout=0.0, causal=causal, seen_BT=seen)
    got = cudnn_attention(q, k, v, causal=causal, seen_BT=seen)
    assert oracle.error(got, want) < 1e-6 and asked == ["cudnn"]
    assert not masked or not np.any(got[0])


@pytest.mark.parametrize(
    ("causal", "masked", "cross", "mask_type"),
    [(True, True, False, "CAUSAL"), (False, False, True, "NO_MASK"), (False, True, True, "NO_MASK")],
)
def test_masks_lower_to_cudnn(
    causal: bool, masked: bool, cross: bool, mask_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lowered for a GPU inside a checked region, and not run."""
    found = SimpleNamespace(cudnn_get_version=lambda: 91000)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", found)
    length = OTHER if cross else LENGTH
    q, k = jnp.zeros((4, LENGTH, 2, 3, 8), jnp.bfloat16), jnp.zeros((4, length, 2, 8), jnp.bfloat16)
    spec = P(None, None, "tensor")

    def region(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> Any:
        of = lambda *qkv: cudnn_attention(*qkv, causal=causal, seen_BT=seen if masked else None)  # noqa: E731
        out, pull = jax.vjp(of, q, k, v)
        return pull(out)

    run = jax.jit(
        jax.shard_map(region, mesh=make_mesh(tensor=2), in_specs=(spec, spec, spec, P()), out_specs=(spec,) * 3)
    )
    text = run.trace(q, k, k, SEEN[:, :length]).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    bias = "ScaleBias" if masked else ""
    names = Counter(match[1] for line in calls if (match := re.search(r"@__cudnn\$(\w+)", line)))
    assert names == {f"fmha{bias}Softmax": 1, f"fmha{bias}SoftmaxBackward": 1}
    assert all(mask_type in line for line in calls)
