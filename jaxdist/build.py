"""The parts of a run, made from a configuration: model, optimizer, layout of the state, step. Allocates nothing."""

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist import registry
from jaxdist.config.checks import default_remat, prefetches, unrolls
from jaxdist.config.entries import ModelFacts, bound
from jaxdist.config.resolve import has_cuda_plugin
from jaxdist.config.rules.remat import AUTO
from jaxdist.config.rules.transformer import context_form
from jaxdist.config.schema import Config, ParallelConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import AnyMesh, abstract_mesh, make_mesh
from jaxdist.model import ModelDef
from jaxdist.nn import why_not_cudnn
from jaxdist.nn.context.cudnn_tiles import why_no_cudnn_tiles
from jaxdist.optim.ema import with_ema
from jaxdist.optim.make import make_optimizer
from jaxdist.parallel.modules.module_loss import ModuleLoss
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.stages import arrange, order_of_model
from jaxdist.precision.policy import Precision, precision_of
from jaxdist.specs import PyTree
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
    teaching: where a teacher's logits come from (`jaxdist.distill.teaching`); None without section distill.
    replicas: those that train by themselves (`jaxdist.local_sgd.replicas`); None without section parallel.local.
    """

    model: ModelDef | ModuleLoss
    optimizer: optax.GradientTransformation
    options: StepOptions
    attention: tuple[str, str | None]
    target: TrainState
    step: TrainStep
    teaching: Any = None
    replicas: Any = None

    @property
    def order(self) -> np.ndarray:
        """The block in each row of stacked blocks: `order_of_model`."""
        return order_of_model(self.model)

    @property
    def evaluated(self) -> PyTree:
        """The parameters of the target in device memory, where `parallel.local.offload` keeps them on the host."""
        return (self.target if self.replicas is None else self.replicas.one).params


def mesh_of_config(config: Config) -> Mesh:
    """The mesh of a configuration, of the devices of this job. Raises `UserError` where they are too few."""
    return make_mesh(**asdict(config.mesh), devices=jax.devices())


def planned_mesh(config: Config) -> AnyMesh:
    """The mesh of a configuration, without devices."""
    return abstract_mesh(**asdict(config.mesh))


def cuda_capability(config: Config, mesh: AnyMesh) -> str:
    """The compute capability of the mesh's devices; "" if they are no NVIDIA GPUs.

    A mesh without devices stands for the oldest GPUs on which cuDNN's attention runs. Without jax's CUDA plugin, which
    tracing for them needs, the answer is "".
    """
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
        return str(getattr(device, "compute_capability", "")) if device.platform == "gpu" else ""
    return "8.0" if has_cuda_plugin() and config.devices.platform != "cpu" else ""


def prefetches_on(config: Config, mesh: AnyMesh) -> bool:
    """Whether the step prefetches on this mesh: `prefetches`."""
    return prefetches(config, gpu=bool(cuda_capability(config, mesh)))


def attention_of(config: Config, precision: Precision, mesh: AnyMesh) -> tuple[str, str | None]:
    """(the kernel of attention, xla or cudnn; the reason why it is not cudnn, or None).

    A model of somebody else's gets the kernel that is asked for. Raises `UserError` for cudnn where it cannot run.
    """
    model, form = config.model, form_of(config)
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
            head_width=getattr(model, "head_width", None) or model.width // model.heads,
            dropout=model.dropout,
            per_op=precision.per_op,
            masked=ModelFacts.of(model.name).key_mask or config.data.apart,
            window=None if form == "ring" else getattr(model, "window", None),  # its tiles have one mask for both
        )
    if form == "ring" and why is None:
        why = why_no_cudnn_tiles()
    if form == "gather":
        why = f"attention over mesh.context {config.mesh.context} goes by gather, which computes scores in plain XLA"
    if model.attention == "cudnn" and why is not None:
        raise UserError(f"model.attention: 'cudnn' is not possible: {why}; allowed: auto, xla")
    return ("cudnn" if why is None else "xla"), why


def make_model(
    config: Config, precision: Precision, *, stages: int, training: bool, attention: str = "xla"
) -> ModelDef | ModuleLoss:
    """The model of this configuration, arranged for that many pipeline stages; or the loss that stands for one.

    training: whether it is for training. For evaluation and sampling it has no dropout, smooths no labels, drops no
        tokens of experts, and splits no sequences. A loss is in evaluation mode then, if it has one.
    attention: the kernel, from `attention_of`.
    """
    chosen: dict[str, Any] = {"attention": attention}
    if not training:
        chosen |= {"dropout": 0.0, "label_smoothing": 0.0}
        if hasattr(config.model, "moe"):  # which of a text's tokens are dropped depends on those around them
            chosen["moe"] = replace(config.model.moe, dispatch="dropless")
    changed = {key: value for key, value in chosen.items() if hasattr(config.model, key)}
    name, options = config.model.name, config.model.replace(**changed)
    given: dict[str, Any] = {"max_length": config.data.seq_len, "param_dtype": precision.param}
    build = builder_of(config)
    asked = {"fp8": ("precision.policy: 'fp8'", "a policy without float8, such as bf16")} if precision.fp8 else {}
    if (lora := config.optimizer.lora).rank:
        asked["lora"] = (f"optimizer.lora.rank: {lora.rank}", "0; or a builder that passes lora on to model_def")
    for key in ("sequence_parallel", "collective_matmul"):
        if training and getattr(config.parallel, key):
            asked[key] = (f"parallel.{key}: true", "false")
    form = form_of(config)
    if form is not None:
        asked["context"] = (f"mesh.context: {config.mesh.context}", "1")
    for key, (setting, allowed) in asked.items():
        if not takes_option(build, key):  # a model of somebody else's need not know of it
            raise UserError(
                f"{setting} needs a model that takes the option {key}, and model.name"
                f" {name!r} takes no such option; allowed: {allowed}"
            )
    given |= dict.fromkeys(asked, True)
    if form is not None:  # an evaluation's stages are always in conditions, where no ring can be
        given["context"] = "gather" if form == "ring" and stages > 1 and not training else form
    if lora.rank:
        given["lora"] = lora if training else replace(lora, dropout=0.0)
    kind: Any = ModelDef | ModuleLoss
    model = registry.make("jaxdist.models", name, kind, options, **given, key="model.name")
    if isinstance(model, ModuleLoss):
        return model if training else model.evaluation or model
    return arrange(model, stages=stages, chunks=config.parallel.chunks, blocks=config.parallel.stages)


def builder_of(config: Config) -> Callable[..., Any]:
    """The function that makes the model of a configuration."""
    found: Callable[..., Any] = registry.load("jaxdist.models", config.model.name, key="model.name")
    return found


def takes_option(build: Callable[..., Any], key: str) -> bool:
    """Whether the builder of a model takes an option."""
    try:
        known: Mapping[str, inspect.Parameter] = inspect.signature(build).parameters
    except (TypeError, ValueError):  # it is no function, or has no signature: `registry.make` refuses it
        known = {}
    return not known or key in known or any(each.kind is each.VAR_KEYWORD for each in known.values())


def form_of(config: Config) -> str | None:
    """How attention goes over the mesh axis `context` (`context_form`)."""
    if config.mesh.context == 1:
        return None
    return context_form(config, resolved_model(config), asdict(config.mesh))


def resolved_model(config: Config) -> Any:
    """Section model with what its keys left open; as it is, for a model of somebody else's without such keys."""
    return config.model.resolved() if hasattr(config.model, "resolved") else config.model


