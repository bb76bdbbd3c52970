"""Every policy is what its table says: dtypes at rest, in layers, in every operation and collective; the layouts agree
within it; and it trains."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.extend.core import jaxprs_in_params

from jaxdist import registry
from jaxdist.config import ModelConfig
from jaxdist.errors import UserError
from jaxdist.evaluate import make_eval_step, make_sampler
from jaxdist.init import init_state, state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn import ModelDef
from jaxdist.parallel.program import in_precision
from jaxdist.parallel.strategy import StrategyOptions, get_strategy
from jaxdist.precision import POLICIES, Precision, make_precision
from jaxdist.specs import path_name
from jaxdist.state import specs_of_arrays
from jaxdist.step import make_train_step

STRATEGIES = registry.names("jaxdist.parallel.strategies")
GPT2 = ModelConfig(style="gpt2", layers=2, width=16, heads=2, vocab=32)
F64, F32, F16, BF16 = "float64", "float32", "float16", "bfloat16"


class Row(NamedTuple):
    """What the policy promises. kept: what layers get of norms; params: of other parameters; wide: where exponentials,
    logarithms and sums are taken; moved: sums of activations over `tensor`."""

    rest: str
    params: str
    kept: str
    products: str
    wide: str
    reduce: str
    moved: str
    loss_scale: float | str


TABLE = {
    "fp32": Row(F32, F32, F32, F32, F32, F32, F32, 1.0),
    "bf16": Row(F32, BF16, BF16, BF16, F32, F32, BF16, 1.0),
    "fp16": Row(F32, F16, F32, F16, F32, F32, F16, "dynamic"),
    "fp64": Row(F64, F64, F64, F64, F64, F64, F64, 1.0),
    "O0": Row(F32, F32, F32, F32, F32, F32, F32, 1.0),
    "O1": Row(F32, F32, F32, F16, F32, F32, F32, "dynamic"),
    "O2": Row(F32, F16, F32, F16, F32, F32, F16, "dynamic"),
    "O3": Row(F16, F16, F16, F16, F32, F16, F16, 1.0),
}


def batch(rows: int = 8, length: int = 8) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 32, (rows, length + 1)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((rows, length), np.float32)}


def spied(model: ModelDef, seen: dict[str, str]) -> ModelDef:
    """The model, whose units write down the dtypes of the parameters that they are given."""

    def unit(name: str) -> Any:
        function = getattr(model, name)

        def run(params: Any, *rest: Any) -> Any:
            given = {("blocks" if name == "block" else name.replace("logits", "head")): params}
            if name in ("head", "logits") and rest[0] is not None:
                given["embed"] = rest[0]
            for path, leaf in jax.tree_util.tree_leaves_with_path(given):
                seen.setdefault(path_name(path), str(leaf.dtype))
                assert seen[path_name(path)] == str(leaf.dtype), path_name(path)
            return function(params, *rest)

        return run

    return model._replace(**{name: unit(name) for name in ("embed", "block", "head", "logits")})


def equations(jaxpr: Any, stack: str = "") -> Iterator[tuple[str, Any]]:
    """(names on the way, equation) of all equations at any depth."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = f"{stack}/{equation.source_info.name_stack}"
        yield inner, equation
        for sub in jaxprs_in_params(equation.params):
            yield from equations(sub, inner)


def floats(equation: Any) -> set[str]:
    return {str(x.aval.dtype) for x in equation.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)}


def trace(
    precision: str | Precision, strategy: str = "zero3", *, schedule: str = "accumulate", config: ModelConfig = GPT2,
    seen: dict[str, str] | None = None, optimizer: Any = None, prefetch: int = 0, **axes: int,
) -> tuple[Any, Any]:  # fmt: skip
    """(state as shapes, jaxpr of a step)."""
    policy = make_precision(precision) if isinstance(precision, str) else precision
    model = gpt(config, max_length=8, param_dtype=policy.param)
    mesh, tx = make_mesh(**axes), optimizer or optax.adamw(1e-3, eps=1e-4)
    target = state_target(model, tx, mesh, strategy=strategy)
    model = model if seen is None else spied(model, seen)
    step = make_train_step(
        model, tx, mesh, strategy=strategy, precision=policy, schedule=schedule, prefetch=prefetch,
        microbatches=2 if axes.get("pipe", 1) > 1 else 1,
    )  # fmt: skip
    return target, step.jitted(target).trace(target, batch()).jaxpr


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_is_what_the_table_says(name: str) -> None:
    with jax.enable_x64(name == "fp64"):
        row, seen = TABLE[name], dict[str, str]()
        target, jaxpr = trace(name, seen=seen, data=2, fsdp=2, tensor=2)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(target.params)} == {row.rest}
    state = [str(leaf.dtype) for leaf in jax.tree.leaves(target.opt_state)]
    assert sorted(set(state)) == sorted({row.rest, "int32"}) and state.count(row.rest) >= 2 * len(seen)
    assert len(seen) == len(jax.tree.leaves(target.params))
    assert seen == {path: row.kept if "norm" in path else row.params for path in seen}
    assert POLICIES[name].loss_scale == row.loss_scale

    found = defaultdict(set)
    region = next(equation for _, equation in equations(jaxpr) if equation.primitive.name == "shard_map")
    for stack, equation in equations(region.params["jaxpr"]):
        kind, backward = equation.primitive.name, "transpose(" in stack
        if kind == "dot_general":
            # Scores and logits are summed into fp32, so that what comes back to their operands is fp32.
            assert row.products in floats(equation) and (name != "O1" or floats(equation) == {row.products})
            found["products back" if backward else "products"] |= floats(equation)
        elif kind in ("exp", "log", "rsqrt", "reduce_sum") and floats(equation):
            found[kind] |= floats(equation)
        elif kind in ("all_gather", "reduce_scatter", "psum", "psum_invariant", "pmax"):
            axes = equation.params.get("axes", equation.params.get("axis_name"))
            axes = axes if isinstance(axes, tuple) else (axes,)
            found[kind.removesuffix("_invariant"), axes] |= floats(equation)
    assert found.pop("products") == {row.products}
    assert found.pop("products back") <= {row.products, row.wide}
    for kind in ("exp", "log", "rsqrt", "reduce_sum"):
        assert found.pop(kind) == {row.wide}, kind
    assert found.pop(("all_gather", ("fsdp",))) == {row.params, row.kept}
    assert found.pop(("reduce_scatter", ("fsdp",))) == {row.reduce}
    assert found.pop(("psum", ("tensor",))) == {row.moved, row.wide}  # activations; sums of the loss
    assert found.pop(("pmax", ("tensor",))) == {row.wide}
    # Gradients over `data`, and the loss over both.
    assert found.pop(("psum", ("data",))) == {row.reduce}
    assert found.pop(("psum", ("data", "fsdp"))) == {row.wide}
    assert not found
