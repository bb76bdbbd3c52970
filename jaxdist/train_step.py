"""A train step as an object that is called: compiled once, for the layout of its state."""

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
    """`state, metrics = step(state, batch)`. The state is donated: its buffers become the new state's.

    The layout is the state's own (see `init_state`); the first call, or `lower`, compiles for it. metrics: "loss" (mean
    over the weights of the global batch), "weight", "grad_norm" (before clipping), what the guard tells ("skipped",
    "skipped_in_a_row", "loss_scale": see `jaxdist.precision.loss_scale`), and "grads" if asked for.
    """

    def __init__(self, build: Callable[[TrainState], Any], check: Callable[[], None], *, on_cpu: bool) -> None:
        """check: raises `UserError` where the step may be compiled, but not run."""
        self._build, self._check, self._on_cpu = build, check, on_cpu
        self._jitted: Any = None
        self._layout: Any = None
        self._checked = False
        self._under_way: deque[jax.Array] = deque()  # losses of the last steps, on CPU devices

    def jitted(self, state: TrainState) -> Any:
        """The `jax.jit` function, made for the layout of the first state that is given: of arrays, or ShapeDtypeStructs
        with shardings. It raises `ValueError` for arrays that are committed to another; others it moves."""
        if self._jitted is None:
            self._jitted, self._layout = self._build(state), _layout_of(state)
        return self._jitted

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        if not self._checked:
            self._check()
            self._checked = True
        check_global(batch)
        if len(self._under_way) == 2:
            # With many steps under way XLA:CPU may leave a device without a thread, while others wait for it.
            self._under_way.popleft().block_until_ready()
        run = self.jitted(state)
        try:
            state, metrics = run(state, batch)
        except ValueError as error:  # nothing has run; looking at every leaf before each step costs 0.1 to 0.2 ms
            self._refuse_other(state, error)
            raise
        if self._on_cpu:
            self._under_way.append(metrics["loss"])
        return state, metrics

    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """`jax.stages.Lowered` for arrays or ShapeDtypeStructs, to compile ahead of time."""
        try:
            return self.jitted(state).lower(state, batch)
        except ValueError as error:
            self._refuse_other(state, error)
            raise

    def _refuse_other(self, state: TrainState, error: ValueError) -> None:
        """Raise `UserError` if it is the layout that is wrong."""
        if not isinstance(error, UserError) and _layout_of(state) != self._layout:
            raise UserError(
                "state: laid out differently from the one this step was compiled for; make another step"
            ) from error


def _layout_of(state: TrainState) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(state)
    return structure, [getattr(leaf, "sharding", None) for leaf in leaves]
