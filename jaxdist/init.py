"""Make a training state, laid out from its first byte."""

from collections.abc import Callable, Sequence

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.config.grad_sync import GradSync
from jaxdist.errors import UserError
from jaxdist.mesh import AnyMesh, has_host_memory
from jaxdist.nn import ModelDef
from jaxdist.optim import leave_out, only_trained
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.grad_sync import residual_target
from jaxdist.parallel.strategy import StrategyOptions
from jaxdist.precision.policy import POLICIES
from jaxdist.specs import PyTree, apply_rules, check_divisible, map_specs, without_idle
from jaxdist.state import TrainState, abstract_state, allocate, on_host, place_params

DEFAULT_SYNC = GradSync()
Rules = Sequence[tuple[str, P]]
Source = ModelDef | Callable[[jax.Array], PyTree] | PyTree


def _shapes_and_specs(source: Source) -> tuple[PyTree, PyTree]:
    if isinstance(source, ModelDef):
        return source.shapes, source.specs
    shapes = jax.eval_shape(source, jax.random.key(0)) if callable(source) else jax.eval_shape(lambda: source)
    return shapes, jax.tree.map(lambda _: P(), shapes)


def state_target(
    source: Source,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    *,
    strategy: str = "ddp",
    min_shard_bytes: int = 0,
    grad_sync: GradSync = DEFAULT_SYNC,
    freeze: Sequence[str] = (),
    offload: bool = False,
    rules: Rules = (),
) -> TrainState:
    """The state as ShapeDtypeStructs with shardings: what `init_state` fills, a checkpoint is restored into, and a step
    is compiled for without allocating anything."""
    shapes, specs = _shapes_and_specs(source)
    check_divisible(shapes, specs, mesh)
    optimizer = only_trained(optimizer, freeze)
    placing = get_strategy(strategy, StrategyOptions(POLICIES["fp32"], grad_sync, min_shard_bytes=min_shard_bytes))
    placed = placing.place(shapes, specs, mesh)
    if rules and isinstance(source, ModelDef):
        raise UserError("rules: are for parameter trees of your own; the layers of a ModelDef say how they rest")
    placed = apply_rules(placed, rules) if rules else placed
    check_divisible(shapes, placed, mesh)
    resting = map_specs(lambda spec: without_idle(spec, mesh), placed)
    residual = residual_target(leave_out(shapes, freeze), leave_out(resting, freeze), mesh, grad_sync)
    target = abstract_state(shapes, resting, optimizer, mesh, residual)
    return on_host(target) if offload and has_host_memory(mesh) else target


def init_state(
    source: Source,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    strategy: str = "ddp",
    min_shard_bytes: int = 0,
    grad_sync: GradSync = DEFAULT_SYNC,
    freeze: Sequence[str] = (),
    offload: bool = False,
    rules: Rules = (),
    seed: int = 0,
) -> TrainState:
    """A `TrainState` at step 0, each leaf allocated where it rests.

    source: a `ModelDef`, a function key -> parameters, or a pytree of parameters that exist already (say
    `nnx.to_pure_dict(nnx.state(model, nnx.Param))`). The strategy decides the layout: the step must use the same one.
    grad_sync: the step's, when it sends int8, whose residual is part of the state. freeze: the step's, patterns of
    parameters without optimizer state. offload: the optimizer state rests in host memory, where devices have one, and
    is fetched for each update. rules: (pattern, PartitionSpec) pairs for parameter trees of your own, first
    match wins: [("*.kernel", P(None, "fsdp")), ("*.bias", P())]; others as the strategy places them by their shapes.
    """
    target = state_target(
        source,
        optimizer,
        mesh,
        strategy=strategy,
        min_shard_bytes=min_shard_bytes,
        grad_sync=grad_sync,
        freeze=freeze,
        offload=offload,
        rules=rules,
    )
    optimizer = only_trained(optimizer, freeze)
    if isinstance(source, ModelDef):
        return allocate(source.init, jax.random.key(seed), optimizer, target)
    if callable(source):
        return allocate(source, jax.random.key(seed), optimizer, target)
    return place_params(source, optimizer, target)
