"""A backward pass in two parts: the gradient of the input, for which the stage before waits, and the gradients of
parameters, for which no stage waits (Qi et al. 2024, arXiv 2401.10241, section 2).

The first part hands over those values that depend on the incoming gradient. The second part computes all others again.
With rematerialisation these include the forward pass: kept, they would be all activations of the block.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxdist.jaxpr import walk
from jaxdist.jaxpr.evaluate import atom_value, bind, inlined, needed, variables
from jaxdist.specs import PyTree


class SplitBackward(NamedTuple):
    """The two parts of a backward pass, made by `split_backward`.

    jaxpr, constants: the whole backward pass.
    first, second: the equations of each part.
    crossing: the variables that the first part hands over.
    treedef: of the gradients of parameters.
    reads: for each parameter, whether the second part reads it.
    """

    jaxpr: Any
    constants: list[Any]
    first: list[Any]
    second: list[Any]
    crossing: list[Any]
    treedef: Any
    reads: list[bool]

    def input_gradient(self, unit: PyTree, grad: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """(gradient of the input, values that cross over to `weight_gradients`)."""
        known = self._run(self.first, [*jax.tree.leaves(unit), grad])
        return atom_value(known, self.jaxpr.outvars[-1]), [known[variable] for variable in self.crossing]

    def weight_gradients(self, leaves: Iterable[jax.Array], crossing: Iterable[jax.Array]) -> PyTree:
        """Gradients of parameters. leaves: those parameters that the second part reads."""
        given, known = iter(leaves), dict(zip(self.crossing, crossing, strict=True))
        known = self._run(self.second, [*(next(given) if read else None for read in self.reads), None], known)
        return jax.tree.unflatten(self.treedef, [atom_value(known, atom) for atom in self.jaxpr.outvars[:-1]])

    def _run(self, equations: list[Any], values: list[Any], known: dict[Any, Any] | None = None) -> dict[Any, Any]:
        inputs = (*self.jaxpr.constvars, *self.jaxpr.invars)
        known = dict(zip(inputs, (*self.constants, *values), strict=True)) | (known or {})
        for equation in equations:
            results = bind(equation, [atom_value(known, atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return known


def split_backward(
    pull: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array]], unit: PyTree, grad: Any
) -> SplitBackward:
    """Split pull(parameters, gradient of the output) -> (gradients of parameters, gradient of the input).

    unit, grad: arrays or ShapeDtypeStructs. Values that `pull` closes over are read by both parts.
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
    read_again = [variable in reads for variable in invars[:-1]]
    return SplitBackward(traced.jaxpr, traced.consts, first, second, crossing, treedef, read_again)


def _made_by(equations: list[Any]) -> list[Any]:
    return [variable for equation in equations for variable in equation.outvars]
