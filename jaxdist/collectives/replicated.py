"""The one door by which a hand-reduced value leaves the checked region as replicated.

A value that a hand-written all-reduce made equal on all devices is still typed varying, and JAX has no cast from
varying to invariant. So it leaves the checked `shard_map` with a leading stacked dim, one entry a device of the axes it
is a copy over, and `claim_replicated` drops that dim again. No byte moves: every device keeps the entry it has. There
is no communication and no autodiff in this region, hence nothing that the switched-off check could have caught:

    def body(w, x):                                    # checked
        g = jax.grad(loss)(to_varying(w, BATCH_LIKE), x)
        return stack(specs, all_reduce(g, ("data", "fsdp"), algorithm="ring"))
    g = jax.shard_map(body, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=stacked_specs(specs, mesh))(w, x)
    g = claim_replicated(g, specs, mesh)               # unchecked, trivial
"""

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives.varying import to_varying
from jaxdist.mesh import AnyMesh
from jaxdist.specs import PyTree, claimed_axes, map_specs, without_idle


def stacked_specs(specs: PyTree, mesh: AnyMesh) -> PyTree:
    """Specs of the stacked values: a leading dim over the axes that each leaf is a copy over."""
    return map_specs(lambda spec: without_idle(P(claimed_axes(spec) or None, *spec), mesh), specs)


def stack(specs: PyTree, tree: PyTree) -> PyTree:
    """Inside the checked region: add the leading dim, of local size 1, to every leaf."""
    return map_specs(lambda spec, leaf: to_varying(leaf, claimed_axes(spec))[None], specs, tree)


def claim_replicated(tree: PyTree, specs: PyTree, mesh: AnyMesh) -> PyTree:
    """Outside: drop the stacked dim, claiming that its entries are equal. The caller vouches for that."""
    return jax.shard_map(
        lambda stacked: jax.tree.map(lambda leaf: leaf[0], stacked),
        mesh=mesh,
        in_specs=(stacked_specs(specs, mesh),),
        out_specs=specs,
        check_vma=False,
    )(tree)
