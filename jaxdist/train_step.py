"""The compiled train step: a callable object, compiled once for the layout of its state."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from jaxdist.errors import UserError
from jaxdist.parallel.microbatch import check_global
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

    Those of a user's loss stand beside them, under its names.
    """

    def __init__(self, build: Callable[[TrainState], Any], check: Callable[[], None], *, on_cpu: bool) -> None:
        """A step that is not compiled yet.

        build: state -> the `jax.jit` function for its layout.
        check: raises `UserError` if the step may be compiled, but not run here.
        on_cpu: whether the devices are CPU devices.
        """
        self._build, self._check, self._on_cpu = build, check, on_cpu
        self._jitted: Any = None
        self._layout: Any = None
        self._checked = False
        self._under_way: deque[jax.Array] = deque()  # losses of the last steps, on CPU devices

    def jitted(self, state: TrainState) -> Any:
        """The `jax.jit` function, built for the layout of the first state that this method gets.

        state: arrays, or ShapeDtypeStructs with shardings.

        The function raises `ValueError` for arrays that are committed to another layout. It moves uncommitted arrays.
        """
        if self._jitted is None:
            self._jitted, self._layout = self._build(state), _layout_of(state)
        return self._jitted

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        if not self._checked:
            self._check()
            self._checked = True
        check_global(batch)
        if len(self._under_way) == 2:
            # With more steps under way, XLA:CPU may leave a device without a thread while other devices wait for it.
            self._under_way.popleft().block_until_ready()
        state, metrics = self._call(self.jitted(state), state, batch)
        metrics |= metrics.pop("own")
        if self._on_cpu:
            self._under_way.append(metrics["loss"])
        return state, metrics

    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """The `jax.stages.Lowered` of the step, to compile ahead of time. Takes arrays or ShapeDtypeStructs."""
        return self._call(self.jitted(state).lower, state, batch)

    def _call(self, function: Callable[..., Any], state: TrainState, batch: PyTree) -> Any:
        """function(state, batch). Raises `UserError` if it fails because the state has another layout."""
        try:
            return function(state, batch)
        except ValueError as error:  # nothing has run; a check of every leaf before each step takes 0.1 to 0.2 ms
            if not isinstance(error, UserError) and _layout_of(state) != self._layout:
                raise UserError(
                    "state: laid out differently from the one this step was compiled for; make another step"
                ) from error
            raise


def _layout_of(state: TrainState) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(state)
    return structure, [getattr(leaf, "sharding", None) for leaf in leaves]
