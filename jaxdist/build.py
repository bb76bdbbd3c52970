"""From a configuration to what trains: model, optimizer, layout of the state, step. Nothing is allocated."""

import fnmatch
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist import registry
from jaxdist.config.checks import prefetches
from jaxdist.config.entries import ModelFacts, bound
from jaxdist.config.resolve import GPU_PLUGINS
from jaxdist.config.schema import Config, ParallelConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import AnyMesh
from jaxdist.model import ModelDef
from jaxdist.nn import why_not_cudnn
from jaxdist.optim import make_optimizer
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.stages import arrange, order_of_blocks
from jaxdist.precision.policy import Precision, precision_of
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
    """What a run trains with.

    options: of the step, as the configuration resolves on this mesh.
    attention: the kernel of attention, xla or cudnn; and why not cudnn.
    target: the state as ShapeDtypeStructs with shardings.
    order: the block that each row of stacked blocks holds (`order_of_blocks`).
    """

    model: ModelDef
    optimizer: optax.GradientTransformation
    options: StepOptions
    attention: tuple[str, str | None]
    target: TrainState
    order: np.ndarray
    step: TrainStep


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
    if not ModelFacts.of(model.name).kernels:
        return getattr(model, "attention", "xla"), None
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
    chosen = {"attention": attention} if training else {"attention": attention, "dropout": 0.0}
    options = config.model.replace(**{key: value for key, value in chosen.items() if hasattr(config.model, key)})
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


def step_options(config: Config, mesh: AnyMesh) -> StepOptions:
    """The options of a step: the keys of `parallel` that are fields of `StepOptions`, and those of other sections.
    The strategy and the schedule come with options of their own."""
    parallel = config.parallel
    shared = {field.name for field in fields(ParallelConfig)} & {field.name for field in fields(StepOptions)}
    precision = precision_of(config.precision)
    resolved = {
        "strategy": bound(ParallelConfig, parallel, "strategy"),
        "schedule": bound(ParallelConfig, parallel, "schedule"),
        "remat": config.memory.remat,
        "freeze": config.optimizer.freeze,
        "seed": config.train.seed,
        "precision": precision,
        "prefetch": int(prefetches_on(config, mesh)),
        "offload": config.memory.offload.optimizer,
        "max_skips": config.precision.max_consecutive_skips if skips_steps(config, precision) else 0,
    }
    return StepOptions(**({name: getattr(parallel, name) for name in shared} | resolved))


def skips_steps(config: Config, precision: Precision) -> bool:
    """Whether a step that is not finite is left out, and training goes on."""
    return config.train.on_nonfinite == "skip" or precision.scale_rule is not None


def assemble(config: Config, mesh: AnyMesh) -> Parts:
    """The parts of a run on this mesh, which may be one without devices."""
    options, parallel = step_options(config, mesh), config.parallel
    attention = attention_of(config, options.precision, mesh)
    stages = mesh.shape["pipe"]
    model = make_model(config, options.precision, stages=stages, training=True, attention=attention[0])
    deterministic = options.grad_sync.deterministic
    optimizer = make_optimizer(config.optimizer, steps=config.train.steps, deterministic=deterministic)
    step = make_train_step(model, optimizer, mesh, options)
    order = order_of_blocks(model.layers, stages=stages, chunks=parallel.chunks, blocks=parallel.stages)
    target = state_target(model, optimizer, mesh, options)
    return Parts(model, optimizer, options, attention, target, order, step)
