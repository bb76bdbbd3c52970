"""The checks over several keys of a configuration, and what follows from it: sizes of the mesh, of the model. Imports
no jax."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist import registry
from jaxdist.config.entries import SourceFacts, entries_of
from jaxdist.config.fields import show
from jaxdist.config.resolve import known_devices, resolve_mesh, rest_axis
from jaxdist.config.rules.collective_matmul import check_collective_matmul, check_conditions
from jaxdist.config.rules.grad_sync import check_grad_sync
from jaxdist.config.rules.pipeline import check_pipeline, divisors, near
from jaxdist.config.rules.prefetch import check_prefetch
from jaxdist.config.rules.remat import check_memory, with_offload
from jaxdist.config.rules.xla_flags import check_flags
from jaxdist.errors import UserError

if TYPE_CHECKING:
    from jaxdist.config.schema import Config, DataConfig

WITH_HALF = ("fp16", "O1", "O2", "O3")  # policies
SMALLEST_FLOAT16 = 1e-7  # its step near zero is 6e-8


def check_config(config: Config, *, planned: bool = False) -> Config:
    """The checks over several keys. Returns the configuration, its mesh resolved if the device count is known.

    planned: nothing will run here, so neither the devices nor the data need to be here.
    """
    if config.optimizer.warmup_steps > config.train.steps:
        raise UserError(
            f"optimizer.warmup_steps: {config.optimizer.warmup_steps} is more than train.steps"
            f" {config.train.steps}; allowed: 0 to {config.train.steps}"
        )
    if config.checkpoint.keep_best and not config.train.eval_every:
        raise UserError(
            f"checkpoint.keep_best: {config.checkpoint.keep_best} goes by evaluations, and train.eval_every"
            " is 0; allowed: 0; or set train.eval_every to what checkpoint.every is"
        )
    if config.train.on_nonfinite == "rollback" and not config.checkpoint.every:
        raise UserError(
            "train.on_nonfinite: 'rollback' goes back to a checkpoint, and checkpoint.every is 0; allowed:"
            " stop, skip; or checkpoint.every=100"
        )
    if config.train.loss_spike and (config.train.on_nonfinite == "skip" or config.train.loss_spike <= 1):
        raise UserError(
            f"train.loss_spike: {config.train.loss_spike:g} with train.on_nonfinite"
            f" {config.train.on_nonfinite}; allowed: 0, or above 1 with stop or rollback: a spike is seen"
            " when its step has been taken"
        )
    check_flags(config.devices.xla.flags)
    _check_precision(config)
    _check_loss_scale(config)
    _check_collective_matmul(config)
    config = replace(config, memory=with_offload(config.memory))
    rest = rest_axis(asdict(config.mesh))
    if planned and rest is not None:
        raise UserError(f"mesh.{rest}: -1, but nothing says how many devices there will be; give it a size")
    _check_mixture(config.data)
    if not planned:
        for each in config.data.parts() or (config.data,):
            _check_paths(each)
    device_count = None if planned else known_devices(config.devices)
    if device_count is not None:
        config = replace(config, mesh=resolve_mesh(config.mesh, device_count, config.devices.fit, simulated=True))
    check_layout(config)
    return config


def _check_precision(config: Config) -> None:
    precision, optimizer = config.precision, config.optimizer
    for key in ("param_dtype", "compute_dtype", "reduce_dtype"):
        if getattr(precision, key) == "float64" and precision.policy != "fp64":
            raise UserError(
                f"precision.{key}: 'float64' needs precision.policy fp64, not {precision.policy};"
                " allowed: float32, bfloat16, float16"
            )
    if precision.half is not None and precision.policy not in WITH_HALF:
        raise UserError(
            f"precision.half: {precision.half!r} stands for the float16 of a policy, and"
            f" {precision.policy} has none; allowed with {', '.join(WITH_HALF)}; or set"
            " precision.compute_dtype"
        )
    at_rest = (precision.half or "float16") if precision.policy == "O3" else "float32"
    if (precision.param_dtype or at_rest) != "float16":
        return
    if optimizer.name in ("adafactor", "muon"):
        raise UserError(
            f"optimizer.name: {optimizer.name!r} divides by constants that are zero in float16, in which"
            " this precision keeps the optimizer's state; allowed: adamw, sgd, lion; or"
            " precision.param_dtype=float32"
        )
    if optimizer.name == "adamw" and optimizer.eps < SMALLEST_FLOAT16:
        raise UserError(
            f"optimizer.eps: {optimizer.eps:g} is zero in float16, in which this precision keeps the"
            f" optimizer's state; allowed: at least {SMALLEST_FLOAT16:g}, such as 1e-4; or"
            " precision.param_dtype=float32"
        )


def _check_loss_scale(config: Config) -> None:
    """Refuse what would have no effect."""
    precision, scale = config.precision, config.precision.loss_scale
    scaled = precision.policy in ("fp16", "O1", "O2")
    compute = precision.compute_dtype or (precision.half or "float16" if scaled else "float32")
    mode = scale.mode or ("dynamic" if compute == "float16" and precision.policy != "O3" else "none")
    moves = ("growth_factor", "backoff_factor", "growth_interval")
    unused = {"dynamic": (), "fixed": moves, "none": ("init_scale", *moves)}[mode]
    for key in unused:
        value, usual = getattr(scale, key), getattr(type(scale)(), key)
        if value != usual:
            raise UserError(
                f"precision.loss_scale.{key}: {value:g} has no effect where the scale is {mode}; allowed:"
                f" {usual:g}; or precision.loss_scale.mode=dynamic"
            )
    skips, usual = precision.max_consecutive_skips, type(precision)().max_consecutive_skips
    if mode == "none" and config.train.on_nonfinite != "skip" and skips != usual:
        raise UserError(
            f"precision.max_consecutive_skips: {skips} has no effect: without a loss scale, and with"
            f" train.on_nonfinite {config.train.on_nonfinite}, no step is skipped; allowed: {usual}; or"
            " train.on_nonfinite=skip"
        )


def check_layout(config: Config) -> None:
    """Check that model and batch divide over the mesh. Raises `UserError`; a size of -1 is not judged.

    Done by `load_config`; done again by the trainer when it has put the true sizes in place of a -1.
    """
    mesh = {axis: max(size, 1) for axis, size in asdict(config.mesh).items()}
    for entry in entries_of(config):
        check_options = getattr(registry.options(entry.folder, entry.name), "check_options", None)
        if check_options is not None:
            check_options(config, mesh)
    check_pipeline(config, mesh["pipe"])
    _check_batch(config, mesh)
    check_grad_sync(config, mesh)
    check_memory(config)
    check_prefetch(config)


def _check_collective_matmul(config: Config) -> None:
    parallel, precision = config.parallel, config.precision
    fp8 = precision.policy == "fp8"
    check_collective_matmul(parallel.collective_matmul, sequence_parallel=parallel.sequence_parallel, fp8=fp8)
    if parallel.collective_matmul and config.mesh.pipe > 1:
        check_conditions(pipeline_cond=parallel.pipeline_cond)
    per_op = precision.policy == "O1" if precision.per_op is None else precision.per_op
    if parallel.collective_matmul and per_op:
        raise UserError(
            "parallel.collective_matmul: true has its own gradients, whose products precision.per_op (O1)"
            " would not cast; allowed: false; or precision.policy=O2"
        )


def _check_batch(config: Config, mesh: dict[str, int]) -> None:
    batch, microbatches = config.data.global_batch, config.parallel.microbatches
    ranks = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    parts = ranks * microbatches
    if batch % parts == 0:
        return
    batches = [n for n in (batch - batch % parts, batch - batch % parts + parts) if n]
    counts = near(divisors(batch // ranks), microbatches) if batch % ranks == 0 else "none"
    raise UserError(
        f"data.global_batch: {batch} does not divide by {parts} (data {mesh['data']} x fsdp {mesh['fsdp']} x expert"
        f" {mesh['expert']} x microbatches {microbatches}); nearest batch sizes that work: {near(batches, batch)};"
        f" parallel.microbatches that work with {batch}: {counts}"
    )


def _check_mixture(data: DataConfig) -> None:
    for key, usual in (("source", "text"), ("path", "stdlib"), ("val_path", None)):
        if data.mixture and getattr(data, key) != usual:
            raise UserError(
                f"data.{key}: {show(getattr(data, key))} has no effect beside data.mixture; allowed:"
                f" {show(usual)}; or data.mixture=[]"
            )


def _check_paths(data: DataConfig) -> None:
    facts = SourceFacts.of(data.source)
    if facts.reads_files and data.path not in facts.words:
        _check_exists(data.path, "data.path", f"{facts.path} for data.source {data.source}")
    if facts.reads_files and facts.val_path and data.val_path is not None:
        _check_exists(data.val_path, "data.val_path", facts.val_path)


def _check_exists(path: str, key: str, allowed: str) -> None:
    try:
        found = bool(path) and Path(path).expanduser().exists()
    except (OSError, RuntimeError) as error:  # too long, a parent folder that may not be read; ~ of a user there is not
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{key}: {show(path)}: {reason}; allowed: {allowed}") from None
    if not found:
        raise UserError(f"{key}: {show(path)} does not exist (seen from {Path.cwd()}); allowed: {allowed}")
