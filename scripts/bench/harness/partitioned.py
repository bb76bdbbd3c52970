"""The step of `plain_jax`, partitioned by the compiler over many devices: parameters lie as jaxdist's do, h is kept
where its samples are, and XLA finds the collectives. What jaxdist's own is compared with, compiled alike."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from harness.contenders.plain_jax import loss_of
from harness.task import Size, Task
from jaxdist.build import assemble, attention_of
from jaxdist.config.schema import Config
from jaxdist.errors import UserError
from jaxdist.plan.compiled.ahead_of_time import Planned, check_toolkit, planned_of
from jaxdist.plan.compiled.hardware import Gpu
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.compiled.replay import Rates
from jaxdist.precision.policy import precision_of
from jaxdist.specs import BATCH_SPEC
from jaxdist.state import TrainState

PyTree = Any


def compile_partitioned(config: Config, gpu: Gpu, mesh: Mesh, rates: tuple[Rates, Rates]) -> Planned:
    """Every block is computed again in the backward pass, whatever `memory.remat` says. Raises `UserError` for models
    that `plain_jax` does not have."""
    model, shards = config.model.resolved(), mesh.shape["data"] * mesh.shape["fsdp"]
    if config.model.name != "gpt" or model.style != "gpt2" or not model.tied or mesh.size != shards:
        raise UserError(
            "--by-compiler: plain_jax has the model of GPT-2, over data and fsdp; allowed: model.name gpt,"
            " model.style gpt2, model.tied true, other axes of the mesh 1"
        )
    attention, _ = attention_of(config, precision_of(config.precision), mesh)
    check_toolkit(config, attention)
    precision = "bf16" if precision_of(config.precision).compute == jnp.bfloat16 else "fp32"
    size = Size(config.model, config.data.global_batch, config.data.seq_len)
    task = Task(size, model, None, [], gpu=attention == "cudnn", precision=precision)
    start, parts, samples = time.perf_counter(), assemble(config, mesh), NamedSharding(mesh, BATCH_SPEC)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        def around(block: Any) -> Any:
            def placed(h: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
                # Without this XLA moves activations in place of parameters: 44 x the bytes.
                return block(jax.lax.with_sharding_constraint(h, samples), p)

            return jax.checkpoint(placed, prevent_cse=False)

        found: jax.Array = loss_of(params, batch, task, around=around, unroll=1)
        return found

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Any]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        updates, opt_state = parts.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state), value

    layout = jax.tree.map(lambda leaf: leaf.sharding, parts.target)
    run = jax.jit(step, donate_argnums=0, out_shardings=(layout, None))
    with jax.numpy_dtype_promotion("standard"):
        lowered = run.lower(parts.target, batch_of(config, mesh))
    traced = time.perf_counter()
    program = lowered.compile()
    seconds = (traced - start, time.perf_counter() - traced)
    return planned_of(program, config, parts, gpu, rates, seconds)
