"""jaxdist's train step against one written by hand in plain JAX: the same GPT-2, optimizer and batch on ONE device.

    python scripts/bench/step.py [--steps 30] [--config FILE] [--json OUT] [section.key=value ...]

Both are compiled, warmed up and run alternately in one process; the figures are medians. Ratio = plain / jaxdist time:
1.00 is no overhead, above is faster than plain. Also printed: the time in which a call of the step returns to Python,
beside that of a program which takes and returns a state of as many arrays and computes nothing: what JAX needs, with
the caches of a processor that did something else meanwhile (take 20 steps or more); what compiles after the warm-up,
and how long the first step takes to come, XLA's compiling left out.
"""

import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.config.checks import default_remat
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config, MeshConfig
from jaxdist.errors import CommandParser, UserError, reports_mistakes

PyTree = Any
WARM_UP = 2  # steps of each
BEGAN = time.perf_counter()


def plain_step(config: Config, optimizer: Any) -> Any:
    """(state, batch) -> (state, metrics), jitted and donated: what an expert would write for one device."""
    import jax
    import jax.numpy as jnp
    import optax

    model = config.model.resolved()
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
    plain = {
        "model.style": (config.model.style, "gpt2"),
        "precision.policy": (config.precision.policy, "fp32"),
        "memory.remat": (default_remat(config, gpu=False), "none"),
        "model.dropout": (config.model.dropout, 0.0),
        "parallel.microbatches": (config.parallel.microbatches, 1),
    }
    for key, (value, allowed) in plain.items():
        if value != allowed:
            raise UserError(f"{key}: {value!r}, but the plain step of this benchmark has only {allowed!r}")


class Compiles:
    """Counts what XLA compiles from now on, and the seconds that takes."""

    def __init__(self) -> None:
        import jax

        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count, self.seconds = self.count + 1, self.seconds + duration_secs


def make_ours(config: Config) -> tuple[Any, Any, Any, Any]:
    """(step, state, optimizer, loader) of jaxdist."""
    import numpy as np
    from jax.sharding import NamedSharding

    from jaxdist.data import Loader
    from jaxdist.data.sources.text import text
    from jaxdist.init import init_state
    from jaxdist.mesh import make_mesh
    from jaxdist.models.gpt import gpt
    from jaxdist.optim.make import make_optimizer
    from jaxdist.specs import BATCH_SPEC
    from jaxdist.step import make_train_step

    mesh, optimizer = make_mesh(), make_optimizer(config.optimizer, steps=config.train.steps)
    model = gpt(config.model, max_length=config.data.seq_len)
    ids = text(config.data).train
    assert isinstance(ids, np.ndarray)
    loader = Loader(
        ids,
        seq_len=config.data.seq_len,
        global_batch=config.data.global_batch,
        sharding=NamedSharding(mesh, BATCH_SPEC),
    )
    step = make_train_step(model, optimizer, mesh, strategy=config.parallel.strategy)
    return step, init_state(model, optimizer, mesh, strategy=config.parallel.strategy), optimizer, loader


def timed(run: Any, state: Any, batch: PyTree) -> tuple[Any, PyTree, dict[str, float]]:
    """(new state, metrics, seconds) of one step: "step", until it is done; "call", until the call returned;
    "processor", of these what the thread spent on the processor."""
    import jax

    began, busy = time.perf_counter(), time.thread_time()
    state, metrics = run(state, batch)
    call, busy = time.perf_counter() - began, time.thread_time() - busy
    jax.block_until_ready((state, metrics))
    return state, metrics, {"step": time.perf_counter() - began, "call": call, "processor": busy}


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Median seconds, interleaved; asserts that both steps compute the same first loss. Not printed: "processor"."""
    import jax

    from jaxdist.runtime.start import start

    compiles = Compiles()
    step, state, optimizer, loader = make_ours(start(config))
    batch = loader.batch(0)
    params, idle = (
        jax.tree.map(lambda leaf: jax.device_put(leaf).copy(), tree) for tree in (jax.device_get(state.params), state)
    )
    state, first, _ = timed(step, state, batch)
    ready, compiling = time.perf_counter() - BEGAN, compiles.seconds
    plain, local = plain_step(config, optimizer), jax.tree.map(lambda leaf: leaf.addressable_data(0), batch)
    runs = {
        "jaxdist": (step, batch),
        "plain": (plain, local),
        "empty": (jax.jit(lambda state, _: (state, dict.fromkeys(first, state.step)), donate_argnums=0), batch),
    }
    states = {"jaxdist": state, "plain": (params, jax.jit(optimizer.init)(params)), "empty": idle}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    warm, losses = 0, [float(first["loss"])]
    for i in range(-WARM_UP, steps):
        warm = compiles.count if i == 0 else warm
        for name in ("jaxdist", "plain", "empty"):
            run, given = runs[name]
            states[name], metrics, seconds = timed(run, states[name], given)
            taken[name] += [seconds] if i >= 0 else []
            losses += [float(metrics["loss"])] if name == "plain" and len(losses) == 1 else []
        states["plain"], _, _ = timed(plain, states["plain"], local)  # all calls are made after a step's work
        if sys.stderr.isatty():
            print(f"\r{i + 1}/{steps}", end="", file=sys.stderr)
    assert math.isclose(*losses, rel_tol=1e-5), "not the same model"
    medians = {name: {key: statistics.median(each[key] for each in of) for key in of[0]} for name, of in taken.items()}
    return {
        "seconds": medians,
        "ratio": medians["plain"]["step"] / medians["jaxdist"]["step"],
        "recompilations": compiles.count - warm,
        "first_step_s": ready - compiling,
        "compile_s": compiling,
        "steps": steps,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def report(result: dict[str, Any]) -> None:
    """Print what `measure` found."""
    seconds = result["seconds"]
    step, call = (
        {name: f"{each[key] * 1e3:.{digits}f} ms" for name, each in seconds.items()}
        for key, digits in (("step", 1), ("call", 2))
    )
    print(
        f"jaxdist {step['jaxdist']}, plain JAX {step['plain']} a step (medians of {result['steps']}), ratio"
        f" {result['ratio']:.3f}, {result['device']}, jax {result['jax']}"
    )
    print(
        f"a call returns after {call['jaxdist']} (plain JAX {call['plain']}, an empty program with as many arrays"
        f" {call['empty']}), {result['recompilations']} programs compiled after the warm-up"
    )
    print(
        f"from the start of the script to the end of the first step {result['first_step_s']:.1f} s, and"
        f" {result['compile_s']:.1f} s in XLA"
    )


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for a wrong configuration."""
    parser = CommandParser(description="jaxdist's step against plain JAX on one device.")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--steps", type=COUNT, default=30)
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    check_comparable(config)
    devices = replace(config.devices, simulated=1, compilation_cache=False)  # what compiling takes is a result
    result = measure(replace(config, mesh=MeshConfig(), devices=devices), arguments.steps)
    report(result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
