"""jaxdist's train step against one written by hand in plain JAX: the same GPT-2, optimizer and batch on ONE device.

    python scripts/bench_step.py [--steps 30] [--config FILE] [--json OUT] [section.key=value ...]

Both are compiled, warmed up and run alternately in one process; the figures are medians. Ratio = plain / jaxdist time:
1.00 is no overhead, above is faster than plain.
"""

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxdist.config import Config, DevicesConfig, MeshConfig, load_config, resolve_model
from jaxdist.errors import UserError

PyTree = Any


def plain_step(config: Config, optimizer: Any) -> Any:
    """(state, batch) -> (state, metrics), jitted and donated: what an expert would write for one device."""
    import jax
    import jax.numpy as jnp
    import optax

    model = resolve_model(config.model)
    kv, groups, width = model.kv_heads or 0, model.heads // (model.kv_heads or 1), model.width // model.heads

    def norm(x: Any, p: PyTree) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + model.norm_eps) * p["scale"] + p["bias"]

    def linear(x: Any, p: PyTree) -> Any:
        return jnp.tensordot(x, p["kernel"], 1) + p["bias"]

    def attention(x: Any, p: PyTree) -> Any:
        batch, length, _ = x.shape
        qkv = linear(x, p["qkv"]["linear"])
        q, k, v = qkv[..., :groups, :], qkv[..., groups, :], qkv[..., groups + 1, :]
        scores = jnp.einsum("bsngk,btnk->bngst", q, k) * width**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.finfo(x.dtype).min)
        mixed = jnp.einsum("bngst,btnk->bsngk", jax.nn.softmax(scores), v)
        return linear(mixed.reshape(batch, length, kv * groups * width), p["out"])

    def block(h: Any, p: PyTree) -> tuple[Any, None]:
        h = h + attention(norm(h, p["norm1"]), p["attention"])
        return h + linear(jax.nn.gelu(linear(norm(h, p["norm2"]), p["mlp"]["up"])), p["mlp"]["down"]), None

    def loss_of(params: PyTree, batch: PyTree) -> Any:
        embed = params["embed"]
        h = embed["tokens"]["table"][batch["inputs"]] + embed["positions"]["table"][: batch["inputs"].shape[1]]
        h, _ = jax.lax.scan(block, h, params["blocks"])
        logits = norm(h, params["head"]["norm"]) @ embed["tokens"]["table"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    def step(state: Any, batch: PyTree) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return jax.jit(step, donate_argnums=0)


def check_comparable(config: Config) -> None:
    """Raise `UserError` for what the plain step does not have."""
    plain = {"model.style": (config.model.style, "gpt2"), "precision.policy": (config.precision.policy, "fp32"),
             "memory.remat": (config.memory.remat, "none"), "model.dropout": (config.model.dropout, 0.0),
             "parallel.microbatches": (config.parallel.microbatches, 1)}  # fmt: skip
    for key, (value, allowed) in plain.items():
        if value != allowed:
            raise UserError(f"{key}: {value!r}, but the plain step of this benchmark has only {allowed!r}")


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Median seconds of both, interleaved; asserts that both compute the same losses."""
    import jax
    from jax.sharding import NamedSharding

    from jaxdist.data import Loader
    from jaxdist.data.sources.text import text
    from jaxdist.init import init_state
    from jaxdist.mesh import make_mesh
    from jaxdist.models.gpt import gpt
    from jaxdist.optim import make_optimizer
    from jaxdist.runtime.start import start
    from jaxdist.specs import BATCH_SPEC
    from jaxdist.step import make_train_step

    config = start(config)
    mesh, optimizer = make_mesh(), make_optimizer(config.optimizer, steps=config.train.steps)
    model = gpt(config.model, max_length=config.data.seq_len)
    ours = init_state(model, optimizer, mesh, strategy=config.parallel.strategy)
    params = jax.tree.map(lambda leaf: jax.device_put(leaf).copy(), jax.device_get(ours.params))
    plain: Any = (params, jax.jit(optimizer.init)(params))
    step = make_train_step(model, optimizer, mesh, strategy=config.parallel.strategy)
    plain_run = plain_step(config, optimizer)
    loader = Loader(
        text(config.data).train, seq_len=config.data.seq_len, global_batch=config.data.global_batch,
        sharding=NamedSharding(mesh, BATCH_SPEC),
    )  # fmt: skip
    times: dict[str, list[float]] = {"jaxdist": [], "plain": []}
    for i in range(steps + 3):
        batch = loader.batch(i)
        local = jax.tree.map(lambda leaf: leaf.addressable_data(0), batch)
        began = time.perf_counter()
        ours, metrics = jax.block_until_ready(step(ours, batch))
        middle = time.perf_counter()
        plain, plain_metrics = jax.block_until_ready(plain_run(plain, local))
        ended = time.perf_counter()
        if i == 0:
            assert math.isclose(metrics["loss"], plain_metrics["loss"], rel_tol=1e-5), "not the same model"
        if i >= 3:
            times["jaxdist"].append(middle - began)
            times["plain"].append(ended - middle)
        if sys.stderr.isatty():
            print(f"\r{i + 1}/{steps + 3}", end="", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in times.items()}
    device = mesh.devices.flat[0]
    return {
        **{f"{name}_s": seconds for name, seconds in medians.items()},
        "ratio": medians["plain"] / medians["jaxdist"],
        "steps": steps,
        "device": device.device_kind,
        "jax": jax.__version__,
    }


def main() -> int:
    """Exit status 0, or 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(description="jaxdist's step against plain JAX on one device.")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_comparable(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    devices = DevicesConfig(platform=config.devices.platform, simulated=1)
    result = measure(replace(config, mesh=MeshConfig(), devices=devices), arguments.steps)
    print(
        f"jaxdist {result['jaxdist_s'] * 1e3:.1f} ms, plain JAX {result['plain_s'] * 1e3:.1f} ms a step (medians of "
        f"{result['steps']}), ratio {result['ratio']:.3f}, {result['device']}, jax {result['jax']}"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
