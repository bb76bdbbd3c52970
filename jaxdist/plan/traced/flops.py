"""Floating-point operations of a program, counted in its jaxpr: what rematerialisation costs, before any compiler has
seen it."""

import math
from collections.abc import Callable
from typing import Any

from jaxdist.jaxpr.walk import equations, inner_jaxprs, length_of


def flops_of(jaxpr: Any) -> float:
    """FLOPs of the matrix products and convolutions of a jaxpr, two for each multiplication and addition.

    Loops are multiplied out: a scan by its length; a `while`, whose rounds nobody knows, counts once. Of a condition
    the most expensive branch counts. Inside `jax.shard_map` shapes are those of one device, and so is the count.
    Elementwise work, a few percent of a transformer's, is left out.
    """
    return _total(jaxpr, _flops_of_product)


def bytes_of_products(jaxpr: Any, *, fused_attention: bool) -> float:
    """Bytes that the matrix products and convolutions of a jaxpr read and write, counted as `flops_of` counts.

    fused_attention: leave out products with batch dims, such as those of scores: a fused kernel stores none of these.
    """

    def moved(equation: Any) -> float | None:
        if _flops_of_product(equation) is None:
            return None
        if fused_attention and equation.primitive.name == "dot_general" and equation.params["dimension_numbers"][1][0]:
            return 0.0
        arrays = [each.aval for each in (*equation.invars, *equation.outvars)]
        return float(sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays))

    return _total(jaxpr, moved)


def _total(jaxpr: Any, of_product: Callable[[Any], float | None]) -> float:
    """The sum of a figure of products; `of_product` gives None for other equations."""

    def one(equation: Any) -> float:
        own = of_product(equation)
        if own is not None:
            return own
        inside = [_total(inner, of_product) for inner in inner_jaxprs(equation)]
        return max(inside, default=0.0) if equation.primitive.name == "cond" else sum(inside) * length_of(equation)

    return sum(map(one, equations(jaxpr)), 0.0)


def _flops_of_product(equation: Any) -> float | None:
    """FLOPs of a matrix product, a convolution or cuDNN's attention; None for what is none of them."""
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
    return None
