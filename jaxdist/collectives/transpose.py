"""The derivative of a collective, given as another collective.

All collectives but max and min are linear maps of the values on all devices, so that each has a collective as its
transpose. all_reduce is its own transpose, that of reduce_scatter is all_gather, that of broadcast is reduce, and so
on. Autodiff of the permutations inside would run the rounds backwards; here the transpose is run by an algorithm.
"""

import functools

import jax

from jaxdist.collectives.varying import to_varying, varying_axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear(forward, transpose, x):  # type: ignore[no-untyped-def]
    """forward(x), a linear map of x. Its derivative is `transpose`, whatever forward consists of."""
    return forward(x)


def _linear_forward(forward, transpose, x):  # type: ignore[no-untyped-def]
    return linear(forward, transpose, x), None  # not forward(x): a rounding inside it has no derivative


def _linear_backward(forward, transpose, _, grad):  # type: ignore[no-untyped-def]
    return (linear(transpose, forward, grad),)  # a linear map, too: derivatives of any order


linear.defvjp(_linear_forward, _linear_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def extremum(run, total, x):  # type: ignore[no-untyped-def]
    """run(x), the maximum or minimum over devices; its gradient is shared by the devices that attain it.

    total: (x) -> the sum of x over the devices.
    """
    return run(x)


def _extremum_forward(run, total, x):  # type: ignore[no-untyped-def]
    result = extremum(run, total, x)  # by the same rule when it is differentiated again: pmax has none of its own
    return result, (x, result)


def _extremum_backward(run, total, residuals, grad):  # type: ignore[no-untyped-def]
    x, result = residuals
    attained = (x == result).astype(grad.dtype)
    return (attained * to_varying(total(grad) / total(attained), varying_axes(x)),)


extremum.defvjp(_extremum_forward, _extremum_backward)
