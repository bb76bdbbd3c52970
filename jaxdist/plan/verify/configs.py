"""`verify` of what a configuration trains, in float64."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist.build import assemble
from jaxdist.config.schema import Config, MemoryConfig, MeshConfig, ParallelConfig
from jaxdist.config.sections.precision import PrecisionConfig
from jaxdist.errors import UserError
from jaxdist.mesh import AnyMesh, make_mesh
from jaxdist.model import ModelDef
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.plan.verify.check import verify_training
from jaxdist.plan.verify.findings import Verification
from jaxdist.plan.verify.layout import layout_text
from jaxdist.plan.verify.models import training_of, verdict
from jaxdist.plan.verify.subject import moved
from jaxdist.precision.policy import make_precision
from jaxdist.specs import PyTree


def without_rounding(config: Config) -> tuple[Config, str]:
    """(the configuration in float64, what of it is left out so that the layout can be compared, in words)."""
    for name, section, off in (
        ("distill.teacher", config.distill, "distill.mixing=0"),
        ("parallel.local.every", config.parallel.local, "parallel.local.every=0"),
    ):
        if section.on:
            raise UserError(f"{name}: no layout of one device trains so; set {off}, or verify a configuration without")
    left = []
    if config.precision.policy not in ("fp32", "fp64"):
        left.append(f"precision.policy {config.precision.policy}")
    sync = config.parallel.grad_sync
    if sync.wire_dtype is not None:
        left.append(f"parallel.grad_sync.wire_dtype {sync.wire_dtype}")
        sync = replace(sync, wire_dtype=None)
    model = config.model.replace(attention="xla") if hasattr(config.model, "attention") else config.model
    config = replace(
        config, model=model, precision=PrecisionConfig(policy="fp64"), parallel=replace(config.parallel, grad_sync=sync)
    )
    return config, f"left out, as it rounds: {', '.join(left)}" if left else ""


def on_one_device(config: Config) -> Config:
    """The configuration without a layout."""
    return replace(config, mesh=MeshConfig(), parallel=ParallelConfig(), memory=MemoryConfig())


def synthetic(config: Config, mesh: AnyMesh) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches by the shapes of the configuration: ids or classes at random, floats around 0, ragged weights."""
    shapes, rng = batch_of(config, mesh), np.random.default_rng(config.train.seed)
    own = (getattr(config.model, key, None) for key in ("vocab", "classes"))
    below = min((size for size in own if size), default=2)
    while True:
        batch = {}
        for name, leaf in shapes.items():
            draw = rng.integers(0, below, leaf.shape) if leaf.dtype.kind in "iub" else rng.standard_normal(leaf.shape)
            batch[name] = (np.ones(leaf.shape) if name == "weights" else draw).astype(leaf.dtype)
        yield ragged(batch)


def ragged(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with weights of which more count along the rows: a mean of means is none of these."""
    if "weights" not in batch:
        return batch
    weights = np.asarray(batch["weights"])
    share = np.linspace(0.2, 1, len(weights)).reshape(-1, *[1] * (weights.ndim - 1))
    kept = np.random.default_rng(0).random(weights.shape) < share
    return {**batch, "weights": (weights * kept).astype(weights.dtype)}


def verify_config(config: Config, mesh: Mesh, batches: Sequence[PyTree], seen: Callable[[str], None]) -> Verification:
    """`verify` of what a configuration trains, on its mesh.

    batches: one for each step. seen: gets a line about what comes next.
    """
    wide, left_out = without_rounding(config)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        parts = assemble(wide, mesh)
    if not isinstance(parts.model, ModelDef):
        seen("the loss of a module: its trace, its parts, then the layout")
        parts = assemble(config, mesh)
        options = replace(parts.options, precision=make_precision("fp32"))
        return verify_training(parts.model, None, batches[0], mesh, options=options)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        one = make_mesh(devices=[mesh.devices.flat[0]])
        alone = assemble(on_one_device(wide), one)
        assert isinstance(alone.model, ModelDef)
        params = jax.device_get(jax.jit(alone.model.init)(jax.random.key(config.train.seed)))
        params = jax.device_get(moved(params))
        seen("one device")
        want = training_of(alone.model, alone.optimizer, one, alone.options, params, batches, alone.order)
        seen(layout_text(mesh, parts.options))
        got = training_of(parts.model, parts.optimizer, mesh, parts.options, params, batches, parts.order)
    return verdict(got, want, mesh, parts.options, left_out)
