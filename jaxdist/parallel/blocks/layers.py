"""One block of a model, forward and backward, and the loop over a stack of blocks.

Differentiating that loop (`program._scan_blocks`, one stage) keeps a second copy of the parameters that each block
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
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from optax import MaskedNode

from jaxdist.collectives import to_varying, zeros_varying_like
from jaxdist.parallel.blocks.branch import Choose, pack, typed_like, unpack
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockResiduals:
    """The pullback of a block (see `jax.vjp`), without those residuals that are parameters of the block, or that
    all blocks are given (dropout keys, rows of the batch).

    The caller of the pullback hands in the parameters that are `wanted`, gathered again, and what is `shared`.

    kept: the other residuals.
    places: for each residual its place among the parameters and then what is given; None for one in `kept`.
    pullback, unit: the tree structures of the whole pullback, and of the block's parameters.
    """

    kept: list[jax.Array]
    places: tuple[int | None, ...] = field(metadata={"static": True})
    pullback: Any = field(metadata={"static": True})
    unit: Any = field(metadata={"static": True})

    @property
    def wanted(self) -> PyTree:
        """For each parameter, whether the backward pass reads it. It reads no bias, for example."""
        return jax.tree.unflatten(self.unit, [place in self.places for place in range(self.unit.num_leaves)])

    def shared(self, keys: PyTree) -> PyTree:
        """What it reads of the dropout keys and rows that all blocks are given, to be kept once; None for the rest."""
        leaves = enumerate(jax.tree.leaves(keys), self.unit.num_leaves)
        return [leaf if place in self.places else None for place, leaf in leaves]

    def __call__(self, unit: PyTree, grad: jax.Array, shared: PyTree) -> tuple[PyTree, jax.Array]:
        """(gradients of trained parameters, gradient of the block's input). unit: the wanted parameters."""
        read = sorted({place for place in self.places if place is not None})
        given, kept = dict(zip(read, jax.tree.leaves((unit, shared)), strict=True)), iter(self.kept)
        leaves = [next(kept) if place is None else given[place] for place in self.places]
        return jax.tree.unflatten(self.pullback, leaves)(grad)


def without_parameters(pull: Callable[..., Any], unit: PyTree, keys: PyTree) -> BlockResiduals:
    """The pullback of a block with these parameters and keys, which are recognised by identity among its residuals."""
    leaves, pullback = jax.tree.flatten(pull)
    parameters, treedef = jax.tree.flatten(unit)
    place_of = {id(leaf): place for place, leaf in enumerate([*parameters, *jax.tree.leaves(keys)])}
    kept = [leaf for leaf in leaves if id(leaf) not in place_of]
    return BlockResiduals(kept, tuple(place_of.get(id(leaf)) for leaf in leaves), pullback, treedef)


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
        return h, without_parameters(pull, unit, keys)

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
        """work() -> (x, rest) if row i holds a block; otherwise (passing, zeros). passing: an array like x."""
        if self.choose is None:
            return work()
        holds_block, shapes = rows.layers[i] > 0, jax.eval_shape(work)[1]
        zeros = to_varying(zeros_varying_like(jax.eval_shape(pack, shapes)), ("pipe",))

        def packed() -> tuple[PyTree, list[jax.Array]]:
            x, rest = work()
            return typed_like((x, pack(rest)), (passing, zeros))

        x, arrays = self.choose(holds_block, packed, lambda: (passing, zeros))
        return x, unpack(arrays, shapes)


class BlockRunner(Protocol):
    """Forward and backward pass over rows of blocks."""

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

    run = jax.custom_vjp(lambda rows, h, keys: runner.forward(rows, h, keys)[0])
    run.defvjp(forward, backward)
    return run


class ScannedBlocks(NamedTuple):
    """A `BlockRunner` that runs one block after the other.

    unroll: the number of blocks in a round of the loop, as `ModelDef.scan_blocks`.
    """

    one: OneBlock
    unroll: int = 1

    def forward(self, rows: BlockRows, h: jax.Array, keys: PyTree) -> tuple[jax.Array, PyTree]:
        """(output of the last block, residuals for `backward`)."""

        def work(h: jax.Array, i: jax.Array, _: None) -> tuple[jax.Array, PyTree]:
            unit, reduce = self.one.fetch(rows, i)
            out, kept = self.one.run(unit, rows, i, h, keys)
            return out, (kept, reduce)

        h, saved = self._scan(work, rows, h, unroll=blocks_per_round(self.unroll, len(rows.layers)))
        return h, (saved, saved[0].shared(keys))

    def backward(self, rows: BlockRows, saved: PyTree, dh: jax.Array) -> tuple[PyTree, jax.Array]:
        """(gradients with respect to diff, gradient of h)."""
        saved, shared = saved

        def work(dh: jax.Array, i: jax.Array, own: PyTree) -> tuple[jax.Array, PyTree]:
            kept, reduce = own
            grads, before = kept(self.one.gather_again(rows, i, kept.wanted), dh, shared)
            return before, reduce(grads)[0]

        unroll = blocks_per_round(self.unroll, len(rows.layers))
        dh, grads = self._scan(work, rows, dh, saved, reverse=True, unroll=unroll)
        return grads, dh

    def backward_input(self, rows: BlockRows, saved: PyTree, dh: jax.Array) -> tuple[PyTree, jax.Array]:
        """The first half of `backward`: (values for `backward_weights`, gradient of h)."""
        saved, shared = saved

        def work(dh: jax.Array, i: jax.Array, own: PyTree) -> tuple[jax.Array, PyTree]:
            kept, _ = own
            unit = self.one.gather_again(rows, i, kept.wanted)
            return self._split(kept, rows, dh, shared).input_gradient(unit, dh)

        dh, crossing = self._scan(work, rows, dh, saved, reverse=True)
        return crossing, dh

    def backward_weights(self, rows: BlockRows, saved: PyTree, crossing: PyTree, like: PyTree) -> PyTree:
        """The second half of `backward`: gradients with respect to diff.

        crossing: the values from `backward_input`.
        like: an array of the shape and type of dh.
        """
        saved, shared = saved

        def work(_: None, i: jax.Array, own: PyTree) -> tuple[None, PyTree]:
            (kept, reduce), crossing = own
            split = self._split(kept, rows, like, shared)
            reads, (wanted, treedef) = iter(split.reads), jax.tree.flatten(kept.wanted)
            chosen = jax.tree.unflatten(treedef, [yes and next(reads) for yes in wanted])
            unit = self.one.gather_again(rows, i, chosen)
            return None, reduce(split.weight_gradients(jax.tree.leaves(unit), crossing))[0]

        return self._scan(work, rows, None, (saved, crossing))[1]

    def _scan(self, work: Callable[..., Any], rows: BlockRows, x: PyTree, own: PyTree = None, **how: Any) -> Any:
        """(x after all blocks, the other results of `work`, stacked): a `lax.scan` over the numbers of rows.

        work: (x, i, row i of `own`) -> (x, other results). It is skipped for a row without a block.
        how: `reverse` and `unroll` of the scan.
        """

        def step(x: PyTree, each: PyTree) -> tuple[PyTree, PyTree]:
            return self.one.in_row(rows, each[0], lambda: work(x, *each), x)

        return lax.scan(step, x, (jnp.arange(len(rows.layers)), own), **how)

    def _split(self, kept: BlockResiduals, rows: BlockRows, grad: Any, shared: PyTree) -> Any:
        from jaxdist.parallel.blocks.split_backward import split_backward  # of zero bubble alone

        unit = jax.eval_shape(lambda: self.one.gather(at(rows.diff, 0), at(rows.captured, 0), kept.wanted))
        return split_backward(lambda unit, grad: kept(unit, grad, shared), unit, jax.eval_shape(lambda: grad))
