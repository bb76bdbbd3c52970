"""Whether a GPU computes what a CPU does, a kernel what plain JAX does, and a layout the bits of another."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Prints the losses, the gradient norms and a digest of the parameters after some steps on one device, as JSON after @@.
STEPS = """
import faulthandler, hashlib, json, sys
spec = json.loads(sys.argv[1])
faulthandler.dump_traceback_later(spec["limit_s"] - 5)
import jax
if spec["exact"]:
    jax.config.update("jax_default_matmul_precision", "highest")
import numpy as np
from jaxdist.build import assemble
from jaxdist.config.load import load_config
from jaxdist.init import init_state
from jaxdist.mesh import make_mesh
from jaxdist.runtime.start import start
from jaxdist.trainer.batches.load import load_data, loader_of
config = start(load_config("configs/quickstart.yaml", spec["settings"]))
mesh = make_mesh(devices=jax.devices()[:1])
parts, loader = assemble(config, mesh), loader_of(config, load_data(config), mesh)
state, found = init_state(parts.model, parts.optimizer, mesh, parts.options), []
for i in range(spec["steps"]):
    state, metrics = parts.step(state, loader.batch(i))
    found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
words = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params))
digest = hashlib.sha256(words).hexdigest()
print("@@" + json.dumps({"steps": found, "parameters": digest, "attention": parts.attention[0]}))
"""
ONE = (
    "mesh.data=1",
    "mesh.fsdp=1",
    "mesh.tensor=1",
    "devices.simulated=1",
    "optimizer.warmup_steps=0",
    "memory.remat=none",
)
CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
AT_ONCE = 6  # processes


def _steps(settings: Sequence[str], *, on_cpu: bool = False, exact: bool = True, steps: int = 3) -> dict[str, Any]:
    """What STEPS prints; or its exit status and the end of its output."""
    limit_s = 120
    spec = {"settings": [*ONE, *settings], "exact": exact, "steps": steps, "limit_s": limit_s}
    command = [sys.executable, "-c", STEPS, json.dumps(spec)]
    try:
        done = subprocess.run(
            command, env=os.environ | (CPU if on_cpu else {}), capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        return {"exit_status": "timed out", "output": str((error.stderr or b"")[-2000:])}
    marked = [line[2:] for line in done.stdout.splitlines() if line.startswith("@@")]
    return json.loads(marked[-1]) if marked else {"exit_status": done.returncode, "output": done.stderr[-2000:]}


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The largest relative difference of losses and gradient norms; None where there are none."""
    if "steps" not in one or "steps" not in other:
        return None
    pairs = zip(one["steps"], other["steps"], strict=True)
    return max(abs(x - y) / abs(y) for left, right in pairs for x, y in zip(left, right, strict=True))


def agree(tiny: bool) -> Iterator[dict[str, Any]]:
    """Differences of three steps of AdamW, for GPT-2's blocks and Llama's."""
    size = ["model.width=64", "data.seq_len=32"] if tiny else ["model.width=256", "data.seq_len=256"]
    common = [*size, "data.global_batch=8", "optimizer.name=adamw", "optimizer.lr=1e-3"]
    variants: dict[str, dict[str, Any]] = {"cpu": {"settings": ["devices.platform=cpu"], "on_cpu": True}, "fp32": {}}
    if not tiny:
        variants |= {
            "bf16, cuDNN": {"settings": ["precision=bf16"]},
            "bf16, XLA": {"settings": ["precision=bf16", "model.attention=xla"]},
            "bf16, full": {"settings": ["precision=bf16", "memory.remat=full"]},
            "bf16, dots": {"settings": ["precision=bf16", "memory.remat=dots"]},
            "fp8": {"settings": ["precision=fp8"]},
        }
    pairs = (
        ("fp32", "cpu"),
        ("bf16, cuDNN", "fp32"),
        *(("bf16, cuDNN", f"bf16, {other}") for other in ("XLA", "full", "dots")),
        ("fp8", "bf16, cuDNN"),
    )
    styles = ("gpt2",) if tiny else ("gpt2", "llama")
    jobs = {(style, name): options for style in styles for name, options in variants.items()}

    def run(style: str, options: dict[str, Any]) -> dict[str, Any]:
        settings = [*common, f"model.style={style}", *options.get("settings", ())]
        return _steps(settings, on_cpu=options.get("on_cpu", False))

    with ThreadPoolExecutor(1 if tiny else AT_ONCE) as pool:
        waiting = {job: pool.submit(run, job[0], options) for job, options in jobs.items()}
    found = {job: each.result() for job, each in waiting.items()}
    yield {
        "differences": {
            f"{style}: {one} and {other}": _apart(found[style, one], found[style, other])
            for style in styles
            for one, other in pairs
            if one in variants
        },
        "runs": {f"{style}: {name}": each for (style, name), each in found.items()},
    }


def same_bits(tiny: bool) -> Iterator[dict[str, Any]]:
    """The digest of the parameters after six steps with dropout, of layouts that must have the same."""
    common = ["parallel.grad_sync.deterministic=true", "parallel.grad_sync.virtual_shards=8", "model.dropout=0.1"]
    common += ["optimizer.name=adamw", "optimizer.lr=1e-3", "data.seq_len=32"]
    layouts = {
        "ddp": ["parallel.strategy=ddp"],
        "ddp, again": ["parallel.strategy=ddp"],
        "2 microbatches": ["parallel.microbatches=2"],
        "8 microbatches": ["parallel.microbatches=8"],
        "zero3": ["parallel.strategy=zero3"],
        "bf16": ["precision=bf16"],
        "bf16, 4 microbatches": ["precision=bf16", "parallel.microbatches=4"],
    }
    chosen = dict(list(layouts.items())[:2]) if tiny else layouts
    with ThreadPoolExecutor(1 if tiny else AT_ONCE) as pool:
        waiting = {
            name: pool.submit(_steps, [*common, *settings], exact=False, steps=6) for name, settings in chosen.items()
        }
    found = {name: each.result() for name, each in waiting.items()}
    digests = {name: each.get("parameters") for name, each in found.items()}
    groups = [{digests[name] for name in chosen if name.startswith("bf16") == half} for half in (False, True)]
    yield {"same": all(len(group) <= 1 and None not in group for group in groups), "runs": found}


