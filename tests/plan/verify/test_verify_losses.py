"""`jaxdist.verify` names what is wrong with a loss, and the line; it finds nothing wrong with losses that are right."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import right_losses
import wrong_losses
from flax import nnx
from own_modules import Dropped
from wrong_losses import BATCH, PARAMS, WRONG

import jaxdist
from jaxdist.errors import UserError
from jaxdist.parallel import loss_results

CHEAP = ("chosen_rows", "closed_over", "callback", "numpy_random", "numpy_table", "mean")
CHEAP_RIGHT = ("picked_by_number",)


def levels_of(names: Any, often: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in often else [pytest.mark.slow]) for name in names]


def verified(loss: Any, params: Any = PARAMS) -> Any:
    return jaxdist.verify(loss, params, BATCH, jaxdist.make_mesh(data=2, fsdp=2), strategy="zero3")


def marked(loss: Any) -> str:
    """The line with the mark, as findings have it."""
    lines, first = inspect.getsourcelines(loss)
    [place] = [i for i, line in enumerate(lines) if line.rstrip().endswith("# wrong")]
    return f"wrong_losses.py:{first + place}"


@pytest.mark.parametrize("name", levels_of(WRONG, CHEAP))
def test_what_is_wrong_is_named_with_its_line(name: str) -> None:
    loss, cause = WRONG[name]
    found = verified(loss)
    assert [each.cause for each in found.findings] == [cause], str(found)
    assert found.findings[0].where == (marked(loss),)
    assert "\n" not in str(found.findings[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", wrong_losses.MODULES)
def test_what_is_wrong_with_the_loss_of_a_module_is_named(name: str) -> None:
    loss, cause = wrong_losses.MODULES[name]
    found = verified(loss, None)
    assert [each.cause for each in found.findings] == [cause]
    assert found.findings[0].where[0].startswith("wrong_losses.py:")


@pytest.mark.parametrize("name", levels_of(right_losses.RIGHT, CHEAP_RIGHT))
def test_nothing_is_found_in_what_is_right(name: str) -> None:
    found = verified(right_losses.RIGHT[name])
    assert found.clean, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", right_losses.MODULES)
def test_nothing_is_found_in_the_loss_of_a_module_that_is_right(name: str) -> None:
    found = verified(right_losses.MODULES[name], None)
    assert found.clean, str(found)


@pytest.mark.slow
def test_two_faults_are_two_lines_and_the_second_is_seen_behind_the_first() -> None:
    def loss(p: Any, b: Any, keys: Any) -> Any:
        h = (b["x"] @ p["w"]).mean(1)
        h = h - h.mean(0)
        return (h**2).sum() + 0.1 * (p["v"] ** 2).sum(), len(h)

    found = verified(loss).findings
    assert [each.cause for each in found] == ["batch statistics", "penalty in each call"]


@pytest.mark.slow
def test_a_weight_of_parameters_is_named_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """No gradient flows through a weight. Where it depends on frozen parameters alone, none would."""
    loss_results._tell_constant.cache_clear()
    loss, mesh = wrong_losses.weighted_by_parameters, jaxdist.make_mesh(data=2)
    assert [each.cause for each in verified(loss).findings] == ["weight of parameters"]
    assert sum("the weight depends on parameters" in each for each in caplog.messages) == 1
    assert jaxdist.verify(loss, PARAMS, BATCH, mesh, freeze=("w",)).clean
    caplog.clear()
    loss_results._tell_constant.cache_clear()
    assert verified(right_losses.weighted_by_what_is_predicted).clean
    assert not any("depends on parameters" in each for each in caplog.messages)


@pytest.mark.slow
def test_losses_that_cancel_each_other_are_compared_as_large_as_they_are() -> None:
    """Advantages of a batch add up to 0 but for rounding, of which each layout has its own."""

    def loss(p: Any, b: Any, keys: Any) -> Any:
        score = jnp.tanh(b @ p["w"])
        gain = jax.lax.stop_gradient(jnp.sin(9 * score))
        gain -= jaxdist.batch_mean(gain)
        gain /= jnp.sqrt(jaxdist.batch_mean(gain**2))
        return (
            (jnp.exp(score - jax.lax.stop_gradient(score)) * gain).sum(),
            gain.size,
            {"gain": (gain.sum(), gain.size)},
        )

    batch = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    found = jaxdist.verify(loss, {"w": jnp.ones(4)}, batch, jaxdist.make_mesh(data=2))
    assert found.clean, str(found)


def test_metrics_that_differ_are_named_with_their_values() -> None:
    def loss(p: Any, b: Any, keys: Any) -> Any:
        own = ((b["x"] @ p["w"]) ** 2).mean((1, 2))
        return own.sum(), own.size, {"largest": (own.max(), 1.0), "large": ((own > 1).sum(), own.size)}

    [found] = verified(loss).findings
    assert found.cause == "metric of these rows"
    assert found.detail.startswith("largest ") and "on one device" in found.detail and "large " not in found.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cast_to_float32", "frozen_in_a_checkpoint"])
def test_a_precision_that_a_loss_narrows_is_said(name: str) -> None:
    found = verified(right_losses.RIGHT[name])
    assert "narrower than float64 at right_losses.py:" in found.precision
    assert "compared to 0.0001 only" in found.precision


@pytest.mark.slow
def test_frozen_parameters_are_computed_in_float64() -> None:
    assert verified(right_losses.RIGHT["frozen_parameters"]).precision == "computed in float64, compared to 1e-09"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": 3}, "loss: is 3; allowed: a ModelDef, .* or a loss_fn"),
        ({"params": None}, "params: None; allowed: the parameters of a loss_fn of your own"),
        ({"mesh": 4}, "mesh: is a int; allowed: a mesh with devices"),
        ({"batch": np.ones((1, 4))}, "batch: leaves of \\[1\\] rows; allowed: .* of 2 rows or more"),
        ({"batch": np.ones((5, 4))}, "batch: 5 rows do not divide by 2 "),
        ({"loss": lambda p, b, k: p["w"].sum()}, "loss_fn: must return two scalars"),
        ({"loss": lambda p, b, k: (p["none"], 1)}, "loss_fn: KeyError at test_verify_losses.py:"),
    ],
    ids=["no function", "no parameters", "no mesh", "one row", "rows over", "no pair", "a loss that fails"],
)
def test_wrong_arguments_are_one_line(changed: dict[str, Any], message: str) -> None:
    given = {"loss": right_losses.plain, "params": PARAMS, "batch": BATCH, "mesh": jaxdist.make_mesh(fsdp=2)}
    with pytest.raises(UserError, match=message):
        jaxdist.verify(**(given | changed))
    assert not jax.config.read("jax_enable_x64")


@pytest.mark.slow
def test_a_metric_is_not_blamed_for_other_masks() -> None:
    """One key for all rows gives each layout other masks, and so other metrics."""
    module = Dropped(nnx.Rngs(0))

    def scored(module: Any, batch: Any) -> Any:
        out = module(batch)
        return (out**2).sum(), len(out), {"large": ((abs(out) > 0.1).sum(), out.size)}

    batch, mesh = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), jaxdist.make_mesh(data=2)
    found = jaxdist.verify(jaxdist.nnx_loss(module, scored), None, batch, mesh, seed=0)
    assert [each.cause for each in found.findings] == ["one key for all samples"], str(found)
