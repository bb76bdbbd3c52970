"""One block of a model, forward and backward, and the loop over a stack of blocks.

Differentiating that loop (`program._run_blocks`, one stage) keeps a second copy of the parameters that each block
reads, besides activations. Here a block keeps its residuals without its parameters; the backward pass casts or gathers
these again.

Three runners share the steps of `OneBlock` (fetch, run, gather_again), have the same methods forward and backward, and
become one differentiable function by `differentiable`:

| runner             | kept for the backward pass                  | a block is gathered    | computed again           |
|--------------------|---------------------------------------------|------------------------|--------------------------|
| `ScannedBlocks`    | residuals of each block                     | right before it runs   | as `memory.remat` says   |
| `SegmentedBlocks`  | inputs of about sqrt(L) segments            | right before it runs   | each segment, each block |
| `PrefetchedBlocks` | the same as `ScannedBlocks`, and two blocks | while another one runs | as `memory.remat` says   |
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from optax import MaskedNode

from jaxdist.parallel.blocks.branch import Choose, work_or_pass
from jaxdist.specs import PyTree

# (diff of one block, captured of one block, which leaves are wanted, or None for all) -> the block's parameters, ready
# for use; MaskedNodes in the place of those that are not wanted. Its backward pass reduces gradients. For example:
#     lambda diff, captured, wanted: jax.tree.map(lambda leaf: all_gather(leaf, "fsdp", dim=0), only(wanted, diff))
GatherBlock = Callable[[PyTree, PyTree, PyTree | None], PyTree]
# (parameters of one block, h, its number, dropout keys) -> h. For example:
#     lambda params, h, layer, keys: h + jax.nn.gelu(h @ params["up"]) @ params["down"]
RunBlock = Callable[[PyTree, jax.Array, jax.Array, PyTree], jax.Array]
AGAIN = "rematted_computation"  # the scope in which jax.checkpoint computes again


class BlockRows(NamedTuple):
    """The stacked blocks of a stage, or of one chunk of a stage: L rows.

    diff, captured: the differentiated parameters, and those read without gradients, see `jaxdist.parallel.schedule`:
        leaves [L, ...].
    layers: the number of the block in each row, from 1; 0 in a row without a block: [L].
    """

    diff: PyTree
    captured: PyTree
    layers: jax.Array


@jax.tree_util.register_pytree_node_class
class BlockResiduals:
    """The pullback of a block (see `jax.vjp`), without those residuals that are parameters of the block.

    They are recognised by identity. The caller hands in those that are `wanted`, gathered again.
    """

    def __init__(self, pull: Callable[..., Any], unit: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(pull)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(unit))}
        self._places = tuple(places.get(id(leaf)) for leaf in leaves)
        self._leaves = [leaf for leaf, place in zip(leaves, self._places, strict=True) if place is None]
        self._unit: Any = jax.tree.structure(unit)

    @property
    def wanted(self) -> PyTree:
        """For each parameter, whether the backward pass reads it. It reads no bias, for example."""
        count = self._unit.num_leaves
        return jax.tree.unflatten(self._unit, [place in self._places for place in range(count)])

    def __call__(self, unit: PyTree, grad: jax.Array) -> tuple[PyTree, jax.Array]:
        """(gradients of trained parameters, gradient of the block's input). unit: the wanted parameters."""
        wanted = [place for place, read in enumerate(jax.tree.leaves(self.wanted)) if read]
        given, rest = dict(zip(wanted, jax.tree.leaves(unit), strict=True)), iter(self._leaves)
        leaves = [next(rest) if place is None else given[place] for place in self._places]
        return jax.tree.unflatten(self._treedef, leaves)(grad)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self._leaves, (self._treedef, self._places, self._unit)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> "BlockResiduals":
        self = object.__new__(cls)
        self._treedef, self._places, self._unit = aux
        self._leaves = list(leaves)
        return self


def trained_leaves(unit: PyTree, diff: PyTree) -> list[jax.Array]:
    """The trained leaves of a block: diff has a MaskedNode in the place of the others."""
    trained = jax.tree.map(lambda leaf, part: part if isinstance(part, MaskedNode) else leaf, unit, diff)
    return jax.tree.leaves(trained)


def _with_trained(unit: PyTree, diff: PyTree, trained: list[jax.Array]) -> PyTree:
    """The block's parameters, with `trained` in the place of the trained leaves."""
    given = iter(trained)
    return jax.tree.map(lambda leaf, part: leaf if isinstance(part, MaskedNode) else next(given), unit, diff)


def at(tree: PyTree, i: jax.Array | int) -> PyTree:
    """Row i of every leaf."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree)


def put(tree: PyTree, i: jax.Array | int, unit: PyTree) -> PyTree:
    """The tree with `unit` as row i of its leaves, in their dtypes."""
    row = lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new.astype(leaf.dtype), i, 0)  # noqa: E731
    return jax.tree.map(row, tree, unit)


def blocks_per_round(scan_blocks: int, blocks: int) -> int:
    """The `unroll` of a `lax.scan` over so many blocks. scan_blocks: as `ModelDef.scan_blocks`; 0 means all."""
    return min(scan_blocks or blocks, blocks)


class OneBlock(NamedTuple):
    """The steps that every runner takes for one block of a stack.

    gather: its backward pass reduces gradients.
    block: may be rematerialised.
    choose: how a row without a block is skipped; None if every row holds a block.
    """

    gather: GatherBlock
    block: RunBlock
    choose: Choose | None = None

    def fetch(
        self, rows: BlockRows, i: jax.Array | int, wanted: PyTree | None = None
    ) -> tuple[PyTree, Callable[..., Any]]:
        """(wanted parameters of row i, function that reduces gradients of its trained leaves to those of diff)."""
        captured = at(rows.captured, i)

        def trained(diff: PyTree) -> tuple[list[jax.Array], PyTree]:
            unit = self.gather(diff, captured, wanted)
            return trained_leaves(unit, diff), unit

        found, reduce, unit = jax.vjp(trained, at(rows.diff, i), has_aux=True)
        return _with_trained(unit, rows.diff, found), reduce

    def run(
        self, unit: PyTree, rows: BlockRows, i: jax.Array | int, h: jax.Array, keys: PyTree
    ) -> tuple[jax.Array, BlockResiduals]:
        """(output of row i, its residuals). unit: the parameters of row i."""
        layer = rows.layers[i]

        def call(trained: list[jax.Array], h: jax.Array) -> jax.Array:
            return self.block(_with_trained(unit, rows.diff, trained), h, layer, keys)

        h, pull = jax.vjp(call, trained_leaves(unit, rows.diff), h)
        return h, BlockResiduals(pull, unit)

    def gather_again(self, rows: BlockRows, i: jax.Array | int, wanted: PyTree) -> PyTree:
        """The parameters of row i that its backward pass reads."""
        with jax.named_scope(AGAIN):
            return self.gather(at(rows.diff, i), at(rows.captured, i), wanted)

    def after(self, rows: BlockRows, i: jax.Array | int, h: jax.Array, keys: PyTree) -> jax.Array:
        """h after row i, without residuals."""

        def work() -> tuple[jax.Array, None]:
            unit = self.gather(at(rows.diff, i), at(rows.captured, i), None)
            return self.block(unit, h, rows.layers[i], keys), None

        return self.in_row(rows, i, work, h)[0]

    def in_row(
        self, rows: BlockRows, i: jax.Array | int, work: Callable[[], tuple[PyTree, PyTree]], passing: PyTree
    ) -> Any:
        """work() -> (x, rest) if row i holds a block; otherwise (passing, zeros)."""
        return work() if self.choose is None else work_or_pass(self.choose, rows.layers[i] > 0, work, passing)


class BlockRunner(Protocol):
    """Forward and backward pass over rows of blocks."""

    def through(self, rows: BlockRows, h: Any, keys: PyTree) -> Any:
        """The output of the last block, without residuals."""

    def forward(self, rows: BlockRows, h: Any, keys: PyTree) -> tuple[Any, PyTree]:
        """(output of the last block, residuals for `backward`)."""

    def backward(self, rows: BlockRows, saved: PyTree, dh: Any) -> tuple[PyTree, Any]:
        """(gradients with respect to diff, gradient of h)."""


def differentiable(runner: BlockRunner) -> Callable[[BlockRows, Any, PyTree], Any]:
    """The function (rows, h, dropout keys) -> h, which can be differentiated once, with respect to diff and h."""

    def forward(rows: BlockRows, h: Any, keys: PyTree) -> tuple[Any, PyTree]:
        h, saved = runner.forward(rows, h, keys)
        return h, (rows, saved)

    def backward(residuals: PyTree, dh: Any) -> tuple[Any, Any, None]:
        rows, saved = residuals
        grads, dh = runner.backward(rows, saved, dh)
        return BlockRows(grads, None, None), dh, None  # type: ignore[arg-type]

    run = jax.custom_vjp(runner.through)
    run.defvjp(forward, backward)
    return run


class ScannedBlocks(NamedTuple):
    """A `BlockRunner` that runs one block after the other.

    unroll: the number of blocks in a round of the loop, as `ModelDef.scan_blocks`.
    """

    one: OneBlock
    unroll: int = 1

    def through(self, rows: BlockRows, h: jax.Array, keys: PyTree) -> jax.Array:
        """The output of the last block, without residuals."""
        numbers, unroll = jnp.arange(len(rows.layers)), blocks_per_round(self.unroll, len(rows.layers))
        return lax.scan(lambda h, i: (self.one.after(rows, i, h, keys), None), h, numbers, unroll=unroll)[0]

    def forward(self, rows: BlockRows, h: jax.Array, keys: PyTree) -> tuple[jax.Array, PyTree]:
        """(output of the last block, residuals for `backward`)."""

        def step(h: jax.Array, i: jax.Array) -> tuple[jax.Array, PyTree]:
            def work() -> tuple[jax.Array, PyTree]:
                unit, reduce = self.one.fetch(rows, i)
                out, kept = self.one.run(unit, rows, i, h, keys)
                return out, (kept, reduce)

            return self.one.in_row(rows, i, work, h)

        return lax.scan(step, h, jnp.arange(len(rows.layers)), unroll=blocks_per_round(self.unroll, len(rows.layers)))

    def backward(self, rows: BlockRows, saved: PyTree, dh: jax.Array) -> tuple[PyTree, jax.Array]:
        """(gradients with respect to diff, gradient of h)."""

        def step(dh: jax.Array, own: PyTree) -> tuple[jax.Array, PyTree]:
            i, (kept, reduce) = own

            def work() -> tuple[jax.Array, PyTree]:
                grads, before = kept(self.one.gather_again(rows, i, kept.wanted), dh)
                return before, reduce(grads)[0]

            return self.one.in_row(rows, i, work, dh)

        unroll = blocks_per_round(self.unroll, len(rows.layers))
        dh, grads = lax.scan(step, dh, (jnp.arange(len(rows.layers)), saved), reverse=True, unroll=unroll)
        return grads, dh

    def backward_input(self, rows: BlockRows, saved: PyTree, dh: jax.Array) -> tuple[PyTree, jax.Array]:
        """The first half of `backward`: (values for `backward_weights`, gradient of h)."""

        def step(dh: jax.Array, own: PyTree) -> tuple[jax.Array, PyTree]:
            i, (kept, _) = own

            def work() -> tuple[jax.Array, PyTree]:
                unit = self.one.gather_again(rows, i, kept.wanted)
                return self._split(kept, rows, dh).input_gradient(unit, dh)

            return self.one.in_row(rows, i, work, dh)

        dh, crossing = lax.scan(step, dh, (jnp.arange(len(rows.layers)), saved), reverse=True)
        return crossing, dh

    def backward_weights(self, rows: BlockRows, saved: PyTree, crossing: PyTree, like: PyTree) -> PyTree:
        """The second half of `backward`: gradients with respect to diff.

        crossing: the values from `backward_input`.
        like: an array of the shape and type of dh.
        """

        def step(_: None, own: PyTree) -> tuple[None, PyTree]:
            i, (kept, reduce), crossing = own

            def work() -> tuple[None, PyTree]:
                split = self._split(kept, rows, like)
                reads, (wanted, treedef) = iter(split.reads), jax.tree.flatten(kept.wanted)
                chosen = jax.tree.unflatten(treedef, [yes and next(reads) for yes in wanted])
                unit = self.one.gather_again(rows, i, chosen)
                return None, reduce(split.weight_gradients(jax.tree.leaves(unit), crossing))[0]

            return self.one.in_row(rows, i, work, None)

        return lax.scan(step, None, (jnp.arange(len(rows.layers)), saved, crossing))[1]

    def _split(self, kept: BlockResiduals, rows: BlockRows, grad: Any) -> Any:
        from jaxdist.parallel.blocks.split_backward import split_backward  # of zero bubble alone

        unit = jax.eval_shape(lambda: self.one.gather(at(rows.diff, 0), at(rows.captured, 0), kept.wanted))
        return split_backward(kept, unit, jax.eval_shape(lambda: grad))
