"""The checks over several keys of a configuration, and what follows from it: sizes of the mesh, of the model. Imports
no jax."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist import registry
from jaxdist.config.entries import ModelFacts, ScheduleFacts, SourceFacts, StrategyFacts, entries_of
from jaxdist.config.resolve import has_cuda_plugin, known_devices, resolve_mesh, rest_axis
from jaxdist.config.rules.batch import check_rows
from jaxdist.config.rules.fields import keys, show
from jaxdist.config.rules.grad_sync import ORDERED_OPTIMIZERS, check_pairs, check_shards, refuse_optimizer
from jaxdist.config.rules.mesh import check_axis
from jaxdist.config.rules.overlap import check_batch_split, check_collective_matmul, check_conditions, check_split_sums
from jaxdist.config.rules.pipeline import check_counts, check_one_stage, check_stages, refuse_stages
from jaxdist.config.rules.precision import check_float64, check_half_state, check_scale, check_skips
from jaxdist.config.rules.remat import (
    AUTO,
    Remat,
    check_deterministic,
    check_offload,
    check_prefetch,
    check_prefetched,
    check_unrolled,
    refuse_split_backward,
    refuse_split_sequence,
    with_offload,
)
from jaxdist.config.rules.user_loss import LOSS_AXES, check_one_unit
from jaxdist.config.rules.xla_flags import check_flags
from jaxdist.config.sections.local import check_local
from jaxdist.errors import UserError
from jaxdist.files.user_path import user_path

if TYPE_CHECKING:
    from jaxdist.config.schema import Config, DataConfig
    from jaxdist.config.sections.observe import ObserveConfig


def check_config(config: Config, *, planned: bool = False) -> Config:
    """The checks over several keys. Returns the configuration, its mesh resolved if the device count is known.

    planned: nothing will run here, so neither the devices nor the data need to be here.
    """
    if config.train.early_stop.patience and not config.train.eval_every:
        raise UserError(
            f"train.early_stop.patience: {config.train.early_stop.patience} counts evaluations, and train.eval_every"
            " is 0; allowed: null; or set train.eval_every to the steps between evaluations"
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
    _check_profile(config)
    check_flags(config.devices.xla.flags)
    _check_documents(config)
    if not planned:
        check_packages(config.observe)
        if config.observe.plan is not None:
            _check_exists(config.observe.plan, "observe.plan", "a plan.json that jaxdist plan --out wrote, or null")
    _check_precision(config)
    _check_axes(config)
    remat = with_offload(config.memory.remat, activations=config.memory.offload.activations)
    config = replace(config, memory=replace(config.memory, remat=remat))
    if planned:
        platform = config.devices.platform
        config = with_default_remat(config, gpu=platform == "gpu" or (platform == "auto" and has_cuda_plugin()))
    rest = rest_axis(asdict(config.mesh))
    if planned and rest is not None:
        raise UserError(f"mesh.{rest}: -1, but nothing says how many devices there will be; give it a size")
    _check_mixture(config.data)
    if not planned:
        check_data_files(config.data)
    device_count = None if planned else known_devices(config.devices)
    if device_count is not None:
        config = replace(config, mesh=resolve_mesh(config.mesh, device_count, config.devices.fit, simulated=True))
    check_layout(config)
    return config


def _check_documents(config: Config) -> None:
    if config.data.apart and not ModelFacts.of(config.model.name).documents:
        raise UserError(
            f"data.documents: 'mask' keeps packed documents apart, and model.name {config.model.name!r} does not say"
            f" that it does; allowed: join; or one of {', '.join(ModelFacts.with_fact(documents=True))}; or, in the"
            " module of a model of your own, FACTS = ModelFacts(documents=True)"
        )


def _check_profile(config: Config) -> None:
    profile, steps = config.observe.profile, config.train.steps
    if profile.start is not None and profile.start + profile.steps - 1 > steps:
        raise UserError(
            f"observe.profile: start {profile.start} with {profile.steps} steps ends after train.steps {steps};"
            f" allowed: a start of at most {steps - profile.steps + 1}, or fewer steps"
        )


def check_packages(observe: ObserveConfig) -> None:
    """Raise `UserError` where the package of something that the run writes to is not installed."""
    asked = {
        "tensorboard": observe.tensorboard,
        "wandb": observe.wandb.project is not None,
        "mlflow": observe.mlflow is not None,
    }
    for package, used in asked.items():
        if used and importlib.util.find_spec(package) is None:
            raise UserError(
                f"observe.{package}: needs the package {package}, which is not installed; pip install"
                f" 'jaxdist[{package}]', or leave the key out"
            )


def _check_precision(config: Config) -> None:
    precision, optimizer, parallel = config.precision, config.optimizer, config.parallel
    keys = ("param_dtype", "compute_dtype", "reduce_dtype")
    check_float64(precision.policy, **{key: getattr(precision, key) for key in keys})
    types, scale = precision.resolved()
    check_half_state(types.param, optimizer=optimizer.name, eps=optimizer.eps)
    assert scale.mode is not None
    check_scale(scale.mode, asdict(scale), asdict(type(scale)()))
    skips = type(precision)().max_consecutive_skips
    check_skips(precision.max_consecutive_skips, skips, mode=scale.mode, on_nonfinite=config.train.on_nonfinite)
    check_collective_matmul(
        parallel.collective_matmul, sequence_parallel=parallel.sequence_parallel, fp8=types.fp8, per_op=types.per_op
    )
    optimizer.lora.check(collective_matmul=parallel.collective_matmul)
    if parallel.collective_matmul and config.mesh.pipe > 1:
        check_conditions(pipeline_cond=parallel.pipeline_cond)
    parallel.grad_sync.check(reduce_dtype=types.reduce)
    check_local(config)


def check_layout(config: Config) -> None:
    """Check that model and batch divide over the mesh. Raises `UserError`; a size of -1 is not judged.

    Done by `load_config`; done again by the trainer when it has put the true sizes in place of a -1.
    """
    mesh = {axis: max(size, 1) for axis, size in asdict(config.mesh).items()}
    for entry in entries_of(config):
        check_options = getattr(registry.options(entry.folder, entry.name), "check_options", None)
        if check_options is not None:
            check_options(config, mesh)
    _check_axes(config)
    _check_stages(config, mesh["pipe"])
    check_rows(
        config.data.global_batch,
        {axis: mesh[axis] for axis in ("data", "fsdp", "expert")}
        | {"microbatches": config.parallel.microbatches}
        | ({"batch_split": config.parallel.batch_split} if config.parallel.batch_split > 1 else {}),
    )
    if config.parallel.grad_sync.deterministic:
        _check_deterministic(config, mesh)
    if ModelFacts.of(config.model.name).user_loss:
        _check_loss(config)
    _check_blocks(config)


def _check_axes(config: Config) -> None:
    """Before the mesh is fitted to devices: what is proposed then must not be refused afterwards."""
    unused = axes_without_layers(config)
    for axis in unused:
        check_axis(axis, getattr(config.mesh, axis), f"model {config.model.name}", unused=unused)


def axes_without_layers(config: Config) -> tuple[str, ...]:
    """The mesh axes that no layer of the configuration's model uses."""
    model = config.model.name
    options = registry.options(ModelFacts.folder, model)
    if (by_model := getattr(options, "unused_axes", None)) is not None:
        return tuple(by_model(config.model))
    # A model of somebody else's that says nothing may use `tensor`; that is seen when it is built.
    usual = LOSS_AXES if ModelFacts.of(model).user_loss else ("context",)
    return tuple(getattr(options, "UNUSED_AXES", usual))


