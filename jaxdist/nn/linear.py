"""Linear layers split over `tensor`, as in Megatron-LM (Shoeybi et al. 2019, section 3): a column-parallel layer, an
elementwise function, and a row-parallel layer need one all-reduce forward and one backward for the pair.

Legend: B batch, S sequence, D model width; a trailing _t marks a dim of which this device holds 1/tensor.
The backward all-reduce of a column-parallel layer is not written here: its input is typed invariant over `tensor` and
its weights varying, so the checked `shard_map` transposes that cast to the psum (Megatron's operator f).
"""

from collections.abc import Sequence
from typing import TypedDict

import jax
from flax import nnx

from jaxdist.collectives import psum, to_varying, varying_axes
from jaxdist.nn.matmul.collective import gather_product, product_scatter
from jaxdist.nn.matmul.float8 import product
from jaxdist.nn.param import normal, zeros
from jaxdist.nn.sequence_parallel import sum_to_positions, whole_sequence
from jaxdist.precision.policy import accumulation_dtype


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias, in at least fp32: the gradient of a bias is a sum over all positions, or samples (and over `tensor`, if
    that is what y is split over)."""
    wide = accumulation_dtype(y.dtype)
    return (y.astype(wide) + to_varying(bias.astype(wide), varying_axes(y))).astype(y.dtype)


class MatmulOptions(TypedDict, total=False):
    """Keyword arguments that layers hand on to their linear layers. All are False by default.

    fp8: products are taken in float8, see `jaxdist.nn.matmul.float8`.
    sequence: between the linear layers a device has its own positions, see `jaxdist.nn.sequence_parallel`.
    collective_matmul: with sequence and without fp8: what the products need is sent piece by piece while they run, see
        `jaxdist.nn.matmul.collective`.
    """

    fp8: bool
    sequence: bool
    collective_matmul: bool


class ColumnParallelLinear(nnx.Module):
    """x [B, S, in] -> [B, S, *features], one dim of `features` split over `tensor`. Weight std: 1/sqrt(in). fp8: the
    product is taken in float8, see `jaxdist.nn.matmul.float8`. sequence: x is this device's positions, see `sequence`.
    collective_matmul: with sequence, and not fp8: gathered piece by piece, see `collective_matmul`."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        in_features: int,
        features: Sequence[int],
        *,
        split: int = 0,
        bias: bool,
        fp8: bool = False,
        sequence: bool = False,
        collective_matmul: bool = False,
    ) -> None:
        spec = tuple("tensor" if dim == split else None for dim in range(len(features)))
        self.kernel = normal(rngs, (in_features, *features), in_features**-0.5, (None, *spec))
        self.bias = zeros(features, spec) if bias else None
        self.fp8, self.sequence, self.collective_matmul = fp8, sequence, collective_matmul

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.collective_matmul:
            y = gather_product(x, self.kernel[...])
        else:
            y = product(whole_sequence(x) if self.sequence else x, self.kernel[...], fp8=self.fp8)
        return y if self.bias is None else add_bias(y, self.bias[...])


class RowParallelLinear(nnx.Module):
    """x [B, S, in_t] -> [B, S, out]: each device multiplies its rows, a psum over `tensor` adds the parts.

    `scale` multiplies the initial std 1/sqrt(in): residual branches use 1/sqrt(2 layers) (GPT-2, Radford et al. 2019,
    2.3). fp8: the product is taken in float8, see `jaxdist.nn.matmul.float8`. sequence: the result is this device's
    positions, by a reduce-scatter, see `sequence`. collective_matmul: with sequence, and not fp8: summed piece by
    piece, see `collective_matmul`.
    """

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
            y = sum_to_positions(part) if self.sequence else psum(part, "tensor")
        return y if self.bias is None else add_bias(y, self.bias[...])  # after the psum: once, not once a device