def _distances(
    computed: Callable[[Any, Any], Sequence[Any]], plain: Any, tried: dict[str, tuple[Any, Any]]
) -> dict[str, list[float]]:
    """||x - y|| / ||y|| of each array x that a kernel computes; y: that of `plain` in fp32.

    computed: (kernel, dtype) -> arrays
    """
    import jax
    import numpy as np

    with jax.default_matmul_precision("highest"):
        wanted, norm = computed(plain, np.float32), np.linalg.norm
    pairs = {label: zip(computed(*each), wanted, strict=True) for label, each in tried.items()}
    return {label: [float(norm(x - y) / norm(y)) for x, y in both] for label, both in pairs.items()}


def kernels(tiny: bool) -> Iterator[dict[str, Any]]:
    """||x - y|| / ||y|| of the output and of the gradients of q, k and v; y: plain attention in fp32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxdist.nn.attention.kernels import PackedDocuments, attention, cudnn_attention

    rows, length, heads, group, width = 2, 64 if tiny else 256, 2, 2, 64
    q, weights = (jax.random.normal(jax.random.key(i), (rows, length, heads, group, width)) for i in (0, 1))
    k, v = jax.random.normal(jax.random.key(2), (2, rows, length, heads, width))
    keys = jax.random.split(jax.random.key(3), rows)
    starts = np.stack([np.arange(length) // size * size for size in (length // 4, length // 3)])
    seen = np.arange(length) < np.array([[length - 8], [length // 3]])
    cases: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"window": 48},
        "documents": {"documents": PackedDocuments(jnp.asarray(starts, jnp.int32))},
        "not causal": {"causal": False},
        "not causal, key mask": {"causal": False, "seen_BT": jnp.asarray(seen)},
        "causal, key mask": {"seen_BT": jnp.asarray(seen)},
    }
    plain = lambda q, k, v, **options: attention(q, k, v, keys, dropout=0.0, **options)  # noqa: E731
    tried: dict[str, tuple[Any, Any]] = {"plain, bf16": (plain, jnp.bfloat16)}
    if jax.default_backend() == "gpu":
        tried |= {"cuDNN, bf16": (cudnn_attention, jnp.bfloat16), "cuDNN, fp16": (cudnn_attention, jnp.float16)}
    out: dict[str, Any] = {}
    for name, options in cases.items():

        def computed(kernel: Any, dtype: Any, options: dict[str, Any] = options) -> list[Any]:
            result, pull = jax.vjp(lambda *qkv: kernel(*qkv, **options), *(x.astype(dtype) for x in (q, k, v)))
            return [np.asarray(x, np.float64) for x in (result, *pull(weights.astype(dtype)))]

        out[name] = _distances(computed, plain, tried)
        yield out


def tiles(tiny: bool) -> Iterator[dict[str, Any]]:
    """||x - y|| / ||y|| of two merged tiles of a ring and of the gradients by way of the first; y: plain ones, fp32.
    Fails where one is above 2e-2."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxdist.nn.context.cudnn_tiles import CUDNN_TILES
    from jaxdist.nn.context.tiles import XLA_TILES, TileMask, WholeResult, merged

    rows, length, heads, group, width = 2, 64 if tiny else 1024, 2, 4, 128
    q, dout = (jax.random.normal(jax.random.key(i), (rows, length, heads, group, width)) for i in (0, 1))
    k, v = jax.random.normal(jax.random.key(2), (2, rows, length, heads, width))
    others = jax.random.normal(jax.random.key(3), (2, rows, length, heads, width))
    hidden = jax.random.bernoulli(jax.random.key(4), 0.3, (rows, length, length)).at[:, : length // 2].set(True)
    tried = {"plain, bf16": (XLA_TILES, jnp.bfloat16)}
    if jax.default_backend() == "gpu":
        tried |= {"cuDNN, bf16": (CUDNN_TILES, jnp.bfloat16), "cuDNN, fp16": (CUDNN_TILES, jnp.float16)}
    out: dict[str, Any] = {}
    masks = {
        "all": TileMask(),
        "causal": TileMask(causal=True),
        "hidden": TileMask(unseen_BST=hidden),
        "causal, hidden": TileMask(causal=True, unseen_BST=hidden & ~jnp.eye(length, dtype=bool)),
    }
    for name, mask in masks.items():

        def computed(kernel: Any, dtype: Any, mask: TileMask = mask) -> list[Any]:
            own, (k_o, v_o) = [x.astype(dtype) for x in (q, k, v)], others.astype(dtype)
            whole = merged(kernel.forward(*own, mask), kernel.forward(own[0], k_o, v_o, TileMask()))
            gradients = kernel.backward(*own, mask, WholeResult(whole.out.astype(dtype), dout.astype(dtype), whole.lse))
            return [np.asarray(x, np.float64) for x in (*whole, *gradients)]

        out[name] = _distances(computed, XLA_TILES, tried)
        yield out
    errors = [error for case in out.values() for each in case.values() for error in each]
    assert all(error < 2e-2 for error in errors), f"tiles differ: {errors}"
