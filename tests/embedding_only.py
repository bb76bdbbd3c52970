"""A strategy of somebody else's: only the embedding is sharded. One file; tests name it by a dotted path."""

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.options import StrategyOptions
from jaxdist.parallel.strategies.zero3 import zero3
from jaxdist.parallel.strategy import Strategy
from jaxdist.specs import PyTree


def embedding_only(options: StrategyOptions) -> Strategy:
    """zero3 for the embedding, ddp for the rest."""
    whole = zero3(options)

    def place(shapes: PyTree, specs: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
        assert all(isinstance(spec, P) for spec in jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, P)))
        return {**specs, "embed": whole.place(shapes["embed"], specs["embed"], mesh)}

    return whole._replace(place=place)
