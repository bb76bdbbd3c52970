"""The compiled train step: a callable object, compiled once for the layout of its state."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from jaxdist.config.rules.fields import check_argument
from jaxdist.errors import UserError
from jaxdist.mesh import AnyMesh, on_cpu, sizes_text
from jaxdist.parallel.microbatch import check_global
from jaxdist.parallel.options import StepOptions
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import PyTree
from jaxdist.state import TrainState

Metrics = dict[str, Any]


class TrainStep:
    """The train step: `state, metrics = step(state, batch)`.

    The state is donated: its buffers become those of the new state. Its layout (see `init_state`) is the step's: the
    first call, or `lower`, compiles for it. Metrics are:

    loss: the mean over the weights of the global batch.
    weight: the sum of these weights.
    grad_norm: the norm of the gradients before clipping.
    skipped, skipped_in_a_row, loss_scale: those of the guard, see `jaxdist.precision.loss_scale`.
    grads: the gradients, if asked for.

    Those of a user's loss stand beside them, under its names, and those of a model's `figures`, some of them arrays.
    >>> loss = lambda params, batch, keys: (((batch @ params["w"]) ** 2).sum(), batch.shape[0])
    >>> mesh, tx = jaxdist.make_mesh(fsdp=8), optax.sgd(0.1)
    >>> state = jaxdist.init_state({"w": jnp.ones((8, 1))}, tx, mesh, strategy="zero3")
    >>> step = jaxdist.make_train_step(loss, tx, mesh, strategy="zero3")
    >>> state, metrics = step(state, np.ones((8, 8), np.float32))
    >>> float(metrics["loss"])
    64.0
    """

    def __init__(self, build: Callable[[TrainState], Any], mesh: AnyMesh, options: StepOptions) -> None:
        """A step that is not compiled yet. build: state -> the `jax.jit` function for its layout."""
        self._build, self._mesh, self._options, self._on_cpu = build, mesh, options, on_cpu(mesh)
        self._jitted: Any = None
        self._layout: Any = None
        self._checked = False
        self._under_way: deque[jax.Array] = deque()  # losses of the last steps, on CPU devices

    def __repr__(self) -> str:
        options = self._options
        named = [name for name, policy in POLICIES.items() if policy == options.precision]
        parts = (
            f"strategy={options.strategy!r}",
            f"mesh: {sizes_text(self._mesh.shape)}",
            f"schedule={options.schedule!r}",
            f"microbatches={options.microbatches}",
            f"precision={named[0]!r}" if named else str(options.precision),
            *(["not compiled yet"] if self._jitted is None else []),
        )
        return f"TrainStep({', '.join(parts)})"

    def jitted(self, state: TrainState) -> Any:
        """The `jax.jit` function, built for the layout of the first state that this method gets.

        state: arrays, or ShapeDtypeStructs with shardings.

        The function raises `ValueError` for arrays that are committed to another layout. It moves uncommitted arrays.
        """
        check_argument("state", state, isinstance(state, TrainState))
        if self._jitted is None:
            from jaxdist.jaxpr.layouts import refuse_context

            refuse_context(self._mesh)
            self._jitted, self._layout = self._build(state), _layout_of(state)
        return self._jitted

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        jitted = self.jitted(state)
        if self._options.precision.fp8 and not self._checked:
            from jaxdist.precision.float8_devices import check_float8

            check_float8(self._options.precision, self._mesh.devices.flat)
            self._checked = True
        traced, disabled = isinstance(state.step, jax.core.Tracer), jax.config.jax_disable_jit
        if traced or disabled or getattr(state.step, "is_deleted", bool)():
            from jaxdist.config.wrong_calls import refuse_use

            refuse_use(traced=traced, disabled=disabled)  # used up, jax 0.10 would crash
        check_global(batch)
        if len(self._under_way) == 2:
            # With more steps under way, XLA:CPU may leave a device without a thread while other devices wait for it.
            self._under_way.popleft().block_until_ready()
        state, metrics = self._call(jitted, state, batch)
        metrics |= metrics.pop("own")
        if self._on_cpu:
            self._under_way.append(metrics["loss"])
        return state, metrics

    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """The `jax.stages.Lowered` of the step, to compile ahead of time. Takes arrays or ShapeDtypeStructs."""
        return self._call(self.jitted(state).lower, state, batch)

    def trace(self, state: TrainState, batch: PyTree) -> Any:
        """The `jax.stages.Traced` of the step. Takes arrays or ShapeDtypeStructs."""
        return self._call(self.jitted(state).trace, state, batch)

    def _call(self, function: Callable[..., Any], state: TrainState, batch: PyTree) -> Any:
        """function(state, batch). Raises `UserError` if it fails for a reason that `refuse_call` finds."""
        try:
            return function(state, batch)
        except (KeyError, TypeError, ValueError) as error:  # nothing has run; a check before each step takes 0.1 ms
            if not isinstance(error, UserError):
                from jaxdist.jaxpr.layouts import refuse_call

                trace = lambda: self.jitted(state).trace(state, batch).jaxpr  # noqa: E731
                refuse_call(error, batch, self._mesh, trace, other=_layout_of(state) != self._layout)
            raise


def _layout_of(state: TrainState) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(state)
    return structure, [getattr(leaf, "sharding", None) for leaf in leaves]


def jit_step(step: Callable[..., Any], state: TrainState, results: Any, mesh: AnyMesh, options: StepOptions) -> Any:
    """`jax.jit` of (state, batch) -> (state, metrics), which donates the state. results: the shardings of both."""
    flags = None
    if not on_cpu(mesh):
        from jaxdist.parallel.blocks.compiler_options import compiler_options

        flags = compiler_options(state.params, options, mesh)
    shardings = {"in_shardings": (results[0], None), "out_shardings": results}
    return jax.jit(step, donate_argnums=0, **shardings, compiler_options=flags)
