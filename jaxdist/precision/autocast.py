"""Autocast: mixed precision operation by operation for any JAX function, as Apex's O1 and PyTorch's `torch.amp`.

The function is traced to a jaxpr, in the dtypes that it was written for, and evaluated equation by equation. Its
primitive decides what an equation's operands are cast to; docs/precision.md has the lists beside those of
torch/aten/src/ATen/autocast_mode.h and apex/amp/lists:

- matrix products and convolutions (`HALF`): to the half type, which the result has too;
- reductions, and functions that leave the half type's range or lose digits in it (`FP32`): to fp32;
- elementwise functions and moves of values (`WIDEST`): to the widest type among the operands. Constants written in
  the code take the type of the others, unless the half type cannot hold them;
- everything else (custom_vjp, whose rule stays; sums over mesh axes; kernels): to the types that it was traced with.

Loops, conditions and `jax.checkpoint` are entered; what a loop carries keeps its type. float64 is never cast.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.errors import UserError
from jaxdist.jaxpr.evaluate import apply, evaluate, where_written
from jaxdist.jaxpr.walk import every_equation, inner_jaxprs, is_jaxpr, opened, primitives

HALF = primitives("dot_general ragged_dot_general conv_general_dilated")
FP32 = primitives(
    """
    acos acosh asin asinh atanh cosh sinh tan exp exp2 expm1 log log1p pow integer_pow square rsqrt erf erfc erf_inv
    lgamma digamma reduce_sum reduce_prod reduce_max reduce_min reduce_window_sum cumsum cumprod cumlogsumexp
    logsumexp
    """
)
WIDEST = primitives(
    """
    add add_any sub mul div rem neg abs sign max min clamp sqrt cbrt sin cos atan atan2 tanh logistic floor ceil
    round is_finite eq ne lt le gt ge argmax argmin cummax cummin reduce_window_max broadcast_in_dim reshape
    transpose squeeze expand_dims rev pad copy copy_p slice dynamic_slice dynamic_update_slice gather concatenate
    select_n split stop_gradient optimization_barrier name convert_element_type reduce_precision pvary pcast
    layout_constraint all_gather all_gather_invariant all_to_all ppermute
    """
)
IN_PLACE = ("jit", "closed_call")
LOOPS = ("scan", "while", "cond")
REMAT_CALLS = ("checkpoint", "remat2")


# Whether a function is traced to be cast. Products with a rule of their own would stay in the dtypes of the trace:
# `nn.matmul.plain` is an ordinary product then.
casting = jax.make_user_context(False)


def autocast(function: Callable[..., Any], half: Any = "float16") -> Callable[..., Any]:
    """The function, with each operation in `half` ("float16" or "bfloat16") or fp32 by its kind, see above.

    It takes pytrees of arrays and returns the results of `function`, in the same dtypes. It can be differentiated, can
    be called under `jax.jit`, `jax.checkpoint` and `jax.shard_map`, and can call any of them. Gradients have the dtypes
    of the parameters. Raises `UserError` for another half type.
    """
    if half not in ("float16", "bfloat16") and half not in (jnp.float16, jnp.bfloat16):
        raise UserError(f"autocast: half={half!r} is not known; allowed: float16, bfloat16")
    dtype = np.dtype(jnp.dtype(half))

    @functools.wraps(function)
    def cast(*arguments: Any, **keywords: Any) -> Any:
        with casting(True):
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments, **keywords)
        results = _Autocast(dtype).as_traced(traced, jax.tree.leaves((arguments, keywords)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return cast


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(_dtype(x), jnp.floating))


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _to(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(x, dtype) if _dtype(x) != dtype else x


def _typed(atoms: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The values in the dtypes of the jaxpr's variables. Only floats can differ from these."""
    return [_to(x, atom.aval.dtype) if _is_float(x) else x for atom, x in zip(atoms, values, strict=True)]


