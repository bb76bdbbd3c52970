"""From a configuration to what trains: model, optimizer, layout of the state, step. Nothing is allocated."""

import fnmatch
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist import registry
from jaxdist.config.resolve import GPU_PLUGINS
from jaxdist.config.rules.prefetch import prefetches
from jaxdist.config.schema import Config, PrecisionConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import AnyMesh
from jaxdist.nn import ModelDef, why_not_cudnn
from jaxdist.optim import make_optimizer
from jaxdist.parallel.grad_sync import GradSync
from jaxdist.parallel.pipeline.stages import arrange, order_of_blocks
from jaxdist.precision.loss_scale import ScaleRule
from jaxdist.precision.policy import Precision, make_precision
from jaxdist.state import TrainState
from jaxdist.step import make_train_step
from jaxdist.train_step import TrainStep

# Parameters whose type the residual stream takes, and so queries, keys and values.
BEFORE_ATTENTION = (
    "embed.tokens.table",
    "embed.positions.table",
    "blocks.attention.qkv.linear.kernel",
    "blocks.attention.out.kernel",
    "blocks.mlp.up.kernel",
    "blocks.mlp.down.kernel",
)


class Parts(NamedTuple):
    """target: the state as ShapeDtypeStructs with shardings. order: the block that each row of blocks holds
    (`order_of_blocks`). layout: what `init_state` must be told to fill it. max_skips: steps in a row that may be
    skipped. options: the keyword arguments that `make_train_step` was given. attention: of `attention_of`."""

    model: ModelDef
    precision: Precision
    optimizer: optax.GradientTransformation
    target: TrainState
    order: np.ndarray
    step: TrainStep
    layout: dict[str, Any]
    max_skips: int
    options: dict[str, Any]
    attention: tuple[str, str | None]


def precision_of(config: PrecisionConfig) -> Precision:
    """The policy of this configuration, with what is set beside it."""
    chosen = make_precision(
        config.policy,
        config.reduce_dtype,
        half=config.half,
        param_dtype=config.param_dtype,
        compute_dtype=config.compute_dtype,
        keep_fp32=config.keep_fp32,
        per_op=config.per_op,
    )
    given = config.loss_scale
    mode = given.mode or ("none" if chosen.scale_rule is None else "dynamic")
    moves = (given.growth_factor, given.backoff_factor) if mode == "dynamic" else (1.0, 1.0)
    rule = ScaleRule(given.init_scale, *moves, given.growth_interval)
    return chosen._replace(loss_scale=1.0 if mode == "none" else rule)


def cuda_capability(config: Config, mesh: AnyMesh) -> str:
    """The compute capability of the mesh's devices, "" if they are no NVIDIA GPUs. A mesh without devices stands for
    GPUs of the oldest kind that matters, where jax's CUDA plugin is there to trace for them."""
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
        return str(getattr(device, "compute_capability", "")) if device.platform == "gpu" else ""
    plugin = any(importlib.util.find_spec(name) is not None for name in GPU_PLUGINS if "cuda" in name)
    return "8.0" if plugin and config.devices.platform != "cpu" else ""


def prefetches_on(config: Config, mesh: AnyMesh) -> bool:
    """Whether the step prefetches on this mesh: `prefetches`."""
    return prefetches(config, gpu=bool(cuda_capability(config, mesh)))


def attention_of(config: Config, precision: Precision, mesh: AnyMesh) -> tuple[str, str | None]:
    """The kernel of attention, xla or cudnn, and why not cudnn. Raises `UserError` where `model.attention` is cudnn and
    it cannot be. A model of somebody else's gets what is asked for."""
    model = config.model
    if "." in model.name:
        return model.attention, None
    wide = any(fnmatch.fnmatchcase(name, each) for name in BEFORE_ATTENTION for each in precision.keep_fp32)
    if model.attention == "xla":
        return "xla", "model.attention=xla"
    why: str | None = "parallel.grad_sync.deterministic=true, and cuDNN's backward pass sums in no fixed order"
    if not config.parallel.grad_sync.deterministic:
        why = why_not_cudnn(
            capability=cuda_capability(config, mesh),
            dtype=jnp.float32 if wide else precision.compute,
            head_width=model.width // model.heads,
            dropout=model.dropout,
            per_op=precision.per_op,
        )
    if model.attention == "cudnn" and why is not None:
        raise UserError(f"model.attention: 'cudnn' is not possible: {why}; allowed: auto, xla")
    return ("cudnn" if why is None else "xla"), why


