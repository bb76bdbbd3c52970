"""The ledger: every collective of a train step before it runs, with its axes, bytes, calls and source line.

It is read from the jaxpr of the very function that trains. So no devices are needed, and the mesh may be far larger
than the machine. The compiler may add collectives around the optimizer, in the global region. They are not in the
jaxpr; see `jaxdist.plan.compiled.hlo`.
"""

import functools
import math
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist.errors import UserError
from jaxdist.jaxpr.axes import moving_axes
from jaxdist.jaxpr.branches import AXIS, Reached, outermost, reached
from jaxdist.jaxpr.source import source_of
from jaxdist.jaxpr.walk import every_equation, operand_bytes
from jaxdist.mesh import AnyMesh, host_of
from jaxdist.optim.muon import OPTIMIZER
from jaxdist.parallel.pipeline.relay import TO_BEFORE, TO_NEXT
from jaxdist.plan.traced.origin import phase_of, scope_of
from jaxdist.plan.traced.program import traced_program
from jaxdist.plan.traced.readers import first_readers
from jaxdist.plan.traced.sharding import Text, aligned
from jaxdist.specs import PyTree, format_bytes, path_name
from jaxdist.state import TrainState
from jaxdist.train_step import TrainStep

# Primitives of jax 0.10 to 0.12 -> names here. Reductions other than sums are all-reduces as well.
OP_OF_PRIMITIVE = {
    "psum": "psum",
    "psum_invariant": "psum",
    "pmax": "psum",
    "pmin": "psum",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "ppermute": "ppermute",
    "all_to_all": "all_to_all",
}
GRADIENT = "gradient of "
LATE_GRADIENT = "gradient."  # how the scopes of `reduce_late` begin
INSIDE, BETWEEN = "inside a host", "between hosts"
# A pipeline's sends: (phase, purpose) by scope.
SENDS = {
    TO_NEXT: ("forward", "activations to the next stage"),
    TO_BEFORE: ("backward", "gradients to the stage before"),
}
# The scope of these sends ends in how many of them carry data that is used.
_USED = re.compile(rf"(?:{re.escape(TO_NEXT)}|{re.escape(TO_BEFORE)})\.(\d+)")


class Collective(NamedTuple):
    """A collective of the program, with all its calls in a step.

    op: psum (all-reduce), all_gather, reduce_scatter, ppermute or all_to_all
    bytes_per_call, elements_per_call: of the input on one device
    calls: in a step, loops multiplied out
    wire_bytes: what one device sends in a step, by the bandwidth-optimal algorithm of a native collective (Patarasuk
        and Yuan 2009), or as a ppermute says
    link: the slowest that it crosses, `INSIDE` or `BETWEEN`
    source: the line that asks for it; of a parameter's gather and reduce-scatter the line of the layer that first
        computes with the parameter (see `readers`)
    phase: forward, backward, recompute (the forward pass again, for the backward pass) or once a step
    purpose: the parameter, gradient or activation
    stages: calls on each stage of a pipeline; `calls` and `wire_bytes` are those of the stage with most
    at_most: calls on a device that took every branch
    used: how many of a pipeline's sends carry data that is used; None: all
    conditional: whether it is in a branch that depends on data; it is counted as if that ran
    """

    op: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    bytes_per_call: int
    elements_per_call: int
    calls: int
    wire_bytes: float
    link: str
    source: str
    phase: str
    purpose: str
    stages: tuple[int, ...] = ()
    at_most: int = 0
    used: int | None = None
    conditional: bool = False


