"""The model that a distilled step trains: the student, whose head also reads what its teacher says of each token.

The teacher's table over the vocabulary is a frozen parameter of the head, `head.teacher.table`: so the strategy shards
and gathers it like others. It is there only while a step runs (`jaxdist.distill.step`). Logits of both exist for one
chunk of tokens at a time.

Legend: B batch, S sequence, D model width, V vocabulary, C tokens of a chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.distill.divergence import TopLogits, divergence, mixed
from jaxdist.errors import UserError
from jaxdist.model import ModelDef
from jaxdist.nn.embedding import vocab_cross_entropy, vocab_logits
from jaxdist.nn.loss import counted_targets, loss_chunk, sum_over_chunks
from jaxdist.specs import PyTree

# Leaves of a batch, and the name of the teacher's parameters in the student's head.
HIDDEN, VALUES, IDS, LOGSUMEXP = "teacher_hidden", "teacher_values", "teacher_ids", "teacher_logsumexp"
TEACHER = "teacher"
FROZEN = f"head.{TEACHER}.*"


class Mixture(NamedTuple):
    """What a student learns from: mixing of the teacher, 1 - mixing of the data. chunk: as `model.loss_chunk`."""

    temperature: float
    mixing: float
    chunk: int | None = None


def vocabulary_of(model: ModelDef, key: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the model's table over the vocabulary, and of the bias if it has one.

    Raises `UserError` for a model without. key: of the configuration, and what it says.
    """
    if model.vocabulary is None or model.features is None:
        raise UserError(
            f"{key} has no table over a vocabulary that a divergence could be computed from piece by piece; allowed:"
            " gpt, bert, or a model whose head has the methods features and vocabulary; or a loss of your own with"
            " jaxdist.distill_loss"
        )
    embed = model.shapes["embed"] if model.tied else None
    found: tuple[jax.ShapeDtypeStruct, ...] = jax.eval_shape(model.vocabulary, model.shapes["head"], embed)
    return found


def table_shapes(table: tuple[jax.ShapeDtypeStruct, ...], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """What `vocabulary_of` gives, by name and in another dtype."""
    return {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in zip(("table", "bias"), table, strict=False)}


def table_specs(shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, P]:
    """The specs of what `table_shapes` gives: the vocabulary is split over `tensor`."""
    return {name: P("tensor", *[None] * (leaf.ndim - 1)) for name, leaf in shapes.items()}


def distilled(student: ModelDef, mixture: Mixture, table: tuple[jax.ShapeDtypeStruct, ...] = ()) -> ModelDef:
    """The student, whose loss is that of `jaxdist.distill.divergence`. Batches have leaves of the teacher besides.

    table: shapes of the teacher's table, and of its bias if it has one; (): batches hold its largest logits.
    """
    vocabulary_of(student, "model.name: the student")
    dtype = jax.tree.leaves(student.shapes)[0].dtype
    shapes = table_shapes(table, dtype)
    names, specs = tuple(shapes), table_specs(shapes)

    def with_teacher(tree: PyTree, own: PyTree) -> PyTree:
        return {**tree, "head": {**tree["head"], TEACHER: own}} if names else tree

    def init(key: jax.Array) -> PyTree:
        return with_teacher(student.init(key), {name: jnp.zeros(each.shape, dtype) for name, each in shapes.items()})

    def alone(params: PyTree) -> PyTree:
        return {name: unit for name, unit in params.items() if name != TEACHER}

    def head(params: PyTree, embed: PyTree, h: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        own = params.get(TEACHER, {})
        return _loss(student, mixture, alone(params), tuple(own[name] for name in names), embed, h, batch)

    logits = lambda params, *given: student.logits(alone(params), *given)  # noqa: E731
    shapes, specs = with_teacher(student.shapes, shapes), with_teacher(student.specs, specs)
    return student._replace(init=init, specs=specs, shapes=shapes, head=head, logits=logits, metrics=None)


def _loss(
    student: ModelDef,
    mixture: Mixture,
    params: PyTree,
    table: tuple[jax.Array, ...],
    embed: PyTree,
    h: jax.Array,
    batch: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """(sum of weighted token losses in nats, sum of weights)."""
    assert student.features is not None and student.vocabulary is not None
    h_BSD, projection = student.features(params, h), student.vocabulary(params, embed)
    targets_BS, weights_BS = counted_targets(batch["targets"], batch["weights"], h_BSD.dtype)
    hidden = (batch[HIDDEN].astype(table[0].dtype),) if table else ()
    said = hidden or TopLogits(batch[VALUES], batch[IDS], batch[LOGSUMEXP])
    of_chunk = _of_chunk(mixture.temperature, mixture.mixing)
    chunk = loss_chunk(h_BSD, projection[0], mixture.chunk) or targets_BS.size
    rows = targets_BS, weights_BS, said
    return sum_over_chunks(of_chunk, h_BSD, projection, rows, table, chunk=chunk), weights_BS.sum()


@functools.cache  # one function for each mixture: JAX compiles no second one for the same
def _of_chunk(temperature: float, mixing: float) -> Any:
    def of_chunk(logits_1CV: jax.Array, rows: Any, table: tuple[jax.Array, ...]) -> jax.Array:
        targets_1C, weights_1C, said = rows
        teacher = vocab_logits(*said, *table) if table else said
        soft = lambda: divergence(logits_1CV, teacher, temperature)  # noqa: E731
        return (mixed(vocab_cross_entropy(logits_1CV, targets_1C), soft, temperature, mixing) * weights_1C).sum()

    return of_chunk