def make_model(
    config: Config, precision: Precision, *, stages: int, training: bool, attention: str = "xla"
) -> ModelDef:
    """The model of this configuration, for that many pipeline stages; for evaluation and sampling, without dropout.
    attention: the kernel, of `attention_of`."""
    options = replace(config.model, attention=attention, dropout=config.model.dropout if training else 0.0)
    build = registry.load("jaxdist.models", config.model.name, key="model.name")
    known = _keywords(build)
    fp8 = {"fp8": True} if precision.fp8 else {}  # a model of somebody else's need not know of it
    if fp8 and not {"fp8", "keywords"} & known:
        raise UserError(
            f"precision.policy: 'fp8' needs a model that can be built with fp8=True, and model.name"
            f" {config.model.name!r} takes no such option; allowed: a policy without float8, such as"
            " bf16"
        )
    asked = {key: True for key in ("sequence_parallel", "collective_matmul") if getattr(config.parallel, key)}
    split = asked if training else {}
    for key in split:
        if not {key, "keywords"} & known:
            raise UserError(
                f"parallel.{key}: true needs a model that can be built with {key}=True, and model.name"
                f" {config.model.name!r} takes no such option; allowed: false"
            )
    model = build(options, max_length=config.data.seq_len, param_dtype=precision.param, **fp8, **split)
    return arrange(model, stages=stages, chunks=config.parallel.chunks, blocks=config.parallel.stages)


def _keywords(build: Callable[..., Any]) -> set[str]:
    """Names of its parameters; "keywords" for **keywords, whatever they are called there."""
    found = inspect.signature(build).parameters.values()
    return {"keywords" if each.kind is each.VAR_KEYWORD else each.name for each in found}


def assemble(config: Config, mesh: AnyMesh) -> Parts:
    """The parts of a run on this mesh, which may be one without devices."""
    parallel, sync = config.parallel, GradSync(**asdict(config.parallel.grad_sync))
    precision = precision_of(config.precision)
    stages, chunks = mesh.shape["pipe"], parallel.chunks
    ahead = int(prefetches_on(config, mesh))
    attention = attention_of(config, precision, mesh)
    model = make_model(config, precision, stages=stages, training=True, attention=attention[0])
    optimizer = make_optimizer(config.optimizer, steps=config.train.steps, deterministic=sync.deterministic)
    layout: dict[str, Any] = {
        "strategy": parallel.strategy,
        "min_shard_bytes": parallel.min_shard_bytes,
        "grad_sync": sync,
        "freeze": config.optimizer.freeze,
        "offload": config.memory.offload.optimizer,
    }
    skips = config.train.on_nonfinite == "skip" or precision.scale_rule is not None
    max_skips = config.precision.max_consecutive_skips if skips else 0
    options: dict[str, Any] = {
        "strategy": parallel.strategy,
        "schedule": parallel.schedule,
        "microbatches": parallel.microbatches,
        "precision": precision,
        "remat": config.memory.remat,
        "grad_sync": sync,
        "freeze": config.optimizer.freeze,
        "reshard_after_forward": parallel.reshard_after_forward,
        "prefetch": ahead,
        "pipeline_cond": parallel.pipeline_cond,
        "max_skips": max_skips,
        "seed": config.train.seed,
    }
    step = make_train_step(model, optimizer, mesh, **options)
    order = order_of_blocks(model.layers, stages=stages, chunks=chunks, blocks=parallel.stages)
    target = state_target(model, optimizer, mesh, **layout)
    return Parts(model, precision, optimizer, target, order, step, layout, max_skips, options, attention)
