"""What a step takes of a device's memory, compiled: the compiler's own account of its buffers."""

from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jaxdist.build import Parts
from jaxdist.config.fields import parse_mixture
from jaxdist.config.schema import Config
from jaxdist.data import Source, batch_shapes, leaves_of
from jaxdist.errors import UserError
from jaxdist.mesh import HOST, AnyMesh, on_cpu
from jaxdist.optim import leave_out
from jaxdist.specs import BATCH_SPEC, PyTree, bytes_per_device


class Footprint(NamedTuple):
    """Bytes on one device. arguments: state and batch; outputs: the new state, metrics; aliased: outputs that lie in
    arguments' buffers; temporary: the most that lives beside these at any time. host: of its host memory."""

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    host: int

    @property
    def peak(self) -> int:
        """The most of the device's own memory that the step takes at any time."""
        return self.arguments + self.outputs - self.aliased + self.temporary


def check_windows(config: Config) -> None:
    """Raise `UserError` where a batch is not made of windows of ids, and its shapes are in the data alone. Not known of
    a source of somebody else's, which is taken for one of ids."""
    names = [part.source for part in parse_mixture(config.data.mixture)] or [config.data.source]
    own = "." in config.model.name  # the shipped model takes ids only
    if found := [name for name in names if name == "images" or (name == "iterable" and own)]:
        raise UserError(
            f"data.source: {found[0]!r} gives samples whose shapes are known only when it is read, and a"
            " plan is made without data; allowed: text, tokens, parquet, arrayrecord"
        )


def batch_of(config: Config, mesh: AnyMesh, source: Source | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """The global batch of one step, laid out. source: None where no data has been read; raises `UserError` then for
    what `check_windows` refuses."""
    sizes = {"global_batch": config.data.global_batch, "seq_len": config.data.seq_len}
    if source is None:
        check_windows(config)
    shapes = batch_shapes(**sizes) if source is None else leaves_of(source, **sizes)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in shapes.items()}


def resident_bytes(tree: PyTree, *, on_host: bool = False) -> int:
    """Exact bytes of a tree of laid-out arrays in one device's own memory, or in its part of host memory."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if (leaf.sharding.memory_kind == HOST) == on_host]
    return sum(bytes_per_device(leaf, leaf.sharding.spec, leaf.sharding.mesh) for leaf in leaves)


def compile_step(parts: Parts, batch: PyTree) -> Any:
    """The step as `jax.stages.Compiled`, for the devices of its state's mesh. For simulated devices code is not
    optimised: that is a third of the time, and comes after buffers and collectives are settled."""
    simulated = on_cpu(parts.target.step.sharding.mesh)
    options = {"xla_backend_optimization_level": 0} if simulated else {}
    return parts.step.lower(parts.target, batch).compile(compiler_options=options)


def footprint_of(program: Any, config: Config, parts: Parts) -> Footprint | None:
    """The account of a compiled step (`jax.stages.Compiled`); None where the backend keeps none.

    CPU devices have no memory of their own: their compiler counts what rests in host memory as the device's, and
    nothing is fetched. So that the figures are those of devices that do, this is taken out, and while the optimizer
    runs there are the gradients and all that was fetched. (What the compiler needs beside these then is not counted.)
    """
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    host, temporary = resident_bytes(parts.target, on_host=True), int(analysis.temp_size_in_bytes)
    inside = 0 if analysis.host_argument_size_in_bytes else host
    if inside:
        temporary = max(temporary, resident_bytes(leave_out(parts.target.params, config.optimizer.freeze)) + host)
    return Footprint(
        int(analysis.argument_size_in_bytes) - inside,
        int(analysis.output_size_in_bytes) - inside,
        int(analysis.alias_size_in_bytes) - inside,
        temporary,
        host,
    )
