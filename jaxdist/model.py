"""The type of a model. Layers make one (`jaxdist.nn.model_def`), and a step knows no more of them than this."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxdist.errors import UserError
from jaxdist.specs import STACKED, PyTree, marked_specs

# Metrics of the step and of a run: those of a loss or a model have other names.
TAKEN = (
    "step", "loss", "weight", "grad_norm", "grads", "skipped", "skipped_in_a_row", "loss_scale", "lr", "tokens_per_s",
    "samples_per_s", "data_wait", "step_s", "mfu", "peak_memory_bytes", "sent_bytes", "time", "arrays",
)  # fmt: skip

# The "gradient" of a parameter that no optimizer updates -> its update, which is added to it. The layer that has the
# parameter says by a `custom_vjp` what that "gradient" is, such as a number of tokens. For example: jnp.zeros_like
UpdateRule = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_static
@dataclass(frozen=True)
class BlockOrder:
    """The order of stacked blocks in a pipeline of so many stages: a pytree without leaves.

    rows: the block in each row, -1 for none (`order_of_blocks`); () where the order is the model's.
    """

    rows: tuple[int, ...]
    stages: int


class ModelDef(NamedTuple):
    """A model as pure functions. Parameters are {"embed", "blocks" (every leaf stacked, [layers, ...]), "head"}.

    For example, the loss of a model of one block, where keys_B is one dropout key a sample:

        h = model.embed(params["embed"], batch, keys_B)
        h = model.block(jax.tree.map(lambda leaf: leaf[0], params["blocks"]), h, keys_B)
        loss_sum, weight_sum = model.head(params["head"], params["embed"] if model.tied else None, h, batch)

    >>> from jaxdist.models.gpt import gpt
    >>> model = gpt(jaxdist.Config().model.replace(layers=2, width=16, heads=2, vocab=32), max_length=8)
    >>> model.layers, list(model.specs)
    (2, ['embed', 'blocks', 'head'])

    init: key -> parameters, in global shapes.
    specs: the PartitionSpecs of the layers; those of blocks have a leading "pipe".
    shapes: ShapeDtypeStructs of the parameters.
    embed: (params of embed, batch, keys_B) -> h.
    block: (params of one block, h, keys_B) -> h; with `rows`, (params of one block, h, keys_B, rows) -> h.
    head: (params of head, params of embed if tied else None, h, batch) -> (loss sum, weight sum).
    logits: (params of head, params of embed if tied else None, h) -> logits over the whole vocabulary, for sampling.
    layers: the number of blocks.
    tied: whether the head reads the parameters of embed.
    chunks: the number of virtual stages of a pipeline stage.
    stages: the number of blocks of each virtual stage, if these differ; else (). In the leaves of blocks each stage has
        as many rows as the largest; rows without a block are zeros. See `jaxdist.parallel.pipeline.stages`.
    fp8: whether linear layers multiply in float8. The precision of a step must have the same value.
    scan_blocks: blocks in one round of the loop over blocks; 0: no loop; None: 1, and 0 for a run by a configuration on
        one GPU that leaves `model.scan_blocks` open.
    columns: whether `embed` maps columns (the last dim) of its parameters to the same columns of h.
    collective_matmul: whether linear layers use `ppermute`, which may not be inside a condition.
    context: how attention goes over the mesh axis `context` ("all_to_all", "gather", "ring"); None: no layer uses it.
    rows: batch -> what blocks read of it besides h, a pytree of arrays [B, ...] such as a key mask; or None. No
        gradient flows to it.
    metrics: of evaluations, (as for head) -> {name: (sum, weight)}; or None.
    cached: `block` with a key/value cache, (params of one block, h, keys_B, `Past` or None) -> (h, keys and values).
        `embed` then takes positions [B, S] after keys_B. None: text is generated without a cache.
    positions: the length of the longest text, where positions are learned; None: no limit.
    features: (params of head, h) -> what the table of the vocabulary multiplies, [B, S, D]; or None.
    vocabulary: (params of head, params of embed if tied else None) -> (table [V, D],), or with a bias [V]; or None.
    update_rules: parameters that no optimizer updates, by their paths ("blocks.mlp.router.bias"), with their rules.
    figures: gradients -> {name: number or array}, what a step tells of the parameters of `update_rules`; or None. The
        first dim of an array is that of the rows of stacked blocks, and in metrics that of blocks in the model's order.
    weighs_rows: whether `rows` reads the leaf `loss_seed` [B] of a batch in training: what the loss of each sample is
        multiplied by before it is differentiated. Losses inside blocks need it (`jaxdist.nn.experts`).
    arranged: the order of the rows of blocks, where `arrange` has made one for a pipeline.
    """

    init: Callable[[jax.Array], PyTree]
    specs: PyTree
    shapes: PyTree
    embed: Callable[..., Any]
    block: Callable[..., Any]
    head: Callable[..., Any]
    logits: Callable[..., Any]
    layers: int
    tied: bool
    chunks: int = 1
    stages: tuple[int, ...] = ()
    fp8: bool = False
    scan_blocks: int | None = None
    columns: bool = False
    collective_matmul: bool = False
    context: str | None = None
    rows: Callable[[PyTree], PyTree] | None = None
    metrics: Callable[..., Any] | None = None
    cached: Callable[..., Any] | None = None
    positions: int | None = None
    features: Callable[..., Any] | None = None
    vocabulary: Callable[..., Any] | None = None
    update_rules: Mapping[str, UpdateRule] = MappingProxyType({})
    figures: Callable[[PyTree], dict[str, jax.Array]] | None = None
    weighs_rows: bool = False
    arranged: BlockOrder | None = None

    def read_by_blocks(self, batch: PyTree) -> PyTree:
        """What every block is given beside h: (dropout keys [B], rows if the model has any)."""
        return (batch["keys"],) if self.rows is None else (batch["keys"], self.rows(batch))

    @property
    def empty_rows(self) -> int:
        """The number of rows without a block in each leaf of blocks."""
        return len(self.stages) * max(self.stages, default=0) - sum(self.stages)

    @property
    def parameters(self) -> int:
        """The number of parameters, without the empty rows."""
        count = lambda tree: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))  # noqa: E731
        rows = self.layers + self.empty_rows
        return int(count(self.shapes) - count(self.shapes[STACKED]) // rows * self.empty_rows)


def specs_of_params(model: Any, params: PyTree) -> PyTree:
    """The PartitionSpecs of the stored parameters of a model, or of a loss; see `marked_specs`."""
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    return marked_specs(specs, model.specs) if isinstance(model, ModelDef) else specs


def rules_of(model: Any) -> Mapping[str, UpdateRule]:
    """`ModelDef.update_rules`; none for what is no `ModelDef`."""
    return model.update_rules if isinstance(model, ModelDef) else {}


def model_figures(model: Any, grads: PyTree) -> dict[str, jax.Array]:
    """`ModelDef.figures` of these gradients; none for what is no `ModelDef`, and for a model without.

    Raises `UserError` for a name that is taken.
    """
    found = model.figures(grads) if isinstance(model, ModelDef) and model.figures is not None else {}
    for name in found:
        check_metric_name(name, of="figures")
    return found


def check_metric_name(name: str, *, of: str) -> None:
    """Raise `UserError` for a metric with a name that is taken. of: what returned it."""
    if name in TAKEN or name.startswith("time/"):
        raise UserError(f"{of}: metric {name!r} is jaxdist's own; give it another name than {', '.join(TAKEN)}")