def _check_stages(config: Config, stages: int) -> None:
    parallel, layers, chunks = config.parallel, config.model.stacked, config.parallel.chunks
    schedule, facts = parallel.schedule, ScheduleFacts.of(parallel.schedule)
    if facts.one_stage:
        check_one_stage(stages, schedule)
    if layers is not None and (not parallel.stages or config.mesh.pipe != -1):
        check_stages(parallel.stages, layers=layers, stages=stages, chunks=chunks)
    check_counts(schedule, stages=stages, microbatches=parallel.microbatches, chunks=chunks)
    if facts.power_of_two:
        check_pairs(parallel.microbatches, schedule)


def _check_deterministic(config: Config, mesh: dict[str, int]) -> None:
    sync, parallel = config.parallel.grad_sync, config.parallel
    check_shards(sync.virtual_shards, mesh, microbatches=parallel.microbatches, schedule=parallel.schedule)
    check_rows(config.data.global_batch, {"parallel.grad_sync.virtual_shards": sync.virtual_shards})
    shipped = keys(type(config.optimizer))["name"].rule.choices  # of somebody else's the step finds out
    if config.optimizer.name in set(shipped) - set(ORDERED_OPTIMIZERS):
        refuse_optimizer(f"{config.optimizer.name!r} sums")
    check_deterministic(config.memory.remat)


def _check_loss(config: Config) -> None:
    """Refuse keys that need blocks, where `model.name` gives a loss."""
    parallel, unset = config.parallel, type(config.parallel)()
    if ScheduleFacts.of(parallel.schedule).one_stage is False:
        refuse_stages(f"model.name: {config.model.name!r}", parallel.schedule, allowed="parallel.schedule=accumulate")
    for key in ("prefetch", "stages", "sequence_parallel", "collective_matmul", "batch_split"):
        if (given := getattr(parallel, key)) and given != getattr(unset, key):
            raise UserError(
                f"parallel.{key}: {show(given)} is for models with blocks, and model.name {config.model.name!r} is a"
                f" loss, which is one unit; allowed: {show(getattr(unset, key))}"
            )
    check_one_unit(prefetch=0, remat=config.memory.remat, fp8=config.precision.resolved()[0].fp8)


