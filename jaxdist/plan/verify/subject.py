"""A loss of a user with what it is called with, and its results in one form."""

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.jaxpr.source import PACKAGE, is_installed, source_of
from jaxdist.jaxpr.walk import every_equation, inner_jaxprs, primitives
from jaxdist.parallel.batch_mean import SharedRows, shared_rows
from jaxdist.parallel.loss_results import check_call, read_results
from jaxdist.parallel.microbatch import keys_from
from jaxdist.plan.verify.program import PARTS_AXIS
from jaxdist.specs import PyTree

EXACT = 1e-9  # of the largest number, in float64
NARROW = {4: 1e-4, 2: 2e-2, 1: 0.2}  # where numbers have so many bytes
RATES = "the optimizer's own numbers, such as its rate"  # which no line of a program has written
# Operations on floats whose results are floats of their operands, or need no more digits.
NO_ROUNDING = primitives(
    """
    broadcast_in_dim reshape transpose squeeze expand_dims rev pad copy copy_p slice dynamic_slice dynamic_update_slice
    gather concatenate select_n split stop_gradient optimization_barrier name pvary pcast all_gather ppermute
    neg abs sign max min clamp reduce_max reduce_min cummax cummin sort top_k iota floor ceil round bitcast_convert_type
    scatter scatter-min scatter-max real imag complex conj layout_constraint
    """
)


class Subject(NamedTuple):
    """loss(params, batch, keys[, model_state]) and its arguments."""

    loss: Callable[..., Any]
    params: PyTree
    batch: PyTree
    keys: jax.Array
    model_state: PyTree

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return int(self.keys.shape[0])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `results` takes."""
        return self.params, self.batch, self.keys, self.model_state

    def part(self, rows: Any) -> "Subject":
        """The same with some of the rows."""
        batch, keys = jax.tree.map(lambda leaf: leaf[rows], (self.batch, self.keys))
        return self._replace(batch=batch, keys=keys)

    def results(self, params: PyTree, batch: PyTree, keys: jax.Array, model_state: PyTree) -> tuple[Any, Any, PyTree]:
        """(sum, weight, new model_state)."""
        total, found = read_results(self._returned(params, batch, keys, model_state), model_state)
        return total, found.weight, found.model_state

    def _returned(self, params: PyTree, batch: PyTree, keys: jax.Array, model_state: PyTree) -> Any:
        arguments = (params, batch, keys, *([model_state] if jax.tree.leaves(model_state) else []))
        check_call(self.loss, arguments)
        return self.loss(*arguments)

    def differentiable_weight(self, *arguments: Any) -> jax.Array:
        """The weight with its gradient, which `results` stop. A `batch_mean` adds up over the axis `PARTS_AXIS`."""
        with shared_rows(SharedRows(axes=(PARTS_AXIS,))):
            return jnp.asarray(self._returned(*arguments)[1]).astype(float)

    def in_parts(self, *arguments: Any) -> tuple[Any, Any, PyTree]:
        """`results` where a `batch_mean` adds up over the axis `PARTS_AXIS` of a vmap."""
        with shared_rows(SharedRows(axes=(PARTS_AXIS,))):
            return self.results(*arguments)

    def with_metrics(self, *arguments: Any) -> tuple[Any, Any, Any]:
        """(sum, weight, metrics) where a `batch_mean` adds up over the axis `PARTS_AXIS` of a vmap."""
        with shared_rows(SharedRows(axes=(PARTS_AXIS,))):
            total, found = read_results(self._returned(*arguments), self.model_state)
        return total, found.weight, found.metrics

    def traced(self, function: Callable[..., Any], *, parts: int = 0) -> Any:
        """The jaxpr of a function of the arguments. parts: the size of the axis `PARTS_AXIS`, if it is to be there."""
        environment = [(PARTS_AXIS, parts)] if parts else None
        # A new function each time: jax keeps traces by function.
        return jax.make_jaxpr(functools.partial(lambda *x: function(*x)), axis_env=environment)(*self.arguments)


def subject_of(loss: Any, params: PyTree, batch: PyTree, model_state: PyTree, *, seed: int) -> Subject:
    """The subject, with keys as the first step has them."""
    rows = len(jax.tree.leaves(batch)[0])
    return Subject(loss, params, jax.tree.map(jnp.asarray, batch), keys_from(0, seed, 0, rows), model_state)


def widened(subject: Subject, *, seed: int) -> Subject:
    """The subject in float64, within `jax.enable_x64`: from the arrays that the user gave."""

    params, batch, state = map(in_float64, (subject.params, subject.batch, subject.model_state))
    return Subject(subject.loss, params, batch, keys_from(0, seed, 0, subject.rows), state)


def in_float64(tree: PyTree) -> PyTree:
    """The tree with its floats in float64, within `jax.enable_x64`."""

    def wide(leaf: Any) -> jax.Array:
        array = np.asarray(leaf)
        return jnp.asarray(array, jnp.float64) if jnp.issubdtype(array.dtype, jnp.floating) else jnp.asarray(array)

    return jax.tree.map(wide, tree)


def moved(params: PyTree) -> PyTree:
    """Parameters a little away, so that none is 0 or 1 and hides what it multiplies."""
    rng = np.random.default_rng(0)

    def move(leaf: Any) -> jax.Array:
        array = np.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return jnp.asarray(leaf)
        size = float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
        noise = rng.standard_normal(array.shape) * 0.1 * (size or 1.0)
        return jnp.asarray((array + noise).astype(array.dtype))

    return jax.tree.map(move, params)


def narrowing(jaxpr: Any, *, casts: bool = False) -> tuple[int, list[str]]:
    """(the bytes of the narrowest floats that are rounded to or computed with, the lines where they are), 8 for none.

    What jaxdist narrows itself, it says so in its options; it is left out.
    casts: only what wider floats become, as of a whole step, where an integer may become a float32
    """
    size, lines = 8, dict[str, None]()
    for site in every_equation(jaxpr):
        if casts and site.equation.primitive.name != "convert_element_type":
            continue
        if (own := _rounds_to(site.equation)) < 8:
            line = source_of(site.equation, ())
            if not line.startswith(f"{PACKAGE.name}/"):
                size, lines[RATES if line == "unknown" and casts else line] = min(size, own), None
    return size, list(lines)


def _rounds_to(equation: Any) -> int:
    """The bytes of the floats that an equation rounds to; 8 where it only moves them, or has another inside."""
    if equation.primitive.name in NO_ROUNDING or inner_jaxprs(equation):
        return 8
    old, new = (
        [max(1, jnp.finfo(atom.aval.dtype).bits // 8) for atom in atoms if _is_inexact(atom.aval)]
        for atoms in (equation.invars, equation.outvars)
    )
    if equation.primitive.name == "convert_element_type" and (not old or old <= new):
        return 8
    return min(new, default=8)


def _is_inexact(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact)) if hasattr(aval, "dtype") else False


def precision_text(size: int, lines: list[str]) -> str:
    """What is said of `narrowing`."""
    if size == 8:
        return f"computed in float64, compared to {EXACT:g}"
    return f"narrower than float64 at {', '.join(lines[:3])}: compared to {NARROW[size]:g} only"


def tolerance(size: int) -> float:
    """Of the largest number, where the narrowest floats have so many bytes."""
    return EXACT if size == 8 else NARROW[size]


def line_of(error: BaseException) -> str:
    """The line of the user's code that an exception came from: the innermost that is in no package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        each for each in frames if not is_installed(each.filename) and not Path(each.filename).is_relative_to(PACKAGE)
    ]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "unknown"
