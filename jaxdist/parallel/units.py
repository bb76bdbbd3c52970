"""The units of a model (embedding, one block, head): each runs with parameters that the strategy gathers for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.collectives import active_axes
from jaxdist.config.rules.overlap import check_conditions
from jaxdist.errors import UserError
from jaxdist.model import ModelDef
from jaxdist.parallel.strategy import Strategy, regathers
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.specs import STACKED, PyTree, only

Sums = tuple[jax.Array, jax.Array]
EMBED_LAYER = 0  # dropout keys of the embedding fold this number; those of block i fold i + 1
fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))


def isolate(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with barriers around its forward and backward pass.

    The compiler then fuses nothing inside with its surroundings. These differ from layout to layout, and would be
    rounded differently.
    """

    def fence(tree: PyTree) -> PyTree:
        floats = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda leaf: lax.optimization_barrier(leaf) if floats(leaf) else leaf, tree)

    return lambda *arguments: fence(function(*fence(arguments)))


class Units(NamedTuple):
    """A model's units under a strategy.

    specs: of the parameters of each unit; for blocks, of one block.
    stacked: specs of the stacked blocks.
    isolated: whether units are isolated, see `isolate`.
    conditions: whether blocks of a pipeline run inside conditions.
    """

    model: ModelDef
    strategy: Strategy
    specs: PyTree
    stacked: PyTree
    isolated: bool = False
    conditions: bool = True

    @property
    def head_units(self) -> tuple[str, ...]:
        """The units whose parameters the head reads."""
        return ("head", "embed") if self.model.tied else ("head",)

    def gathers_again(self, name: str) -> bool:
        """Whether the backward pass gathers parameters of this unit again."""
        # Isolated, a unit must keep the same values in every layout.
        return self.isolated or regathers(self.strategy, self.specs[name])

    def gather(self, name: str, diff: PyTree, captured: PyTree, wanted: PyTree | None = None) -> PyTree:
        """The parameters of a unit, ready for use. wanted: which of its leaves to gather; None for all."""
        with jax.named_scope(name):
            if wanted is not None:
                return self.strategy.gather(only(wanted, diff), only(wanted, captured), only(wanted, self.specs[name]))
            if name == STACKED and (reduce_block := self.strategy.reduce_block) is not None:
                from jaxdist.parallel.wrappers.reduce_in_backward import reduced_behind

                diff = reduced_behind(diff, lambda grads: reduce_block(grads, self.stacked))
            return self.strategy.gather(diff, captured, self.specs[name])

    def gather_block(self, diff: PyTree, captured: PyTree, wanted: PyTree | None) -> PyTree:
        """The parameters of one block, ready for use: a `GatherBlock`."""
        return self.gather(STACKED, diff, captured, wanted)

    def run(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), in the unit's scope."""
        with jax.named_scope(name):
            return (isolate(function) if self.isolated else function)(*arguments)

    def run_block(self, params: PyTree, h: jax.Array, layer: jax.Array, given: PyTree) -> jax.Array:
        """One block: a `RunBlock`. given: `ModelDef.read_by_blocks`.

        Raises `UserError` if it would send by ppermute inside a condition, or makes another type of h.
        """
        self.check_conditions(inside=self.conditions)
        keys, *rows = given
        found: jax.Array = self.run(STACKED, self.model.block, params, h, fold(keys, layer), *rows)
        if not hasattr(found, "dtype") or (found.shape, found.dtype) != (h.shape, h.dtype):
            shown = jax.tree.map(lambda each: jax.typeof(each).str_short(), found)
            raise UserError(
                f"block: makes {shown} of {jax.typeof(h).str_short()}; allowed: the same shape"
                " and dtype. A norm whose parameters stay in float32 (precision.keep_fp32), or another float32 array,"
                " widens it: write norm(h).astype(h.dtype) in the block"
            )
        return found

    def run_head(self, params: PyTree, table: PyTree | None, h: jax.Array, batch: PyTree) -> Sums:
        """(loss sum, weight sum), at least in fp32. table: the embedding's parameters, for a tied head."""
        sums: Sums = self.run("head", self.model.head, params, table, h, batch)
        wide = accumulation_dtype(jnp.asarray(sums[0]).dtype)  # half precision rounds a weight, or makes it inf
        return jax.tree.map(lambda each: jnp.asarray(each).astype(wide), sums)  # and metrics, in evaluations

    def check_conditions(self, *, inside: bool) -> None:
        """Raise `UserError` if blocks that run inside conditions would send by ppermute there."""
        taken = inside and bool(active_axes("pipe"))
        if self.model.collective_matmul:
            check_conditions(pipeline_cond=taken)
        if self.model.context == "ring" and active_axes("context"):
            check_conditions(pipeline_cond=taken, setting="context: ring", allowed="all_to_all, gather")