def _check_blocks(config: Config) -> None:
    """How blocks are run: in which loop, with what kept, and how far ahead."""
    parallel, remat, scan = config.parallel, config.memory.remat, config.model.scan_blocks
    facts = ScheduleFacts.of(parallel.schedule)
    several = facts.one_stage is False
    deterministic, sequence = parallel.grad_sync.deterministic, parallel.sequence_parallel
    check_unrolled(scan, remat, prefetch=parallel.prefetch or 0, deterministic=deterministic)
    check_batch_split(parallel.batch_split, prefetch=parallel.prefetch or 0, deterministic=deterministic)
    check_split_sums(parallel.batch_split, tensor=config.mesh.tensor, sequence_parallel=sequence)
    if remat == "sqrt" and sequence:
        refuse_split_sequence()
    if remat == "sqrt" and facts.split_backward:
        refuse_split_backward(parallel.schedule)
    check_offload(remat, schedule=parallel.schedule, several=several)
    if not parallel.prefetch:
        return
    if several:
        refuse_stages("parallel.prefetch: 1", parallel.schedule, allowed="0")
    check_prefetch(parallel.prefetch, reshard_after_forward=parallel.reshard_after_forward, deterministic=deterministic)
    check_prefetched(remat)


def default_remat(config: Config, *, gpu: bool) -> Remat:
    """`memory.remat`, and where it is auto: "dots" on GPUs for a model with blocks, if nothing that is set excludes it,
    else "none". Whether "dots" fits, `plan.auto_remat` finds out. Figures: docs/plan.md. gpu: what it runs on."""
    if config.memory.remat != AUTO:
        return config.memory.remat
    excluded = config.parallel.grad_sync.deterministic or ModelFacts.of(config.model.name).user_loss
    return "dots" if gpu and not excluded else "none"


def with_default_remat(config: Config, *, gpu: bool) -> Config:
    """The configuration with `default_remat`."""
    return replace(config, memory=replace(config.memory, remat=default_remat(config, gpu=gpu)))


def prefetches(config: Config, *, gpu: bool) -> bool:
    """Whether a step prefetches: as `parallel.prefetch` says, or, where that is null, under zero3 over several GPUs if
    nothing that is set excludes it. Figures: docs/plan.md. gpu: what it runs on."""
    parallel = config.parallel
    if parallel.prefetch is not None:
        return bool(parallel.prefetch)
    stages = config.mesh.pipe != 1 or parallel.stages or not ScheduleFacts.of(parallel.schedule).one_stage
    one_unit = ModelFacts.of(config.model.name).user_loss
    if not gpu or not StrategyFacts.of(parallel.strategy).regathers or config.mesh.shards == 1 or stages or one_unit:
        return False
    try:
        _check_blocks(replace(config, parallel=replace(parallel, prefetch=1)))
    except UserError:
        return False
    return True


_UNROLLED = 32  # blocks: on a machine with an H200, XLA compiled each for 1.3 s


def one_device(config: Config) -> bool:
    """Whether a run has one device."""
    return all(size == 1 for size in asdict(config.mesh).values())


def unrolls(config: Config, *, gpu: bool) -> bool:
    """Whether blocks run without a loop where `model.scan_blocks` is null: on one GPU, for up to 32 blocks, if nothing
    that is set excludes it. Several GPUs would need more memory. Figures: docs/compiler.md. gpu: what it runs on."""
    model = config.model
    if not gpu or model.scan_blocks is not None or not one_device(config) or not 0 < (model.stacked or 0) <= _UNROLLED:
        return False
    try:
        _check_blocks(replace(config, model=model.replace(scan_blocks=0)))
    except UserError:
        return False
    return True


def _check_mixture(data: DataConfig) -> None:
    for key, usual in (("source", "text"), ("path", "stdlib"), ("val_path", None)):
        if data.mixture and getattr(data, key) != usual:
            raise UserError(
                f"data.{key}: {show(getattr(data, key))} has no effect beside data.mixture; allowed:"
                f" {show(usual)}; or data.mixture=[]"
            )


def check_data_files(data: DataConfig) -> None:
    """Raise `UserError` where a file or folder that the data are read from does not exist."""
    for each in data.parts() or (data,):
        _check_paths(each)


def _check_paths(data: DataConfig) -> None:
    facts = SourceFacts.of(data.source)
    if facts.reads_files and data.path not in facts.words:
        _check_exists(data.path, "data.path", f"{facts.path} for data.source {data.source}")
    if data.val_path is not None and not facts.val_path:
        raise UserError(
            f"data.val_path: {show(data.val_path)} is not read by data.source {data.source}, which holds a part of its"
            " own out; allowed: null, and data.held_out says how much; or data.source tokens or jsonl"
        )
    if facts.reads_files and data.val_path is not None:
        _check_exists(data.val_path, "data.val_path", facts.val_path)


def _check_exists(path: str, key: str, allowed: str) -> None:
    if not (path and user_path(path, key=key).exists()):
        raise UserError(f"{key}: {show(path)} does not exist (seen from {Path.cwd()}); allowed: {allowed}")
