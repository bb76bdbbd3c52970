"""The one way by which the result of a hand-written all-reduce leaves the checked region as a replicated array.

A hand-written all-reduce makes a value equal on all devices, but its type stays varying: JAX has no cast from varying
to invariant. The value therefore leaves the checked `shard_map` with a leading dim, one entry for each device that has
a copy. `claim_replicated` drops this dim in a second `shard_map` without the check. No byte moves, since every device
keeps its entry. That region has no communication and no autodiff, so the check could have found nothing in it:

    def body(w, x):                                    # checked
        g = jax.grad(loss)(to_varying(w, BATCH_LIKE), x)
        return stack(specs, all_reduce(g, ("data", "fsdp"), algorithm="ring"))
    g = jax.shard_map(body, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=stacked_specs(specs, mesh))(w, x)
    g = claim_replicated(g, specs, mesh)               # unchecked, trivial
"""

import jax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives.varying import to_varying
from jaxdist.mesh import AnyMesh, check_mesh
from jaxdist.specs import PyTree, claimed_axes, map_specs, without_idle


def stacked_specs(specs: PyTree, mesh: AnyMesh) -> PyTree:
    """PartitionSpecs of the stacked values, whose leading dim is split over the axes along which a leaf is a copy."""
    check_mesh(mesh)
    return map_specs(lambda spec: without_idle(P(claimed_axes(spec) or None, *spec), mesh), specs)


def stack(specs: PyTree, tree: PyTree) -> PyTree:
    """Every leaf with the leading dim, of local size 1. To be called in the checked region."""
    return map_specs(lambda spec, leaf: to_varying(leaf, claimed_axes(spec))[None], specs, tree)


def claim_replicated(tree: PyTree, specs: PyTree, mesh: AnyMesh) -> PyTree:
    """Every leaf without the leading dim, outside the checked region. The caller vouches that its entries are equal."""
    return jax.shard_map(
        lambda stacked: jax.tree.map(lambda leaf: leaf[0], stacked),
        mesh=mesh,
        in_specs=(stacked_specs(specs, mesh),),
        out_specs=specs,
        check_vma=False,
    )(tree)
