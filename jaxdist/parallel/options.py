"""The options of a train step: one object, resolved once, which strategies, programs and the step read."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxdist.config.rules.fields import check_argument
from jaxdist.config.rules.overlap import check_batch_split
from jaxdist.config.rules.remat import Remat, check_prefetch, check_remat
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.mesh import AnyMesh
from jaxdist.parallel.grad_sync import check_sync, finish, order_of_work, reduce_late
from jaxdist.precision.policy import Precision, make_precision
from jaxdist.specs import PyTree, shard_of


@dataclass(frozen=True)
class StepOptions:
    """How a step is laid out and run. `make_train_step` and `init_state` take one, or its fields as keywords.

    >>> options = jaxdist.StepOptions(strategy="zero3", microbatches=4, precision="bf16")
    >>> mesh, tx, loss = jaxdist.make_mesh(data=2, fsdp=4), optax.sgd(0.1), lambda params, batch, keys: (0.0, 1)
    >>> state = jaxdist.init_state({"w": jnp.ones((8, 4))}, tx, mesh, options)
    >>> step = jaxdist.make_train_step(loss, tx, mesh, options)

    precision: a `Precision`, or the name of a policy.
    grad_sync: how gradients are summed over devices.
    min_shard_bytes: smaller parameters, counted for one block, stay whole; in configurations 32768, if not given.
    reshard_after_forward: whether zero3 gathers again for the backward pass; else it keeps the gathered parameters.
    prefetch: 1 communicates for one block while another computes (`blocks.prefetch`); 0 does not.
    batch_split: 2 sends for one half of a device's samples while the other multiplies (`blocks.batch_split`).
    pipeline_cond: whether a stage skips others' work by conditions; else it computes it, with no collective in one.
    strategy, schedule: a file in `parallel/strategies` or `parallel/schedules`, a dotted path, or the function itself.
    microbatches: parts of a batch, computed one after the other.
    remat: what is recomputed in the backward pass: a mode, or the names of values that are kept.
    freeze: patterns ("embed.*") of parameters that are not trained. offload: the optimizer state is in host memory.
    seed: of initialisation and of dropout. return_grads: whether the metrics hold the gradients.
    max_skips: after more than so many steps in a row that are not finite, nothing changes any more. Default: never.

    Raises `UserError` for options that exclude each other.
    """

    precision: Precision = "fp32"  # type: ignore[assignment]  # a name is resolved below
    grad_sync: GradSync = field(default_factory=GradSync)
    min_shard_bytes: int = 0
    reshard_after_forward: bool = True
    prefetch: int = 0
    batch_split: int = 1
    pipeline_cond: bool = True
    strategy: str | Callable[..., Any] = "ddp"
    schedule: str | Callable[..., Any] = "accumulate"
    microbatches: int = 1
    remat: Remat = "none"
    freeze: tuple[str, ...] = ()
    offload: bool = False
    seed: int = 0
    max_skips: int = 2**31 - 1  # more than the guard counts
    return_grads: bool = False

    def __new__(cls, *_: Any, **given: Any) -> "StepOptions":
        for name, value in given.items():
            check_argument(name, value, name in cls.__dataclass_fields__, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        resolved = {"remat": check_remat(self.remat)}
        if isinstance(self.precision, str):
            resolved["precision"] = make_precision(self.precision)
        if hasattr(self.freeze, "__iter__") and not isinstance(self.freeze, str):  # `fitting` refuses a text
            resolved["freeze"] = tuple(self.freeze)
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        for name, kind in (("precision", Precision), ("grad_sync", GradSync), ("freeze", str | tuple)):
            check_argument(name, value := getattr(self, name), isinstance(value, kind))
        for name, least in (("microbatches", 1), ("max_skips", 0), ("min_shard_bytes", 0), ("seed", 0)):
            if not hasattr(value := getattr(self, name), "__index__") or value < least:
                raise UserError(f"{name}: {value!r}; allowed: an integer >= {least}")
        check_sync(self.grad_sync, self.precision.reduce)
        _ = self.precision.scale_rule  # raises for a scale that is none
        deterministic = self.grad_sync.deterministic
        check_prefetch(self.prefetch, reshard_after_forward=self.reshard_after_forward, deterministic=deterministic)
        check_batch_split(self.batch_split, prefetch=self.prefetch, deterministic=deterministic)

    def on(self, mesh: AnyMesh) -> "StepOptions":
        """The options with the schedule and microbatches that a step runs on this mesh (`order_of_work`)."""
        schedule, microbatches = order_of_work(self.grad_sync, mesh, self.schedule, self.microbatches)
        return replace(self, schedule=schedule, microbatches=microbatches)

    @property
    def finish(self) -> Any:
        """A `Strategy.reduce`: the sums that are left at the end of a step, see `grad_sync.finish`."""
        return functools.partial(finish, sync=self.grad_sync, reduce_dtype=self.precision.reduce)

    def finish_whole(self, grads: PyTree, residual: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
        """`finish` for strategies with whole gradients of sharded parameters, which it reduce-scatters first."""
        shards = reduce_late(grads, specs, shard_of, sync=self.grad_sync, reduce_dtype=self.precision.reduce)
        return self.finish(shards, residual, specs)


StrategyOptions = StepOptions  # the name that it has as the argument of a strategy


def make_options(options: StepOptions | None, keywords: Mapping[str, Any]) -> StepOptions:
    """The options, with `keywords` in place of fields. Raises `UserError` for a keyword that is no field."""
    check_argument("options", options, isinstance(options, StepOptions | None))
    return replace(options or StepOptions(), **keywords)
