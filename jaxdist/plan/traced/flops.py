"""Floating-point operations of a program, counted in its jaxpr: what rematerialisation costs, before any compiler has
seen it."""

import math
from typing import Any

from jaxdist.jaxpr.walk import equations, inner_jaxprs, length_of


def flops_of(jaxpr: Any) -> float:
    """FLOPs of the matrix products and convolutions of a jaxpr, two for each multiplication and addition.

    Loops are multiplied out: a scan by its length; a `while`, whose rounds nobody knows, counts once. Of a condition
    the most expensive branch counts. Inside `jax.shard_map` shapes are those of one device, and so is the count.
    Elementwise work, a few percent of a transformer's, is left out.
    """
    return sum(map(_flops_of_equation, equations(jaxpr)), 0.0)


def _flops_of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lengths = [equation.invars[0].aval.shape[dim] for dim in contracted]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(lengths)
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, params["dimension_numbers"]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    if name.startswith("dot_product_attention_"):
        # cuDNN's attention has two products, and its backward pass five. Masked halves count, as they do without it.
        (*_, queries, heads, width), keys = equation.invars[0].aval.shape, equation.invars[1].aval.shape[-3]
        products = 2 if "fwd" in name else 5
        return 2.0 * products * equation.invars[0].aval.shape[0] * heads * queries * keys * width
    inside = [flops_of(inner) for inner in inner_jaxprs(equation)]
    return max(inside, default=0.0) if name == "cond" else sum(inside) * length_of(equation)
