"""A teacher: a trained model that only computes, in a layout and a precision of its own."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from jaxdist.collectives import psum, to_varying
from jaxdist.distill.divergence import vocab_logsumexp
from jaxdist.distill.model import HIDDEN, IDS, LOGSUMEXP, VALUES, table_shapes, table_specs, vocabulary_of
from jaxdist.init import state_target
from jaxdist.mesh import BATCH_LIKE, AnyMesh, check_mesh
from jaxdist.model import ModelDef
from jaxdist.nn.embedding import vocab_logits, whole_vocab
from jaxdist.nn.loss import loss_chunk
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.microbatch import sample_keys
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.relay import on_first_stage
from jaxdist.parallel.program import in_precision, make_program
from jaxdist.specs import BATCH_SPEC, STACKED, PyTree, active_specs, batch_spec, unit_specs, without_idle
from jaxdist.state import shardings_of, specs_of_arrays


class Teacher:
    """A teacher. Its parameters are not trained: there is no gradient, and no optimizer state.

    - model: without dropout, arranged for as many stages as the mesh has.
    - options: its strategy and precision; others are not read.
    - table: shapes of its table over the vocabulary, and of the bias if it has one.
    - target: its parameters as ShapeDtypeStructs with shardings.
    - params: the parameters; () before they are loaded.
    """

    def __init__(self, model: ModelDef, mesh: AnyMesh, options: StepOptions, *, key: str = "distill.teacher") -> None:
        check_mesh(mesh)
        self.mesh, self.options = mesh, options
        self.table = vocabulary_of(model, key)
        self.model = in_precision(model, options.precision)
        self.target = state_target(model, optax.identity(), mesh, options).params
        self.params: PyTree = ()
        self.features = features_program(self.model, mesh, specs_of_arrays(self.target), options)

    def place(self, params: PyTree) -> None:
        """Take these parameters, whole arrays on the host or devices, in the teacher's layout."""
        typed = jax.tree.map(lambda leaf, like: jax.numpy.asarray(leaf, like.dtype), params, self.target)
        self.params = jax.device_put(typed, shardings_of(self.target))

    def read_table(self, target: PyTree) -> PyTree:
        """The table over the vocabulary, in the layout of the student's step: {"table": ..., "bias": ...}.

        target: its ShapeDtypeStructs with shardings.
        """
        model = self.model
        assert model.vocabulary is not None and jax.tree.leaves(self.params), "the teacher is not loaded"

        def read(params: PyTree) -> PyTree:
            found = model.vocabulary(params["head"], params["embed"] if model.tied else None)  # type: ignore[misc]
            return {name: leaf.astype(target[name].dtype) for name, leaf in zip(target, found, strict=True)}

        return jax.jit(read, out_shardings=shardings_of(target))(self.params)

    def leaf(self, batch: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
        """The leaf that it adds to a batch, as a ShapeDtypeStruct."""
        found = jax.eval_shape(self.features, self.target, batch)
        sharding = NamedSharding(self.mesh, BATCH_SPEC)
        return {HIDDEN: jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=sharding)}


def features_program(
    model: ModelDef, mesh: AnyMesh, specs: PyTree, options: StepOptions
) -> Callable[[PyTree, PyTree], Any]:
    """Compiled (parameters, batch) -> what the table of the vocabulary multiplies, [B, S, D], split like the batch."""
    strategy, units = get_strategy(options), unit_specs(specs)
    program = make_program(model, strategy, specs)
    hidden, features = program.hidden, model.features
    assert hidden is not None and features is not None

    def region(params: PyTree, batch: PyTree) -> jax.Array:
        rows = jax.tree.leaves(batch)[0].shape[0]
        batch = to_varying({**batch, "keys": sample_keys(0, jax.numpy.int32(0), rows)}, BATCH_LIKE)
        diff, captured = strategy.begin(params, specs, STACKED)
        h = hidden(diff, captured, batch)
        head = strategy.gather(diff["head"], captured["head"], units["head"])
        return psum(on_first_stage(lambda h: features(head, h), h), "pipe")

    rows = batch_spec(mesh)
    return jax.jit(jax.shard_map(region, mesh=mesh, in_specs=(active_specs(specs, mesh), rows), out_specs=rows))


def top_program(teacher: Teacher, *, top_k: int, temperature: float, chunk: int | None = None) -> Callable[..., Any]:
    """The function batch -> the teacher's largest logits, {VALUES, IDS, LOGSUMEXP: [B, S, ...]}.

    chunk: tokens whose logits exist at a time, as `model.loss_chunk`.
    """
    mesh, rows, dtype = teacher.mesh, batch_spec(teacher.mesh), teacher.options.precision.compute
    shapes = table_shapes(teacher.table, dtype)
    specs = {name: without_idle(spec, mesh) for name, spec in table_specs(shapes).items()}
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, leaf in shapes.items()
    }
    tables: list[PyTree] = []

    def region(table: PyTree, h: jax.Array) -> dict[str, jax.Array]:
        projection = tuple(table[name] for name in shapes)
        tokens = h.shape[0] * h.shape[1]
        size = loss_chunk(h, projection[0], chunk) or tokens
        count = -(-tokens // size)
        flat = jax.numpy.pad(h.reshape(tokens, -1), ((0, count * size - tokens), (0, 0)))

        def of_chunk(h_CD: jax.Array) -> dict[str, jax.Array]:
            logits = vocab_logits(h_CD[None].astype(dtype), *projection)
            values, ids = jax.lax.top_k(whole_vocab(logits)[0], top_k)
            return {VALUES: values, IDS: ids, LOGSUMEXP: vocab_logsumexp(logits / temperature)[0]}

        def uncut(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(count * size, *leaf.shape[2:])[:tokens].reshape(*h.shape[:2], *leaf.shape[2:])

        return jax.tree.map(uncut, jax.lax.map(of_chunk, flat.reshape(count, size, -1)))

    run = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=(specs, rows), out_specs=rows))

    def top(batch: PyTree) -> dict[str, jax.Array]:
        if not tables:
            tables.append(jax.block_until_ready(teacher.read_table(target)))  # before the next program communicates
        found: dict[str, jax.Array] = run(tables[0], teacher.features(teacher.params, batch))
        return found

    return top
