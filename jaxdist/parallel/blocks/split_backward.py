"""A backward pass in two halves: the gradient of the input, for which the stage before waits, and the gradients of
parameters, for which nobody waits (Qi et al. 2024, arXiv 2401.10241, section 2).

Of what the first half computes, the second is given what depends on the incoming gradient. It computes the rest again:
with rematerialisation that is the forward pass, for otherwise all activations of the block would be kept from one half
to the other.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxdist.jaxpr import walk
from jaxdist.jaxpr.evaluate import atom_value, bind, inlined, needed, variables
from jaxdist.specs import PyTree


class Halves(NamedTuple):
    """See `halve`. reads: which leaves of the unit the second half reads."""

    jaxpr: Any
    constants: list[Any]
    first: list[Any]  # equations
    second: list[Any]
    crossing: list[Any]  # variables
    treedef: Any  # of the gradients of the unit
    reads: list[bool]

    def input(self, unit: PyTree, grad: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """(gradient of the input, what the second half needs)."""
        known = self._run(self.first, [*jax.tree.leaves(unit), grad])
        return atom_value(known, self.jaxpr.outvars[-1]), [known[variable] for variable in self.crossing]

    def weights(self, leaves: Iterable[jax.Array], crossing: Iterable[jax.Array]) -> PyTree:
        """Gradients of the unit, given those of its leaves that are read."""
        given, known = iter(leaves), dict(zip(self.crossing, crossing, strict=True))
        known = self._run(self.second, [*(next(given) if read else None for read in self.reads), None], known)
        return jax.tree.unflatten(self.treedef, [atom_value(known, atom) for atom in self.jaxpr.outvars[:-1]])

    def _run(self, equations: list[Any], values: list[Any], known: dict[Any, Any] | None = None) -> dict[Any, Any]:
        known = dict(zip((*self.jaxpr.constvars, *self.jaxpr.invars), (*self.constants, *values), strict=True)) | (
            known or {}
        )
        for equation in equations:
            results = bind(equation, [atom_value(known, atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return known


def halve(pull: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]], unit: PyTree, grad: Any) -> Halves:
    """Cut pull(unit, gradient of the output) -> (gradients of the unit, gradient of the input) in two.

    unit and grad are arrays or ShapeDtypeStructs; what `pull` closes over is read by both halves.
    """
    traced = inlined(pull, unit, grad)
    treedef = jax.tree.structure(jax.eval_shape(pull, unit, grad)[0])
    equations, outputs, invars = walk.equations(traced), traced.jaxpr.outvars, traced.jaxpr.invars
    late = {invars[-1]}  # depends on the incoming gradient
    for equation in equations:
        if any(atom in late for atom in variables(equation.invars)):
            late.update(equation.outvars)
    first, _ = needed(equations, outputs[-1:], set())
    made = {invars[-1], *_made_by(first)}
    second, reads = needed(equations, outputs[:-1], made & late)
    crossing = [variable for variable in (invars[-1], *_made_by(first)) if variable in reads & made & late]
    return Halves(
        traced.jaxpr, traced.consts, first, second, crossing, treedef, [variable in reads for variable in invars[:-1]]
    )


def _made_by(equations: list[Any]) -> list[Any]:
    return [variable for equation in equations for variable in equation.outvars]
