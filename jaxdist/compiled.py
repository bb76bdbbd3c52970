"""A train step as an object that is called: compiled once, for the layout of its state."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from jaxdist.errors import UserError
from jaxdist.parallel.microbatch import check_global
from jaxdist.state import TrainState

PyTree = Any
Metrics = dict[str, Any]


class TrainStep:
    """`state, metrics = step(state, batch)`. The state is donated: its buffers become the new state's.

    The layout is the state's own (see `init_state`); the first call, or `lower`, compiles for it. metrics: "loss" (mean
    over the weights of the global batch), "weight", "grad_norm" (before clipping), what the guard tells ("skipped",
    "skipped_in_a_row", "loss_scale": see `jaxdist.guard`), and "grads" if asked for.
    """

    def __init__(self, build: Callable[[TrainState], Any], check: Callable[[], None], *, on_cpu: bool) -> None:
        """check: raises `UserError` where the step may be compiled, but not run."""
        self._build, self._check, self._on_cpu = build, check, on_cpu
        self._jitted: Any = None
        self._layout: Any = None
        self._checked = False
        self._under_way: deque[jax.Array] = deque()  # losses of the last steps, on CPU devices

    def jitted(self, state: TrainState) -> Any:
        """The `jax.jit` function for this layout; `state` may be made of ShapeDtypeStructs with shardings."""
        leaves, structure = jax.tree.flatten(state)
        layout = structure, [leaf.sharding for leaf in leaves]
        if self._jitted is None:
            self._jitted = self._build(state)
        elif layout != self._layout:
            raise UserError("state: laid out differently from the one this step was compiled for; make another step")
        self._layout = layout  # the objects seen last: those of the next state are most often the same, not only equal
        return self._jitted

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        if not self._checked:
            self._check()
            self._checked = True
        check_global(batch)
        if len(self._under_way) == 2:
            # With many steps under way XLA:CPU may leave a device without a thread, while others wait for it.
            self._under_way.popleft().block_until_ready()
        state, metrics = self.jitted(state)(state, batch)
        if self._on_cpu:
            self._under_way.append(metrics["loss"])
        return state, metrics

    def lower(self, state: TrainState, batch: PyTree) -> Any:
        """`jax.stages.Lowered` for arrays or ShapeDtypeStructs, to compile ahead of time."""
        return self.jitted(state).lower(state, batch)
