"""What one GPU reaches: matrix products by size, memory, elementwise work, attention."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

ROUNDS = 5  # medians of these
# rows, contracted, columns: as in GPT-2 355 M (32 x 1024 tokens), 1.3 B (8 x 2048) and Llama 7 B (2 x 4096)
PRODUCTS = (
    (8192, 8192, 8192),
    *((32768, 1024, columns) for columns in (1024, 3072, 4096, 50304)),
    (32768, 4096, 1024),
    (1024, 32768, 4096),
    *((16384, 2048, columns) for columns in (6144, 8192)),
    (8192, 4096, 22016),
    (8192, 11008, 4096),
)
ATTENTION = ((32, 1024, 16, 64), (8, 2048, 16, 128), (2, 8192, 32, 128))  # rows, length, heads, width of a head


def seconds(function: Callable[..., Any], *given: Any, calls: int = 20) -> float:
    """Of a call, one of many in a row: the median of `ROUNDS`."""
    import jax

    for _ in range(2):
        jax.block_until_ready(function(*given))
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            result = function(*given)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found)


def rates(tiny: bool) -> Iterator[dict[str, Any]]:
    """TFLOP/s of bf16 products and of attention, TB/s of elementwise work, counting bytes read and written."""
    import jax
    import jax.numpy as jnp

    out: dict[str, Any] = {}
    keys = jax.random.split(jax.random.key(0), 3)
    for rows, inner, columns in ((256, 256, 256),) if tiny else PRODUCTS:
        a = jax.random.normal(keys[0], (rows, inner), jnp.bfloat16)
        b = jax.random.normal(keys[1], (inner, columns), jnp.bfloat16)
        flops = 2 * rows * inner * columns
        out[f"product {rows} x {inner} x {columns}, TFLOP/s"] = flops / seconds(jax.jit(jnp.matmul), a, b) / 1e12
        yield out
    flat = jax.random.normal(keys[2], (2**20 if tiny else 2**30,), jnp.float32)
    out["add a number, fp32, TB/s"] = 2 * flat.nbytes / seconds(jax.jit(lambda x: x + 1), flat, calls=5) / 1e12
    stream = jax.random.normal(keys[2], (1024 if tiny else 32768, 1024), jnp.bfloat16)
    for name, function in (("GELU", jax.nn.gelu), ("layer norm", _layer_norm)):
        out[f"{name}, bf16, TB/s"] = 2 * stream.nbytes / seconds(jax.jit(function), stream) / 1e12
    out["an empty call, microseconds"] = seconds(jax.jit(lambda x: x + 1), jnp.zeros(()), calls=100) * 1e6
    yield out
    for shape in ((2, 32, 2, 32),) if tiny else ATTENTION:
        out |= _attention(*shape)
        yield out


def _layer_norm(x: Any) -> Any:
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _attention(rows: int, length: int, heads: int, width: int) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of causal attention, forward and with its backward pass; the masked half not counted."""
    import jax
    import jax.numpy as jnp

    from jaxdist.nn.attention.kernels import attention, cudnn_attention

    q = jax.random.normal(jax.random.key(0), (rows, length, heads, 1, width), jnp.bfloat16)
    k, v = jax.random.normal(jax.random.key(1), (2, rows, length, heads, width), jnp.bfloat16)
    keys = jax.random.split(jax.random.key(2), rows)
    flops = 2 * rows * heads * length**2 * width
    plain = lambda q, k, v: attention(q, k, v, keys, dropout=0.0)  # noqa: E731
    out: dict[str, Any] = {}
    for name, kernel in (("cuDNN", cudnn_attention), ("XLA", plain)):
        if (name == "XLA" and length > 2048) or (name == "cuDNN" and jax.default_backend() != "gpu"):
            continue
        total = lambda *qkv, kernel=kernel: kernel(*qkv).astype(jnp.float32).sum()  # noqa: E731
        forward = seconds(jax.jit(kernel), q, k, v, calls=5)
        both = seconds(jax.jit(jax.grad(total, argnums=(0, 1, 2))), q, k, v, calls=5)
        out[f"attention by {name}, {rows} x {length}, {heads} heads of {width}"] = {
            "forward_ms": forward * 1e3,
            "forward_tflops": flops / forward / 1e12,
            "both_ms": both * 1e3,
            "both_tflops": 3.5 * flops / both / 1e12,
        }
    return out
