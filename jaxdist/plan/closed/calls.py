"""One collective call in closed form: its operation, messages and bytes, native or by a hand-written algorithm."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.collectives import all_reduce, reduce_scatter
from jaxdist.collectives.algorithm import get_algorithm
from jaxdist.collectives.algorithms.auto import choose
from jaxdist.collectives.compression import encoded_bytes
from jaxdist.collectives.cost import make_link
from jaxdist.collectives.group import Group
from jaxdist.collectives.varying import to_varying
from jaxdist.jaxpr.axes import moving_axes
from jaxdist.jaxpr.branches import AXIS, outermost, reached
from jaxdist.jaxpr.walk import operand_bytes
from jaxdist.mesh import abstract_mesh
from jaxdist.plan.closed.sent import Transfer
from jaxdist.plan.traced.ledger import wire_bytes

AxisSizes = Mapping[str, int]  # of the mesh axes
NATIVE = {"all_reduce": "psum", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}


class Call(NamedTuple):
    """A collective call. messages: of `wire_bytes` in the mean. by_stage: bytes on each stage, if these differ."""

    op: str
    messages: int
    wire_bytes: float
    by_stage: tuple[float, ...] = ()

    def sent(
        self, axes: tuple[str, ...], sizes: AxisSizes, phase: str, what: str, times: Sequence[float] = (1,)
    ) -> Transfer:
        """So many of this call, on each stage if there is more than one number."""
        calls = tuple(self.messages * each for each in times)
        if self.by_stage:
            calls = tuple(sum(times) / len(times) * each / self.wire_bytes for each in self.by_stage)
        return Transfer(self.op, axes, math.prod(sizes[axis] for axis in axes), self.wire_bytes, calls, phase, what)


def collective_call(
    operation: str, elements: float, dtype: Any, axes: tuple[str, ...], sizes: AxisSizes, how: Mapping[str, Any]
) -> Call:
    """A call of `jaxdist.collectives` with an input of so many elements on each device.

    how: the arguments of the call: algorithm, wire_dtype ("int8": of `all_reduce_with_feedback`), link.
    """
    algorithm, wire, link = (how.get(key) for key in ("algorithm", "wire_dtype", "link"))
    itemsize, n = jnp.dtype(wire or dtype).itemsize, math.prod(sizes[axis] for axis in axes)
    if algorithm in (None, "native"):
        return Call(NATIVE[operation], 1, wire_bytes(NATIVE[operation], elements * itemsize, n))
    elements = round(elements)  # a mean over slices of a head may be none; the others are whole
    if wire == "int8":
        return Call("ppermute", 2 * (n - 1), encoded_bytes(-(-elements // n)))
    if axes == (AXIS,):
        return _over_stages(operation, elements, dtype, n, how)
    group = replace(Group.of(*(sizes[axis] for axis in axes)), link=make_link(link) if isinstance(link, str) else link)
    name = choose(operation, elements, itemsize, group) if algorithm == "auto" else algorithm
    cost = get_algorithm(name).cost(operation, elements, group)
    return Call("ppermute", cost.rounds, cost.serial * itemsize / cost.rounds)


def _over_stages(operation: str, elements: int, dtype: Any, n: int, how: Mapping[str, Any]) -> Call:
    """A call over the stages of a pipeline by a hand-written algorithm, traced: a stage counts the messages that it
    sends itself, which a cost does not tell apart."""
    mesh, run = abstract_mesh(pipe=n), {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter}[operation]
    over = jax.sharding.PartitionSpec(AXIS)
    mapped = jax.shard_map(lambda x: to_varying(run(x, AXIS, **how), (AXIS,)), mesh=mesh, in_specs=over, out_specs=over)
    jaxpr = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((n * elements,), dtype))
    sent, messages = np.zeros(n), np.zeros(n, int)
    for each in reached(jaxpr, outermost(jaxpr, mesh.shape), lambda equation: bool(moving_axes(equation)), lambda _: 1):
        senders = [source for source, _ in each.equation.params["perm"]]
        times = np.where(np.isin(np.arange(n), senders), each.scope.calls, 0)
        messages += times
        sent += times * operand_bytes(each.equation)
    return Call("ppermute", int(messages.max()), float(sent.max() / max(1, messages.max())), tuple(sent.tolist()))
