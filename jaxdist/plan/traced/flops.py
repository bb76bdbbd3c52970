"""Floating-point operations, counted in a jaxpr, before any compiler has seen it: those of a program, and those that a
step of a model needs at least."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import psum, to_varying
from jaxdist.jaxpr.walk import equations, inner_jaxprs, length_of
from jaxdist.mesh import BATCH_LIKE, abstract_mesh
from jaxdist.model import ModelDef
from jaxdist.nn.dropout import unused_keys
from jaxdist.parallel.wrappers.keep_fp32 import as_received
from jaxdist.precision.policy import Precision
from jaxdist.specs import STACKED, PyTree

# An operand in float8 is read twice in 16 bits, for its largest value and to be rounded, written, and read.
_FLOAT8_BYTES = 2 + 2 + 1 + 1
_BACKWARD = 2  # a backward pass multiplies twice as much as its forward pass


def flops_of(jaxpr: Any) -> float:
    """FLOPs of the matrix products and convolutions of a jaxpr, two for each multiplication and addition.

    Loops are multiplied out: a scan by its length; a `while`, whose rounds nobody knows, counts once. Of a condition
    the most expensive branch counts. Inside `jax.shard_map` shapes are those of one device, and so is the count.
    Elementwise work, a few percent of a transformer's, is left out.
    """
    return _total(jaxpr, _flops_of_product)


def flops_in_float8(jaxpr: Any) -> float:
    """Those of `flops_of` in products of float8 arrays. In fp8 scores, embedding, head and experts are not."""

    def own(equation: Any) -> float | None:
        flops = _flops_of_product(equation)
        return flops if flops is None or equation.invars[0].aval.dtype.name.startswith("float8") else 0.0

    return _total(jaxpr, own)


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
        return float(sum(math.prod(each.shape) * _bytes_moved(each.dtype) for each in arrays))

    return _total(jaxpr, moved)


def _bytes_moved(dtype: Any) -> int:
    """For each element of an operand or result."""
    return _FLOAT8_BYTES if dtype.name.startswith("float8") else int(dtype.itemsize)


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


def model_flops(
    model: Any, params: PyTree, model_state: PyTree, batch: PyTree, *, precision: Precision | None = None
) -> float:
    """FLOPs that a step on this batch needs at least: three times those of the matrix products of a forward pass over
    the whole batch. What is computed again for memory, and what devices compute twice, does not count.

    params, model_state, batch: arrays or ShapeDtypeStructs, of which only shapes and types are read.
    precision: of the step, by which the model receives its parameters. None: as they are stored.
    """
    shapes = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)  # noqa: E731
    params, batch = shapes(params), shapes(batch)
    if precision is not None:  # cuDNN's attention cannot be traced with parameters in fp32
        params = jax.eval_shape(lambda params: as_received(params, precision), params)
    rows = jax.tree.leaves(batch)[0].shape[0]
    keys = jax.eval_shape(lambda: unused_keys(rows))
    if isinstance(model, ModelDef):
        forward: Callable[..., Any] = _forward(model)
        given = (params, {**batch, "keys": keys})
    else:
        forward = getattr(model, "evaluation", None) or model
        carried = [shapes(model_state)] if jax.tree.leaves(model_state) else []
        given = (params, batch, keys, *carried)
    return (1 + _BACKWARD) * flops_of(jax.make_jaxpr(forward)(*given))


def _forward(model: ModelDef) -> Callable[..., Any]:
    """(params, batch) -> the loss of the model as one device computes it, if it had room."""

    def region(params: PyTree, batch: PyTree) -> Any:
        params, batch = to_varying((params, batch), BATCH_LIKE)
        block = jax.tree.map(lambda leaf: leaf[0], params[STACKED])
        h = model.embed(params["embed"], batch, batch["keys"])

        def through(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return to_varying(model.block(block, h, *model.read_by_blocks(batch)), BATCH_LIKE), None

        h, _ = lax.scan(through, to_varying(h, BATCH_LIKE), length=model.layers)
        loss = model.head(params["head"], params["embed"] if model.tied else None, h, batch)
        return psum(to_varying(loss, BATCH_LIKE), BATCH_LIKE)

    return jax.shard_map(region, mesh=abstract_mesh(), in_specs=P(), out_specs=P())