class Ledger(NamedTuple):
    """All collectives of a step, in program order, equal ones merged. mesh: {axis: size}."""

    collectives: tuple[Collective, ...]
    mesh: dict[str, int]

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device of the busiest stage sends in a step."""
        return sum(self.total("op").values())

    def total(self, key: str) -> dict[Any, float]:
        """Wire bytes of a device of the busiest stage, by a field of `Collective`, as "axes"; the largest first."""
        totals: Counter[Any] = Counter()
        stage = self.busiest
        for each in self.collectives:
            sent = each.wire_bytes * each.stages[stage] / each.calls
            if sent:
                totals[getattr(each, key)] += sent  # type: ignore[assignment]
        return dict(totals.most_common())

    def lines(self, rows: int = 24, *, rest: str = "print(ledger.text(rows=0)) shows all") -> list[str]:
        """The collectives as a table, the totals by axes and links below it.

        rows: how many, the largest first; 0: all. rest: what says how to see the others.
        """
        collectives = sorted(self.collectives, key=lambda each: -each.wire_bytes)
        rows = rows or len(collectives)
        heads = ("op", "axes", "n", "dtype", "a call", "calls", "sent", "link", "when", "what", "PyTorch", "source")
        lines: list[tuple[object, ...]] = [heads]
        for each in collectives[:rows]:
            what = each.purpose + ("" if each.used is None else f", {each.used} of {each.calls} used")
            what += " (in a branch)" if each.conditional else _on_stages(each.stages)
            call, sent = format_bytes(each.bytes_per_call), format_bytes(each.wire_bytes)
            traffic = (each.op, "+".join(each.axes), each.group_size, each.dtype, call, each.calls, sent, each.link)
            lines.append((*traffic, each.phase, what, pytorch_term(each), each.source))
        text = ["Collectives of one step, of one device:", *aligned(lines, right=(2, 4, 5, 6))]
        if left := collectives[rows:]:
            text.append(f"... and {len(left)} more, {format_bytes(sum(each.wire_bytes for each in left))} ({rest})")
        total = self.wire_bytes
        axes = [f"over {'+'.join(name)} {format_bytes(sent)}" for name, sent in self.total("axes").items()]
        links = [f"{name} {format_bytes(sent)}" for name, sent in self.total("link").items()]
        parts = f": {', '.join(axes)}; {', '.join(links)}" if total else ""
        return [*text, "", f"A device sends {format_bytes(total)} a step{parts}"]

    def text(self, rows: int = 24) -> str:
        """What `print` shows: see `lines`."""
        return "\n".join(self.lines(rows))

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return Text(self.text())._repr_html_()

    @property
    def busiest(self) -> int:
        """The stage whose devices send most."""
        sent = [np.multiply(each.stages, each.wire_bytes / each.calls) for each in self.collectives]
        return int(np.argmax(np.sum(sent, axis=0))) if sent else 0


def pytorch_term(each: Collective) -> str:
    """The name of a collective in PyTorch."""
    if (each.phase, each.purpose) in SENDS.values():
        return "point to point"
    if each.purpose.startswith(OPTIMIZER):
        return "distributed Muon"
    if "tensor" in each.axes:
        return "Megatron tensor parallel"
    if each.purpose == "loss_and_weight":
        return "dist.all_reduce(loss)"
    if each.op == "all_gather":
        return "ZeRO broadcast, once a step" if each.phase == "once a step" else "FSDP unshard"
    if each.op == "reduce_scatter":
        return "ZeRO-1 reduce" if each.phase == "once a step" else "FSDP reduce-scatter"
    summed = each.purpose.startswith("gradients") and "activations" not in each.purpose
    return "DDP buckets, HSDP all-reduce" if summed else "point to point"


def _on_stages(calls: tuple[int, ...]) -> str:
    """The stages of a pipeline that make a call, if not all do: " (stage 3)", " (stages 0-2)", " (stages 0, 3)"."""
    found = [stage for stage, count in enumerate(calls) if count]
    if len(found) in (0, len(calls)):
        return ""
    together = len(found) > 2 and found[-1] - found[0] == len(found) - 1
    numbers = f"{found[0]}-{found[-1]}" if together else ", ".join(map(str, found))
    return f" ({'stage' if len(found) == 1 else 'stages'} {numbers})"


def ledger(step: TrainStep, state: TrainState, batch: PyTree, *, devices_per_host: int = 8) -> Ledger:
    """The ledger of `step(state, batch)`.

    state, batch: arrays or ShapeDtypeStructs (see `state_target`), on a Mesh or an AbstractMesh
    devices_per_host: for meshes without devices, or of simulated ones; real GPUs know their hosts

    Raises `UserError` for a loop that communicates and whose length is not in the program.

    >>> loss = lambda params, batch, keys: (((batch @ params["w"]) ** 2).sum(), batch.shape[0])
    >>> mesh, tx = jaxdist.make_mesh(fsdp=8), optax.sgd(0.1)
    >>> state = jaxdist.state_target(lambda key: {"w": jnp.zeros((8, 1))}, tx, mesh, strategy="zero3")
    >>> step = jaxdist.make_train_step(loss, tx, mesh, strategy="zero3")
    >>> print(jaxdist.ledger(step, state, jax.ShapeDtypeStruct((8, 8), jnp.float32)))
    Collectives of one step, of one device:
    op ...
    all_gather ...
    A device sends ... a step: over fsdp ...
    """
    return ledger_of(traced_program(step, state, batch), state, devices_per_host=devices_per_host)


def ledger_of(jaxpr: Any, state: TrainState, *, devices_per_host: int = 8) -> Ledger:
    """The ledger of a step that is traced already: see `ledger`. jaxpr: of `traced_program`."""
    mesh = state.step.sharding.mesh
    names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    found = collectives_of(jaxpr, mesh, hosts_of(mesh, devices_per_host), names)
    return Ledger(found, {str(axis): int(size) for axis, size in mesh.shape.items()})


def collectives_of(jaxpr: Any, mesh: AnyMesh, hosts: np.ndarray, parameters: set[str]) -> tuple[Collective, ...]:
    """The collectives of a jaxpr, in program order, equal ones together.

    hosts: of the devices, in the mesh's shape, see `hosts_of`
    parameters: their names, "blocks.mlp.up.kernel"
    """
    _check_known(jaxpr)
    read = functools.partial(_collective, mesh=mesh, hosts=hosts, parameters=parameters)

    def weight(each: Reached) -> float:
        found = read(each)
        return found.wire_bytes * max(found.stages)

    found: dict[Collective, tuple[np.ndarray, int]] = {}
    lines = first_readers(jaxpr, parameters)
    start = outermost(jaxpr, mesh.shape)
    for each in map(read, reached(jaxpr, start, lambda equation: bool(moving_axes(equation)), weight)):
        if any(each.stages):
            key = each._replace(stages=(), at_most=0)
            stages, at_most = found.get(key, (0, 0))
            found[key] = stages + np.asarray(each.stages), at_most + each.at_most
    merged = []
    for each, (stages, at_most) in found.items():
        calls = int(stages.max())
        sent, source = each.wire_bytes * calls, lines.get(each.purpose.removeprefix(GRADIENT), each.source)
        counts = tuple(stages.tolist())
        merged.append(each._replace(calls=calls, wire_bytes=sent, stages=counts, at_most=at_most, source=source))
    return tuple(merged)


def _check_known(jaxpr: Any) -> None:
    """Raise `UserError` for a collective that is not in `OP_OF_PRIMITIVE`, or that runs an unknown number of times."""
    for equation, _, _, inside in every_equation(jaxpr):
        axes, name = moving_axes(equation), equation.primitive.name
        if axes and name not in OP_OF_PRIMITIVE:
            raise UserError(f"ledger: {name} over {', '.join(axes)} is not known; it is in {source_of(equation)}")
        loops = [each for each in inside if each.primitive.name == "while"]
        if axes and loops:
            raise UserError(
                f"ledger: a loop in {source_of(loops[-1])} communicates, and its length is not in the "
                "program; use lax.scan, or fori_loop with fixed bounds"
            )


def hosts_of(mesh: AnyMesh, devices_per_host: int) -> np.ndarray:
    """The host of every device, in the shape of the mesh."""
    shape = tuple(mesh.shape.values())
    if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "cpu":
        return np.vectorize(host_of, otypes=[int])(mesh.devices)
    return (np.arange(math.prod(shape)) // devices_per_host).reshape(shape)


def wire_bytes(op: str, nbytes: float, n: int) -> float:
    """Bytes that each of n devices sends for one call with an input of `nbytes`; or elements, if given elements."""
    share = {"psum": 2 * (n - 1) / n, "all_gather": n - 1, "reduce_scatter": (n - 1) / n, "all_to_all": (n - 1) / n}
    return nbytes * share.get(op, 1)


def _collective(each: Reached, *, mesh: AnyMesh, hosts: np.ndarray, parameters: set[str]) -> Collective:
    """The entry of one equation: `calls` is 1, and `wire_bytes` is of one call."""
    equation, scope = each.equation, each.scope
    axes, op = moving_axes(equation), OP_OF_PRIMITIVE[equation.primitive.name]
    groups = equation.params.get("axis_index_groups")
    n = len(groups[0]) if groups else math.prod(mesh.shape[axis] for axis in axes)
    nbytes = operand_bytes(equation)
    phase, purpose = meaning_of(op, each.names, parameters)
    stages, used = scope.calls, _USED.search(each.names)
    if axes == (AXIS,) and op == "ppermute":  # a stage that is in no pair sends to nobody
        senders = [source for source, _ in equation.params["perm"]]
        stages = np.where(np.isin(np.arange(len(stages)), senders), stages, 0)
    return Collective(
        op=op,
        axes=axes,
        group_size=n,
        dtype=str(equation.invars[0].aval.dtype),
        bytes_per_call=nbytes,
        elements_per_call=sum(math.prod(x.aval.shape) for x in equation.invars),
        calls=1,
        wire_bytes=wire_bytes(op, nbytes, n),
        link=_link(axes, mesh, hosts),
        source=source_of(equation),
        phase=phase,
        purpose=purpose,
        stages=tuple(stages.tolist()),
        at_most=scope.at_most,
        used=int(used[1]) if used else None,
        conditional=not scope.certain,
    )


def _link(axes: tuple[str, ...], mesh: AnyMesh, hosts: np.ndarray) -> str:
    """`BETWEEN` if any group of devices along these axes is on several hosts, else `INSIDE`."""
    order = list(mesh.axis_names)
    moved = np.moveaxis(hosts, [order.index(axis) for axis in axes], range(-len(axes), 0))
    groups = moved.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    return BETWEEN if (groups != groups[:, :1]).any() else INSIDE


def meaning_of(op: str, names: str, parameters: set[str]) -> tuple[str, str]:
    """(phase, purpose) of a collective, by the named scopes around it."""
    phase, name = phase_of(names), scope_of(names)
    for send, meaning in SENDS.items():
        if name.startswith(send):
            return meaning
    if (parameter := name.removeprefix(LATE_GRADIENT)) in parameters:
        reduces = op == "reduce_scatter" or (op == "ppermute" and (phase == "backward" or parameter != name))
        return phase, f"{GRADIENT if reduces else ''}{parameter}"
    if phase == "once a step":
        return phase, name
    if name.endswith(".gradients"):  # of a unit, summed where the backward pass makes them
        return phase, f"gradients of {name.removesuffix('.gradients')}"
    return phase, f"{'gradients of activations' if phase == 'backward' else 'activations'} of {name or 'the loss'}"