class _Autocast:
    """One evaluation of a function under autocast."""

    def __init__(self, half: Any) -> None:
        self._half = half
        self._constants = dict[int, Any]()  # {id: value}, of values computed from constants in the code alone
        self._ways = {
            **dict.fromkeys(HALF, self._in_half),
            **dict.fromkeys(FP32, self._in_fp32),
            **dict.fromkeys(WIDEST, self._in_widest),
            **dict.fromkeys(REMAT_CALLS, self._checkpoint),
            **dict.fromkeys(LOOPS, self._inside),
            "custom_jvp_call": self._custom_jvp,
        }

    def run(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, closed or not, in the dtypes that come out."""
        return evaluate(jaxpr, getattr(jaxpr, "consts", ()), values, self._bind, calls=IN_PLACE)

    def as_traced(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """The same, in the dtypes that it was traced with."""
        return _typed(opened(jaxpr).outvars, self.run(jaxpr, values))

    def _bind(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        with where_written(equation):
            way = self._ways.get(equation.primitive.name, self._in_traced)
            settled = equation.params.get("out_dtype") is not None
            if settled or any(_dtype(x) == jnp.float64 or jnp.iscomplexobj(x) for x in operands):
                way = self._in_traced
            return way(equation, operands)

    def _in_traced(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        return apply(equation, _typed(equation.invars, operands))

    def _in_half(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        if not all(_is_float(x) for x in (*operands, equation.outvars[0].aval)):
            return self._in_traced(equation, operands)
        changed = equation.replace(params=equation.params | {"preferred_element_type": self._half})
        return apply(changed, [_to(x, self._half) for x in operands])

    def _in_fp32(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        return apply(equation, [_to(x, np.dtype(np.float32)) if _is_float(x) else x for x in operands])

    def _in_widest(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        name, floats = equation.primitive.name, [x for x in operands if _is_float(x)]
        if name == "mul" and equation.invars[0] is equation.invars[1]:  # a square, written as most people write it
            return self._in_fp32(equation, operands)
        if all(self._weak(x) for x in floats or operands):  # then the result is weak, too
            results = self._in_traced(equation, operands)
            self._constants |= {id(result): result for result in results}
            return results
        if name == "convert_element_type" or not floats:  # to the type that is written there
            return apply(equation, operands)
        widest = self._widest(floats)
        return apply(equation, [_to(x, widest) if _is_float(x) else x for x in operands])

    def _widest(self, floats: Sequence[Any]) -> Any:
        dtypes = {_dtype(x) for x in floats if not self._weak(x)}
        # Of two half types neither holds all values of the other: float16 and bfloat16 meet in fp32, too.
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def _weak(self, x: Any) -> bool:
        """Whether x has no type of its own: a constant that the half type can hold, or computed from such."""
        if isinstance(x, jax.Array) or np.ndim(x):
            return id(x) in self._constants
        size, limits = abs(float(x)), jnp.finfo(self._half)
        return size == 0 or not np.isfinite(size) or float(limits.tiny) <= size <= float(limits.max)

    def _custom_jvp(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        """As traced, which keeps its rule. An elementwise function (relu) gives a result as wide as its operands."""
        results = self._in_traced(equation, operands)
        floats = [x for x in operands if _is_float(x) and not self._weak(x)]
        if not floats or not _names(equation) <= WIDEST | {*IN_PLACE, "custom_jvp_call"}:
            return results
        widest = self._widest(floats)
        return [_to(x, widest) if _is_float(x) else x for x in results]

    def _checkpoint(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        if equation.params["differentiated"]:  # the gradient of one, inside the function: its dtypes are settled
            return self._in_traced(equation, operands)
        policy, prevent_cse = equation.params["policy"], equation.params["prevent_cse"]
        run = lambda *values: self.run(equation.params["jaxpr"], values)  # noqa: E731
        return list(jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(*operands))

    def _inside(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        """A loop or a condition: operations in it are cast; its operands and results have the traced dtypes."""
        return apply(with_inner(equation, self._rewritten), _typed(equation.invars, operands))

    def _rewritten(self, jaxpr: Any) -> Any:
        """A jaxpr with its operations cast."""
        return jax.make_jaxpr(lambda *values: self.as_traced(jaxpr, values))(*jaxpr.in_avals)


def with_inner(equation: Any, change: Callable[[Any], Any]) -> Any:
    """The equation with others in place of the jaxprs that it holds, which are parameters or tuples of them."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple) and all(map(is_jaxpr, value)):
            return tuple(map(change, value))
        return change(value) if is_jaxpr(value) else value

    return equation.replace(params={name: changed(value) for name, value in equation.params.items()})


def _names(equation: Any) -> set[str]:
    """Names of the primitives inside an equation."""
    return {site.equation.primitive.name for inner in inner_jaxprs(equation) for site in every_equation(inner)}