def step_options(config: Config, mesh: AnyMesh) -> StepOptions:
    """The options of a step, from the keys of `parallel` with the same names and from other sections.

    Strategy and schedule are functions here if they have options of their own (`bound`).
    """
    parallel = config.parallel
    shared = {field.name for field in fields(ParallelConfig)} & {field.name for field in fields(StepOptions)}
    precision = precision_of(config.precision)
    resolved = {
        "strategy": bound(ParallelConfig, parallel, "strategy"),
        "schedule": bound(ParallelConfig, parallel, "schedule"),
        "remat": default_remat(config, gpu=bool(cuda_capability(config, mesh))),
        "freeze": config.optimizer.frozen,
        "seed": config.train.seed,
        "precision": precision,
        "prefetch": int(prefetches_on(config, mesh)),
        "offload": config.memory.offload.optimizer,
        "pipeline_cond": parallel.pipeline_cond and not (form_of(config) == "ring" and mesh.shape["pipe"] > 1),
        "max_skips": config.precision.max_consecutive_skips if skips_steps(config, precision) else 0,
    }
    return StepOptions(**({name: getattr(parallel, name) for name in shared} | resolved))


def skips_steps(config: Config, precision: Precision) -> bool:
    """Whether training goes on after a step that is not finite, without that step."""
    return config.train.on_nonfinite == "skip" or precision.scale_rule is not None


def optimizer_of(config: Config, order: Sequence[int] = ()) -> optax.GradientTransformation:
    """The optimizer of a configuration, with the moving average of `train.ema`. order: see `make_optimizer`."""
    deterministic = config.parallel.grad_sync.deterministic
    made = make_optimizer(config.optimizer, steps=config.train.steps, deterministic=deterministic, order=order)
    return made if config.train.ema is None else with_ema(made, config.train.ema)


def assemble(config: Config, mesh: AnyMesh) -> Parts:
    """The parts of a run on this mesh, which may be without devices."""
    options = step_options(config, mesh)
    attention = attention_of(config, options.precision, mesh)
    model = make_model(config, options.precision, stages=mesh.shape["pipe"], training=True, attention=attention[0])
    if not isinstance(model, ModelDef) and config.memory.remat == AUTO:  # its module need not say that it is a loss
        options = replace(options, remat="none")
    if isinstance(model, ModelDef) and unrolls(config, gpu=bool(cuda_capability(config, mesh))):
        model = model._replace(scan_blocks=0)
    optimizer = optimizer_of(config, order_of_model(model).tolist())
    step, teaching = make_train_step(model, optimizer, mesh, options), None
    target = state_target(model, optimizer, mesh, options)
    if config.distill.on:
        from jaxdist.distill.teaching import teaching_of

        teaching = teaching_of(config, mesh, forward_only)
        step = teaching.step(model, optimizer, mesh, options)
    parts = Parts(model, optimizer, options, attention, target, step, teaching)
    if config.parallel.local.on:
        from jaxdist.local_sgd.replicas import replicas_of

        replicas = replicas_of(config, model, optimizer, mesh, options, target)
        return parts._replace(target=replicas.target, step=replicas.step, replicas=replicas)
    return parts


def with_teacher(parts: Parts, batch: PyTree) -> tuple[Parts, PyTree]:
    """The parts of a plan, and the shapes of its batch: with what a teacher adds to the state and to the batch."""
    if parts.teaching is None:
        return parts, batch
    joint = parts.teaching.joint
    parts = parts._replace(model=joint.model, step=joint.step, target=joint.target, options=joint.options)
    return parts, joint.with_leaves(batch)


def forward_only(config: Config, mesh: AnyMesh) -> tuple[ModelDef | ModuleLoss, StepOptions]:
    """The model of a configuration for evaluation alone, and the options of its layout and precision."""
    options = step_options(config, mesh)
    attention, _ = attention_of(config, options.precision, mesh)
    stages = mesh.shape["pipe"]
    return make_model(config, options.precision, stages=stages, training=False, attention=attention), options
