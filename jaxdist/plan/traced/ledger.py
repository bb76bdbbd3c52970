"""Every collective of a train step, before it runs: who, over which axes, how many bytes, how often, from which line.

Read from the jaxpr of the very function that trains, so that no devices are needed and a mesh may be far larger than
the machine. What the compiler adds for the optimizer, in the global region, is not in the jaxpr: see `plan.hlo`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from jaxdist.errors import UserError
from jaxdist.jaxpr.axes import moving_axes
from jaxdist.jaxpr.branches import AXIS, Scope, outermost
from jaxdist.mesh import AnyMesh
from jaxdist.parallel.pipeline.run import BACKWARD, FORWARD, TO_BEFORE, TO_NEXT
from jaxdist.specs import PyTree, path_name
from jaxdist.state import TrainState
from jaxdist.train_step import TrainStep

PACKAGE = Path(__file__).parents[2]
# Primitives of jax 0.10 to 0.12 -> names here. Reductions other than sums are all-reduces as well.
OPS = {
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
INSIDE, BETWEEN = "inside a host", "between hosts"
# A pipeline's sends: (phase, purpose) by scope.
SENDS = {
    TO_NEXT: ("forward", "activations to the next stage"),
    TO_BEFORE: ("backward", "gradients to the stage before"),
}
# What a name stack is made of beside names that somebody gave: transformations, primitives, einsums.
_WRAPPER = re.compile(r"\b\w+\(|\)")
_NOISE = re.compile(
    r"^(rematted_computation|checkpoint|while|body|cond|branch_\d+_fun|closed_call|shard_map|.*->.*"
    rf"|{FORWARD}|{BACKWARD})?$"
)
_USED = re.compile(rf"(?:{re.escape(TO_NEXT)}|{re.escape(TO_BEFORE)})\.(\d+)")


class Collective(NamedTuple):
    """What one line of the program communicates in a step.

    op: psum (all-reduce), all_gather, reduce_scatter, ppermute, all_to_all. bytes_per_call, elements_per_call: the
    input on one device. calls: a step, loops multiplied out. wire_bytes: what one device sends in a step, by the
    bandwidth-optimal algorithm of a native collective (Patarasuk and Yuan 2009), or as a ppermute says. link: the
    slowest that it crosses. phase: forward, backward, recompute (forward again, in the backward pass) or once a step.
    purpose: which parameter, gradient or activation. stages: calls of each stage of a pipeline, of which `calls` and
    `wire_bytes` are the most. at_most: calls of a device that took every branch. used: of a pipeline's sends, how many
    across a boundary carry what is used; None: all. conditional: in a branch that depends on data; counted as taken.
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
    """All collectives of a step, in program order, equal ones together. mesh: sizes of the axes."""

    collectives: tuple[Collective, ...]
    mesh: dict[str, int]

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a step, on the stage that sends most."""
        return sum(self.total("op").values())

    def total(self, key: str) -> dict[Any, float]:
        """Wire bytes of that device by a field of `Collective`, largest first: total("axes"), total("purpose")."""
        totals: Counter[Any] = Counter()
        stage = self.busiest
        for each in self.collectives:
            sent = each.wire_bytes * each.stages[stage] / each.calls
            if sent:
                totals[getattr(each, key)] += sent  # type: ignore[assignment]
        return dict(totals.most_common())

    @property
    def busiest(self) -> int:
        """The stage whose devices send most."""
        sent = [np.multiply(each.stages, each.wire_bytes / each.calls) for each in self.collectives]
        return int(np.argmax(np.sum(sent, axis=0))) if sent else 0


def ledger(step: TrainStep, state: TrainState, batch: PyTree, *, devices_per_host: int = 8) -> Ledger:
    """The ledger of `step(state, batch)`.

    state and batch may be ShapeDtypeStructs (`state_target`), on a mesh or an AbstractMesh. devices_per_host: for a
    mesh without devices, or with simulated ones; those of GPUs are known. Raises `UserError` for a loop whose length is
    not in the program.
    """
    mesh = state.step.sharding.mesh
    jaxpr = step.jitted(state).trace(state, batch).jaxpr
    names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    found = collectives_of(jaxpr, mesh, hosts_of(mesh, devices_per_host), names)
    return Ledger(found, {str(axis): int(size) for axis, size in mesh.shape.items()})


def collectives_of(jaxpr: Any, mesh: AnyMesh, hosts: np.ndarray, parameters: set[str]) -> tuple[Collective, ...]:
    """The collectives of a jaxpr, in program order, equal ones together. hosts: of the devices, in the mesh's shape.
    parameters: their names."""
    found: dict[Collective, tuple[np.ndarray, int]] = {}
    for each in _Reader(mesh, hosts, parameters).read(jaxpr, outermost(jaxpr, mesh.shape), ""):
        key = each._replace(stages=(), at_most=0)
        stages, at_most = found.get(key, (0, 0))
        found[key] = stages + np.asarray(each.stages), at_most + each.at_most
    merged = []
    for each, (stages, at_most) in found.items():
        calls = int(stages.max())
        merged.append(
            each._replace(
                calls=calls, wire_bytes=each.wire_bytes * calls, stages=tuple(stages.tolist()), at_most=at_most
            )
        )
    return tuple(merged)


def hosts_of(mesh: AnyMesh, devices_per_host: int) -> np.ndarray:
    """The host of every device, in the shape of the mesh."""
    shape = tuple(mesh.shape.values())
    if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "cpu":
        return np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    return (np.arange(math.prod(shape)) // devices_per_host).reshape(shape)


def wire_bytes(op: str, nbytes: int, n: int) -> float:
    """Bytes that each of n devices sends for one call with an input of `nbytes`; or elements, if given elements."""
    share = {"psum": 2 * (n - 1) / n, "all_gather": n - 1, "reduce_scatter": (n - 1) / n, "all_to_all": (n - 1) / n}
    return nbytes * share.get(op, 1)


class _Reader:
    """Walks jaxprs with how often they run and under which names."""

    def __init__(self, mesh: AnyMesh, hosts: np.ndarray, parameters: set[str]) -> None:
        self.mesh, self.hosts, self.parameters = mesh, hosts, parameters

    def read(self, jaxpr: Any, scope: Scope, stack: str) -> Iterator[Collective]:
        """The collectives of a jaxpr, as of one call each."""
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name, inner = equation.primitive.name, f"{stack}/{equation.source_info.name_stack}"
            axes = moving_axes(equation)
            if axes and name not in OPS:
                raise UserError(f"ledger: {name} over {', '.join(axes)} is not known; it is in {source_of(equation)}")
            if axes:
                yield self.collective(equation, axes, scope, inner)
                continue
            subs = list(jaxprs_in_params(equation.params))
            if name == "while" and any(True for sub in subs for _ in self.read(sub, scope.inside(sub), inner)):
                raise UserError(
                    f"ledger: a loop in {source_of(equation)} communicates, and its length is not in the "
                    "program; use lax.scan, or fori_loop with fixed bounds"
                )
            if name == "scan":
                yield from self.read(subs[0], scope.turns(equation), inner)
            elif name == "cond":
                yield from self.condition(equation, scope, inner)
            elif subs:
                for sub in subs:
                    called = scope.inside(sub, equation)
                    yield from self.read(sub, called, inner)
                    scope.returned(equation, sub, called)
            else:
                scope.follow(equation)

    def condition(self, equation: Any, scope: Scope, stack: str) -> Iterator[Collective]:
        """Of all branches, as often as they are taken; where that depends on data, of the one that sends most."""
        bodies = equation.params["branches"]
        inside = scope.branches(equation)
        found = [list(self.read(body, branch, stack)) for body, branch in zip(bodies, inside, strict=True)]
        if scope.read(equation.invars[0]) is None:
            yield from max(found, key=lambda some: sum(each.wire_bytes * max(each.stages) for each in some), default=[])
        else:
            yield from (each for some in found for each in some if any(each.stages))

    def collective(self, equation: Any, axes: tuple[str, ...], scope: Scope, stack: str) -> Collective:
        op = OPS[equation.primitive.name]
        groups = equation.params.get("axis_index_groups")
        n = len(groups[0]) if groups else math.prod(self.mesh.shape[axis] for axis in axes)
        nbytes = sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in equation.invars)
        count = sum(math.prod(x.aval.shape) for x in equation.invars)
        phase, purpose = self.meaning(op, stack)
        stages = scope.calls
        if axes == (AXIS,) and op == "ppermute":  # a stage that sends to nobody
            senders = [source for source, _ in equation.params["perm"]]
            stages = np.where(np.isin(np.arange(len(stages)), senders), stages, 0)
        return Collective(
            op,
            axes,
            n,
            str(equation.invars[0].aval.dtype),
            nbytes,
            count,
            1,
            wire_bytes(op, nbytes, n),
            self.link(axes),
            source_of(equation),
            phase,
            purpose,
            tuple(stages.tolist()),
            scope.at_most,
            used_of(stack),
            not scope.certain,
        )

    def link(self, axes: tuple[str, ...]) -> str:
        order = list(self.mesh.axis_names)
        moved = np.moveaxis(self.hosts, [order.index(axis) for axis in axes], range(-len(axes), 0))
        groups = moved.reshape(-1, math.prod(self.mesh.shape[axis] for axis in axes))
        return BETWEEN if (groups != groups[:, :1]).any() else INSIDE

    def meaning(self, op: str, stack: str) -> tuple[str, str]:
        """(phase, purpose) from the names on the way to an equation."""
        phase, name = phase_of(stack), scope_of(stack)
        for send, meaning in SENDS.items():
            if name.startswith(send):
                return meaning
        if name in self.parameters:
            return phase, f"{'gradient of ' if op == 'reduce_scatter' else ''}{name}"
        if phase == "once a step":
            return phase, name
        if name.endswith(".gradients"):  # of a unit, summed where the backward pass makes them
            return phase, f"gradients of {name.removesuffix('.gradients')}"
        return phase, f"{'gradients of activations' if phase == 'backward' else 'activations'} of {name or 'the loss'}"


def phase_of(stack: str) -> str:
    """ "forward", "backward", "recompute" or "once a step", from a name stack."""
    scopes = stack.split("/")
    # "transpose(rematted_computation)": the backward pass of what runs again, where it does (`segments`).
    if any("rematted_computation" in scope and not scope.startswith("transpose(") for scope in scopes):
        return "recompute"
    if "jvp" in stack and "transpose(" in stack:
        return "backward"
    if "jvp" in stack:
        return "recompute" if BACKWARD in scopes else "forward"
    # Pipelines: the embedding of F is not differentiated where it stands, the halves of a backward pass are no more.
    return "forward" if FORWARD in scopes else "backward" if BACKWARD in scopes else "once a step"


def used_of(stack: str) -> int | None:
    """How many of a pipeline's sends are used, from the name stack of one."""
    found = _USED.search(stack)
    return int(found[1]) if found else None


def scope_of(stack: str) -> str:
    """ "blocks.attention" from the name stack "jvp()/while/body/blocks/attention/BSD,DE->BSE"."""
    names = [name for name in _WRAPPER.sub("", stack).split("/") if not _NOISE.match(name)]
    return ".".join(dict.fromkeys(names))


def source_of(equation: Any) -> str:
    """The source line "jaxdist/nn/linear.py:37": the innermost that is neither jax's nor in `collectives`."""
    frames = equation.source_info.traceback.frames if equation.source_info.traceback is not None else []
    for frame in frames:
        path = Path(frame.file_name)
        if path.is_relative_to(PACKAGE):
            inside = path.relative_to(PACKAGE)
            if inside.parts[0] != "collectives" and inside.name != "specs.py":
                return f"{PACKAGE.name}/{inside.as_posix()}:{frame.line_num}"
        elif not {"site-packages", "lib"} & set(path.parts) and not frame.file_name.startswith("<"):
            return f"{path.name}:{frame.line_num}"
    return "unknown"
