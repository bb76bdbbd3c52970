"""From a configuration to what trains: model, optimizer, layout of the state, step. Nothing is allocated."""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import optax

from jaxdist import registry
from jaxdist.config import Config
from jaxdist.init import state_target
from jaxdist.mesh import AnyMesh
from jaxdist.nn import ModelDef
from jaxdist.optim import make_optimizer
from jaxdist.parallel.arrange import arrange
from jaxdist.parallel.sync import GradSync
from jaxdist.precision import Precision, make_precision
from jaxdist.state import TrainState
from jaxdist.step import TrainStep, make_train_step


class Parts(NamedTuple):
    """target: the state as ShapeDtypeStructs with shardings. layout: what `init_state` must be told to fill it."""

    model: ModelDef
    precision: Precision
    optimizer: optax.GradientTransformation
    target: TrainState
    step: TrainStep
    layout: dict[str, Any]


def make_model(config: Config, precision: Precision, *, stages: int, training: bool) -> ModelDef:
    """The model of this configuration, for that many pipeline stages; for evaluation and sampling, without dropout."""
    options = config.model if training else replace(config.model, dropout=0.0)
    build = registry.load("jaxdist.models", config.model.name, key="model.name")
    model = build(options, max_length=config.data.seq_len, param_dtype=precision.param)
    return arrange(model, stages=stages, chunks=config.parallel.chunks) if config.parallel.chunks > 1 else model


def assemble(config: Config, mesh: AnyMesh) -> Parts:
    """The parts of a run on this mesh, which may be one without devices."""
    parallel, sync = config.parallel, GradSync(**asdict(config.parallel.grad_sync))
    precision = make_precision(config.precision.policy, config.precision.reduce_dtype)
    model = make_model(config, precision, stages=mesh.shape["pipe"], training=True)
    optimizer = make_optimizer(config.optimizer, steps=config.train.steps, deterministic=sync.deterministic)
    layout: dict[str, Any] = {
        "strategy": parallel.strategy, "min_shard_bytes": parallel.min_shard_bytes, "grad_sync": sync,
        "freeze": config.optimizer.freeze, "offload": config.memory.offload.optimizer,
    }  # fmt: skip
    step = make_train_step(
        model, optimizer, mesh, strategy=parallel.strategy, schedule=parallel.schedule,
        microbatches=parallel.microbatches, precision=precision, remat=config.memory.remat,
        grad_sync=sync, freeze=config.optimizer.freeze, reshard_after_forward=parallel.reshard_after_forward,
        prefetch=parallel.prefetch, pipeline_cond=parallel.pipeline_cond, seed=config.train.seed,
    )  # fmt: skip
    return Parts(model, precision, optimizer, state_target(model, optimizer, mesh, **layout), step, layout)
