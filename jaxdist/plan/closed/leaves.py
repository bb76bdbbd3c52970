"""The parameters of a configuration as its devices hold them, leaf by leaf, without a trace of the step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.build import form_of, make_model, planned_mesh, prefetches_on, step_options
from jaxdist.config.schema import Config
from jaxdist.mesh import AXES
from jaxdist.model import ModelDef
from jaxdist.nn.loss import loss_chunk
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.pipeline.stages import arrange
from jaxdist.plan.compiled.memory import batch_of
from jaxdist.precision.policy import precision_of
from jaxdist.specs import STACKED, bytes_per_device, named_leaves


class Leaf(NamedTuple):
    """A parameter at rest.

    unit: "embed", "blocks" or "head".
    name: its dotted path, "blocks.mlp.up.kernel".
    spec: as the strategy places it.
    shape: of the whole array; of blocks with the stacked dim.
    nbytes: of one device's shard, all its blocks together.
    """

    unit: str
    name: str
    spec: P
    shape: jax.ShapeDtypeStruct
    nbytes: int

    @property
    def elements(self) -> int:
        """The number of elements of one device's shard."""
        return self.nbytes // self.shape.dtype.itemsize


_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061)
_TRACED = ("units", "microbatch", "work")  # kinds of results, the first words of their keys


class Known:
    """What is known of the candidates of one search: results by the keys that they depend on, each made once.

    (Configurations hash slowly, so that a cache by the whole configuration would cost more than what it saves.)
    """

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The result of `make` for this key, made when it is first asked for."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def traced(self) -> dict[tuple[Any, ...], Any]:
        """The results that took a trace, and that another process can read."""
        return {key: each for key, each in self._found.items() if key[0] in _TRACED}

    def learn(self, found: dict[tuple[Any, ...], Any]) -> None:
        """Take over what another process has traced."""
        self._found |= found

    def model(self, config: Config) -> Any:
        """The model of a configuration for training (`jaxdist.build.make_model`)."""
        parallel, stages = config.parallel, config.mesh.pipe
        base = self.model_in_order(config)
        if not isinstance(base, ModelDef):
            return base

        def make() -> ModelDef:
            return arrange(base, stages=stages, chunks=parallel.chunks, blocks=parallel.stages)

        return self.get(("arranged", *model_key(config)), make)

    def model_in_order(self, config: Config, attention: str = "xla") -> Any:
        """The model with its blocks in order, as one stage has them. attention: the kernel, see `make_model`."""

        def make() -> Any:
            alone = replace(config, parallel=replace(config.parallel, chunks=1, stages=()))
            return make_model(alone, precision_of(config.precision), stages=1, training=True, attention=attention)

        return self.get(("model", *of_layers(config), attention), make)

    def primes(self, config: Config) -> tuple[int, int]:
        """Two primes that divide no dim of the model's parameters or of a sample: numbers of rows and of blocks whose
        dims are found again in a trace."""

        def make() -> tuple[int, int]:
            shapes, batch = self.model_in_order(config).shapes, batch_of(config, planned_mesh(config))
            dims = {dim for leaf in jax.tree.leaves(batch) for dim in leaf.shape[1:]}
            for unit, tree in shapes.items():
                dims |= {dim for leaf in jax.tree.leaves(tree) for dim in leaf.shape[unit == STACKED :]}
            first, second, *_ = (prime for prime in _PRIMES if all(dim % prime for dim in dims - {0}))
            return first, second

        return self.get(("primes", *of_layers(config)), make)

    def leaves(self, config: Config) -> tuple[Leaf, ...]:
        """The parameters of a configuration, in the order of its tree. The model must have blocks (`ModelDef`)."""

        def make() -> tuple[Leaf, ...]:
            mesh, model = planned_mesh(config), self.model(config)
            specs = get_strategy(step_options(config, mesh)).place(model.shapes, model.specs, mesh)
            return tuple(
                Leaf(name.partition(".")[0], name, spec, leaf, bytes_per_device(leaf, spec, mesh))
                for name, spec, leaf in named_leaves(specs, model.shapes)
            )

        return self.get(("leaves", *model_key(config), *placing_key(config)), make)

    def prefetches(self, config: Config) -> bool:
        """`prefetches_on`, which asks for installed plugins where the configuration leaves it open."""
        parallel, model = config.parallel, config.model
        if parallel.prefetch is not None:
            return bool(parallel.prefetch)
        placed = (parallel.strategy, parallel.schedule, parallel.reshard_after_forward, parallel.stages)
        key = ("prefetch", *placed, parallel.grad_sync, config.memory.remat, model.name, model.scan_blocks, config.mesh)
        return bool(self.get(key, lambda: prefetches_on(config, planned_mesh(config))))


def of_layers(config: Config) -> tuple[Any, ...]:
    """What `make_model` reads of a configuration, but for the stages that blocks are arranged for."""
    parallel = config.parallel
    split = (parallel.sequence_parallel, parallel.collective_matmul, form_of(config))
    return (config.model, config.data.seq_len, config.precision, config.optimizer.lora, *split)


def model_key(config: Config) -> tuple[Any, ...]:
    """What `make_model` reads of a configuration that may differ between candidates of a search."""
    return (*of_layers(config), config.mesh.pipe, config.parallel.chunks, config.parallel.stages)


def placing_key(config: Config) -> tuple[Any, ...]:
    """What decides how a strategy places parameters, beside the model."""
    parallel, sync = config.parallel, config.parallel.grad_sync
    return (parallel.strategy, parallel.min_shard_bytes, sync.wire_dtype, sync.deterministic, mesh_sizes(config))


def mesh_sizes(config: Config) -> tuple[int, ...]:
    """The sizes of a configuration's mesh, in the order of `AXES`."""
    return tuple(getattr(config.mesh, axis) for axis in AXES)


def parts_of_a_step(config: Config) -> int:
    """Microbatches of a step on a device."""
    parallel = config.parallel
    if not parallel.grad_sync.deterministic:
        return parallel.microbatches
    return parallel.grad_sync.virtual_shards // config.mesh.batch_shards


def rows_of(config: Config) -> float:
    """Sequences of a microbatch on a device."""
    return config.data.global_batch / (config.mesh.batch_shards * parts_of_a_step(config))


def logits_chunk(config: Config, rows: int) -> tuple[int, int]:
    """(tokens of a chunk of logits, 0 where they are whole; all tokens), for so many rows of a device."""
    tokens = rows * config.data.seq_len // config.mesh.context
    vocab, asked = config.model.vocab, getattr(config.model, "loss_chunk", 0)
    if vocab is None:
        return 0, tokens
    h = jax.ShapeDtypeStruct((1, tokens, 1), precision_of(config.precision).compute)
    table = jax.ShapeDtypeStruct((vocab // config.mesh.tensor, 1), h.dtype)
    return loss_chunk(h, table, asked), tokens
