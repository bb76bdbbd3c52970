"""Differentiating a collective as the mathematical operation that it is.

All collectives but max and min are linear maps of the values on all devices together, so that each has a transpose that
is a collective too: all_reduce is its own, reduce_scatter's is all_gather, broadcast's is reduce, and so on. Autodiff
of the permutations inside would find the same map, with the rounds backwards; this way the transpose is an algorithm.
"""

import functools

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear(forward, transpose, x):  # type: ignore[no-untyped-def]
    """forward(x), differentiated as the linear map that it is: by `transpose`, not by what forward is made of."""
    return forward(x)


def _linear_forward(forward, transpose, x):  # type: ignore[no-untyped-def]
    return linear(forward, transpose, x), None  # not forward(x): rounding inside has no derivative of its own


def _linear_backward(forward, transpose, _, grad):  # type: ignore[no-untyped-def]
    return (linear(transpose, forward, grad),)  # a linear map again: derivatives of any order


linear.defvjp(_linear_forward, _linear_backward)
