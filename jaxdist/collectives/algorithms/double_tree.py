"""Two complementary trees, each with half of the data: a rank that is inner in one tree is a leaf in the other.

In a single tree half of the ranks are leaves, which send once and then wait. Two mirrored trees share the sending, so
that the latency is logarithmic and no rank sends more than 2 N (Sanders, Speck and Traeff 2009, "Two-tree algorithms
for full bandwidth broadcast, reduction and scan"; NCCL 2.4). Each half travels in pieces, one behind the other. The
edges are coloured so that in each round a rank sends at most one piece and receives at most one (section 3 there). The
reduction is the broadcast backwards.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxdist.collectives.algorithm import COMBINE, Algorithm
from jaxdist.collectives.cost import Cost
from jaxdist.collectives.group import Array, Group
from jaxdist.collectives.parts import cut_parts, in_own_place, join_parts, padded_parts, part_at, unpadded

PIECE = 32768  # elements of a piece, about
MOST = 4  # pieces of a tree, at most


class Edge(NamedTuple):
    """An edge of tree 0 or 1, from a parent down to its child."""

    tree: int
    parent: int
    child: int


class Hop(NamedTuple):
    """A message of the broadcast: in one round, a piece goes down an edge."""

    source: int
    target: int
    piece: int


def _first_tree(n: int) -> list[tuple[int, int]]:
    """The first tree, as (parent, child) pairs."""
    edges = []
    # A rank's level is its lowest set bit: odd ranks are leaves. Rank 0 is the root.
    for child in range(1, n):
        bit = child & -child
        up = (child ^ bit) | (bit << 1)
        edges.append((up if up < n else child ^ bit, child))
    return edges


@functools.cache
def trees(n: int) -> tuple[Edge, ...]:
    """The edges of both trees. The second is the first with its ranks reversed, or for odd n shifted by one."""
    first = _first_tree(n)

    def other(rank: int) -> int:
        return n - 1 - rank if n % 2 == 0 else (rank + 1) % n

    return tuple([Edge(0, up, down) for up, down in first] + [Edge(1, other(up), other(down)) for up, down in first])


def _colours(edges: tuple[Edge, ...]) -> dict[Edge, int]:
    """A colour, 0 or 1, for every edge: two edges with the same parent differ, and so do two with the same child.

    An edge conflicts with at most one edge of each sort. Conflicts thus form paths and even cycles: two colours do.
    """
    colour: dict[Edge, int] = {}
    for start in edges:
        waiting = [] if start in colour else [(start, 0)]
        while waiting:  # along the path or cycle of conflicts
            edge, wanted = waiting.pop()
            if edge in colour:
                assert colour[edge] == wanted, "an odd cycle: a rank with three children"
                continue
            colour[edge] = wanted
            conflicts = [e for e in edges if e != edge and (e.parent == edge.parent or e.child == edge.child)]
            waiting += [(conflict, 1 - wanted) for conflict in conflicts]
    return colour


@functools.cache
def rounds(n: int, pieces: int) -> tuple[tuple[Hop, ...], ...]:
    """The rounds of the broadcast from both roots. Pieces are numbered: `pieces` of tree 0, then those of tree 1."""
    edges = trees(n)
    colour = _colours(edges)
    roots = [{e.parent for e in edges if e.tree == t} - {e.child for e in edges if e.tree == t} for t in (0, 1)]
    arrival = {(t, root): -1 for t in (0, 1) for root in roots[t]}  # round in which a rank gets the first piece
    waiting = list(edges)
    while waiting:
        edge = waiting.pop(0)
        if (edge.tree, edge.parent) not in arrival:
            waiting.append(edge)
            continue
        ready = arrival[edge.tree, edge.parent] + 1
        arrival[edge.tree, edge.child] = ready + (ready + colour[edge]) % 2  # rounds alternate between the colours
    found: dict[int, list[Hop]] = {}
    for edge in edges:
        for k in range(pieces):
            when = arrival[edge.tree, edge.child] + 2 * k
            found.setdefault(when, []).append(Hop(edge.parent, edge.child, edge.tree * pieces + k))
    return tuple(tuple(found[when]) for when in sorted(found))


def _run_round(held: Array, group: Group, hops: Sequence[Hop], op: str | None) -> Array:
    """The pieces of this device after one round: the target of a hop combines with `op`, or replaces if op is None."""
    sent_by, received_by = {hop.source: hop.piece for hop in hops}, {hop.target: hop.piece for hop in hops}
    # Ranks without a message send, and replace, piece 0: nobody receives the one, and the other is put back.
    send, receive = (group.at([by.get(rank, 0) for rank in range(group.n)]) for by in (sent_by, received_by))
    sent = lax.dynamic_index_in_dim(held, send, keepdims=False)
    arrived = group.permute(sent, [(hop.source, hop.target) for hop in hops])
    before = lax.dynamic_index_in_dim(held, receive, keepdims=False)
    after = arrived if op is None else COMBINE[op](before, arrived)
    after = jnp.where(group.among(hop.target for hop in hops), after, before)
    return lax.dynamic_update_index_in_dim(held, after, receive, 0)


def _pieces(size: int) -> int:
    return min(MOST, max(1, size // (2 * PIECE)))


def _all_reduce(x: Array, group: Group, op: str) -> Array:
    pieces = _pieces(x.size)
    plan = rounds(group.n, pieces)
    held = padded_parts(x, 2 * pieces)
    for hops in reversed(plan):
        held = _run_round(held, group, [Hop(hop.target, hop.source, hop.piece) for hop in hops], op)
    held = group.rounded(held)
    for hops in plan:
        held = _run_round(held, group, hops, None)
    return unpadded(held, x)


def _reduce_scatter(x: Array, group: Group, op: str, dim: int) -> Array:
    """An all-reduce, of which each device keeps its part: trees have no cheaper way."""
    return part_at(_all_reduce(cut_parts(x, group.n, dim), group, op), group.rank)


def _all_gather(x: Array, group: Group, dim: int) -> Array:
    """An all-reduce (of bool, by max) of arrays that are zero but in the device's own place."""
    return join_parts(_all_reduce(in_own_place(x, group), group, "max" if x.dtype == jnp.bool_ else "sum"), dim)


def _cost(operation: str, size: int, group: Group) -> Cost:
    """The cost, counted from the rounds."""
    size = group.n * size if operation == "all_gather" else size
    pieces = _pieces(size)
    plan, length = rounds(group.n, pieces), -(-size // (2 * pieces))
    hops = [hop for round_ in plan for hop in round_]
    sent = [sum((hop.source == rank) + (hop.target == rank) for hop in hops) for rank in range(group.n)]
    ways = [({(h.source, h.target) for h in round_}, {(h.target, h.source) for h in round_}) for round_ in plan]
    # Pairs exchange in rounds in which an edge of one tree is an edge of the other tree, turned round.
    return Cost(
        2 * len(plan),
        max(sent) * length,
        2 * len(hops) * length,
        2 * len(plan) * length,
        swap=4 * sum(bool(there & back) for there, back in ways) >= len(plan),
    )


double_tree = Algorithm(_cost, _all_reduce, _reduce_scatter, _all_gather)
