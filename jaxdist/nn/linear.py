"""Linear layers split over `tensor`, as in Megatron-LM (Shoeybi et al. 2019, section 3).

A column-parallel layer, an elementwise function and a row-parallel layer together need one all-reduce forward and one
backward. The backward all-reduce of a column-parallel layer is not written here. Its input is typed invariant over
`tensor` and its weights varying; autodiff transposes the cast between the two to the psum (Megatron's operator f).

Legend: B batch, S sequence, D model width; a trailing _t marks a dim of which this device has 1/tensor.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jaxdist.collectives import psum, to_varying, varying_axes
from jaxdist.nn.matmul.collective import gather_product, product_scatter
from jaxdist.nn.matmul.float8 import product
from jaxdist.nn.matmul.fp32_accumulation import einsum_fp32
from jaxdist.nn.param import normal, zeros
from jaxdist.nn.sequence_parallel import sum_to_positions, whole_sequence
from jaxdist.precision.policy import accumulation_dtype


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias, added in at least fp32 and returned in y's dtype."""
    # The gradient of a bias is a sum over all positions (and over `tensor`, if y is split over it): in fp32, too.
    wide = accumulation_dtype(y.dtype)
    total = (y.astype(wide) + to_varying(bias.astype(wide), varying_axes(y))).astype(y.dtype)
    # The gradient of a learned position is a sum over samples alone. For 32 of them or more XLA:GPU would put samples
    # last in memory, to read them in a row, and so through all blocks, whose every product it would then transpose.
    alone = bias.ndim == y.ndim - 1 >= 2
    return with_layout_constraint(total, Layout(tuple(range(total.ndim)))) if alone else total


class MatmulOptions(TypedDict, total=False):
    """Options of linear layers, which the layers around them pass on. All are False by default.

    fp8: products are computed in float8 (`jaxdist.nn.matmul.float8`).
    sequence: a column-parallel layer reads, and a row-parallel layer returns, this device's positions only
        (`jaxdist.nn.sequence_parallel`).
    collective_matmul: the collectives of sequence run piece by piece, while pieces are multiplied
        (`jaxdist.nn.matmul.collective`). Needs sequence, and no fp8.
    """

    fp8: bool
    sequence: bool
    collective_matmul: bool


class Linear(nnx.Module):
    """Linear layer x [..., in] -> [..., out] with a copy on every device of `tensor`. x may be the device's positions.

    std: of the initial weights. fp32: whether the result is in at least fp32, and not in the dtype of x.
    """

    def __init__(self, rngs: nnx.Rngs, in_features: int, out_features: int, *, std: float, fp32: bool = False) -> None:
        self.kernel = normal(rngs, (in_features, out_features), std, (None, None))
        self.bias, self.fp32 = zeros((out_features,), (None,)), fp32

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        # As for a bias: the gradient is summed over `tensor` in fp32, where x is a part of the positions.
        wide = kernel.astype(accumulation_dtype(kernel.dtype))
        kernel = to_varying(wide, varying_axes(x)).astype(kernel.dtype)
        dims = "ABC"[: x.ndim - 1]
        y = einsum_fp32(f"{dims}i,io->{dims}o", x, kernel) if self.fp32 else jnp.tensordot(x, kernel, 1)
        return add_bias(y, self.bias[...])


class ColumnParallelLinear(nnx.Module):
    """Column-parallel layer: x [B, S, in] -> [B, S, *features], of which dim `split` is split over `tensor`.

    The initial std of the weights is 1/sqrt(in). fp8, sequence, collective_matmul: see `MatmulOptions`.

    parts: (name, size) of each projection along the last dim but one of the result, if there are several.
    """

    lora: Any = None  # its adapter (`jaxdist.nn.lora`)

    def __init__(
        self,
        rngs: nnx.Rngs,
        in_features: int,
        features: Sequence[int],
        *,
        split: int = 0,
        bias: bool,
        parts: Sequence[tuple[str, int]] = (),
        fp8: bool = False,
        sequence: bool = False,
        collective_matmul: bool = False,
    ) -> None:
        spec = tuple("tensor" if dim == split else None for dim in range(len(features)))
        self.kernel = normal(rngs, (in_features, *features), in_features**-0.5, (None, *spec))
        self.bias = zeros(features, spec) if bias else None
        self.fp8, self.sequence, self.collective_matmul, self.parts = fp8, sequence, collective_matmul, tuple(parts)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.without_bias(x)
        return y if self.bias is None else add_bias(y, self.bias[...])

    def without_bias(self, x: jax.Array) -> jax.Array:
        """The result before its bias is added, for a caller who adds it in a function of his own."""
        if self.collective_matmul:
            return gather_product(x, self.kernel[...])
        x = whole_sequence(x) if self.sequence else x
        if self.lora is not None:  # cast once for both products, so that one psum adds both gradients of x
            x = to_varying(x, varying_axes(self.kernel[...]))
        y = product(x, self.kernel[...], fp8=self.fp8)
        return y if self.lora is None else y + self.lora(x)


class RowParallelLinear(nnx.Module):
    """Row-parallel layer: x [B, S, in_t] -> [B, S, out]. Each device multiplies its rows, and a psum adds the parts.

    scale: a factor of the initial std 1/sqrt(in). Residual branches use 1/sqrt(2 layers) (GPT-2, Radford et al. 2019,
        2.3).
    fp8, sequence, collective_matmul: see `MatmulOptions`. With sequence, a reduce-scatter replaces the psum.
    """

    lora: Any = None  # its adapter (`jaxdist.nn.lora`)
    parts: Sequence[tuple[str, int]] = ()  # it is one projection

    def __init__(
        self,
        rngs: nnx.Rngs,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        scale: float = 1.0,
        fp8: bool = False,
        sequence: bool = False,
        collective_matmul: bool = False,
    ) -> None:
        self.kernel = normal(rngs, (in_features, out_features), scale * in_features**-0.5, ("tensor", None))
        self.bias = zeros((out_features,), (None,)) if bias else None
        self.fp8, self.sequence, self.collective_matmul = fp8, sequence, collective_matmul

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.collective_matmul:
            y = product_scatter(x, self.kernel[...])
        else:
            part = product(x, self.kernel[...], fp8=self.fp8)
            part = part if self.lora is None else part + self.lora(x)
            y = sum_to_positions(part) if self.sequence else psum(part, "tensor")
        return y if self.bias is None else add_bias(y, self.bias[...])  # after the psum, so that it is added once
