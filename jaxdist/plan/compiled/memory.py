"""Memory of a compiled step on one device, by the compiler's own account of its buffers."""

from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jaxdist import registry
from jaxdist.build import Parts
from jaxdist.config.entries import ModelFacts, SourceFacts
from jaxdist.config.schema import Config
from jaxdist.data import Source, batch_shapes, leaves_of
from jaxdist.data.samples import batch_leaves
from jaxdist.errors import UserError
from jaxdist.mesh import HOST, AnyMesh, on_cpu
from jaxdist.optim import leave_out
from jaxdist.specs import BATCH_SPEC, PyTree, bytes_per_device
from jaxdist.state import TrainState


class Footprint(NamedTuple):
    """Bytes of a step on one device.

    arguments: state and batch, and the parameters of a teacher, which stay beside them
    outputs: the new state and the metrics
    aliased: outputs that are written into buffers of arguments
    temporary: the most that is allocated beside these at any time
    host: in host memory
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    host: int

    @property
    def peak(self) -> int:
        """The most memory of the device that the step takes at any time."""
        return self.arguments + self.outputs - self.aliased + self.temporary


def check_windows(config: Config) -> None:
    """Raise `UserError` for a source whose batches are not windows of ids: only its data tell their shapes.

    A source of somebody else's does not say what it gives. It is taken for one of ids if the model takes nothing else.
    Nor is anything refused where the model says what a sample is.
    """
    if sample_of(config):
        return
    names = [part.source for part in config.data.parts() or (config.data,)]
    known = (True, None) if ModelFacts.of(config.model.name).ids_only else (True,)
    if found := [name for name in names if SourceFacts.of(name).ids not in known]:
        raise UserError(
            f"data.source: {found[0]!r} gives samples whose shapes are known only when it is read, and a"
            f" plan is made without data; allowed: {', '.join(SourceFacts.with_fact(ids=True))}; or a model"
            " whose Options say the shapes by a method sample() (docs/extending.md)"
        )


def sample_of(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves of a sample, as the method `sample` of the model's own options says; {} where it has none. (A model of
    somebody else's without options has the keys of all shipped ones, but is none of them.)"""
    own = getattr(registry.options(ModelFacts.folder, config.model.name), "Options", None)
    found = config.model.sample() if hasattr(own, "sample") else {}
    return {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in found.items()}


def batch_of(config: Config, mesh: AnyMesh, source: Source | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the global batch of one step, with their shardings.

    source: None if no data has been read: the options of the model say them (`sample`), or else they are windows of
        ids. `UserError` is raised then as by `check_windows`
    """
    sizes = {"global_batch": config.data.global_batch, "seq_len": config.data.seq_len}
    if source is not None:
        shapes = leaves_of(source, **sizes)
    elif sample := sample_of(config):
        shapes = batch_leaves(sample, config.data.global_batch)
    else:
        check_windows(config)
        shapes = batch_shapes(**sizes, apart=config.data.apart)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in shapes.items()}


def resident_bytes(tree: PyTree, *, on_host: bool = False) -> int:
    """Exact bytes of a tree of sharded arrays in one device's memory, or in its part of host memory."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if (leaf.sharding.memory_kind == HOST) == on_host]
    return sum(bytes_per_device(leaf, leaf.sharding.spec, leaf.sharding.mesh) for leaf in leaves)


def held_bytes(state: TrainState) -> dict[str, int]:
    """Bytes of the state's buffers on one device, by part, as they are allocated."""
    device = min(jax.local_devices(), key=lambda device: device.id)

    def size(tree: PyTree) -> int:
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != HOST]
        shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    return {"parameters": size(state.params), "optimizer state": size(state.opt_state)}


def compile_step(parts: Parts, batch: PyTree) -> Any:
    """The step as `jax.stages.Compiled`, for the devices of its state's mesh."""
    # Optimisation of CPU code takes a third of the time, and comes after buffers and collectives are settled.
    simulated = on_cpu(parts.target.step.sharding.mesh)
    options = {"xla_backend_optimization_level": 0} if simulated else {}
    return parts.step.lower(parts.target, batch).compile(compiler_options=options)


def footprint_of(program: Any, config: Config, parts: Parts) -> Footprint | None:
    """The memory of a compiled step (`jax.stages.Compiled`); None where the backend keeps no account of it.

    CPU devices have no memory of their own: their compiler counts arrays in host memory as the device's, and fetches
    nothing. The figures here are those of a device that has. So these arrays are taken out, and `temporary` has room
    for the gradients and the fetched arrays, which are all there while the optimizer runs. (What the compiler needs
    beside these at that time is not counted.)
    """
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    host, temporary = resident_bytes(parts.target, on_host=True), int(analysis.temp_size_in_bytes)
    inside = 0 if analysis.host_argument_size_in_bytes else host
    if inside:
        temporary = max(temporary, resident_bytes(leave_out(parts.target.params, config.optimizer.frozen)) + host)
    teacher = 0 if parts.teaching is None else resident_bytes(parts.teaching.target)
    return Footprint(
        int(analysis.argument_size_in_bytes) - inside + teacher,
        int(analysis.output_size_in_bytes) - inside,
        int(analysis.alias_size_in_bytes) - inside,
        temporary,
        host,
    )
