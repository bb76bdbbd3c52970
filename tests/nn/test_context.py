"""Context parallelism: every form trains like one device, in every layout; what it sends, keeps and refuses."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import oracle
import pytest
from layouts import SEQ, STRATEGIES, Case, check_fp32, check_wide, initial, make_batch, model_config
from levels import levels

from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.nn.context import tiles
from jaxdist.state import place_params
from jaxdist.step import make_train_step

FORMS = ("all_to_all", "gather", "ring")


def case(form: str, context: int, i: int, **given: Any) -> Case:
    """A case whose other options change with i, so that all cases together have every pair of them often."""
    tensor = 2 if context < 8 and i % 2 else 1
    fsdp = 2 if context * tensor < 8 and i % 3 else 1
    style = ("llama", "gpt2")[i % 2]
    usual = {"documents": bool(i % 5 % 2), "remat": ("none", "full", ("attention.context",))[i % 3]}
    strategy = STRATEGIES[i % len(STRATEGIES)]
    return Case(
        style, style == "gpt2", strategy, 1 + i % 2, (1, fsdp, tensor), context=context, form=form, **{**usual, **given}
    )


CASES = [
    *(case(form, context, i) for i, (form, context) in enumerate(itertools.product(FORMS * 4, (2, 4, 8)))),
    *(case(form, 2, i, options=(("window", 5),)) for i, form in enumerate(FORMS)),
    *(case(form, 2, 2 * i + 1, sequence=True, documents=True) for i, form in enumerate(FORMS)),
    *(case(form, 4, i, loss_chunk=5) for i, form in enumerate(FORMS)),
    *(case(form, 2, 3, prefetch=1) for form in FORMS),
]
PIPELINES = [
    case(form, 2, i)._replace(pipe=2, schedule=schedule, microbatches=4, mesh=(1, 1, 1 + i % 2))
    for i, (form, schedule) in enumerate(itertools.product(FORMS, ("one_f_one_b", "zero_bubble", "gpipe")))
]


@pytest.mark.parametrize("case", levels([*CASES, *PIPELINES], everyday=11, slow=2), ids=str)
def test_it_trains_like_one_device(case: Case) -> None:
    check_wide(case)


@pytest.mark.parametrize("form", FORMS)
def test_losses_in_fp32(form: str) -> None:
    check_fp32(case(form, 4, 2))


def error_of(case: Case) -> float:
    """How far the gradients of the first step are from those of one device."""
    with pytest.raises(AssertionError) as found:
        check_wide(case)
    text = str(found.value)
    return float(text.split("assert ")[1].split(" < ")[0].split(" ")[0]) if "assert " in text else 1.0


LLAMA = Case("llama", False, "ddp", 1, (1, 1, 1), context=2, form="ring", documents=True)


def local_numbers(own: int, dtype: Any = jnp.int32, device: Any = None) -> jax.Array:
    return jnp.arange(own, dtype=dtype)


def in_a_row(device: Any, devices: int) -> tuple[Any, Any]:
    return 2 * device, 2 * device + 1


def sum_of_both(a: tiles.Result, b: tiles.Result) -> tiles.Result:
    return tiles.Result(a.out + b.out, jnp.logaddexp(a.lse, b.lse))


MUTANTS = {
    "rotary by local positions": (LLAMA, "jaxdist.nn.attention.rotary.own_numbers", local_numbers),
    "merged without lse": (LLAMA, "jaxdist.nn.context.ring.merged", sum_of_both),
    "chunks in a row": (LLAMA, "jaxdist.nn.context.positions.chunks_of", in_a_row),
    "no masks of documents in the rounds": (
        LLAMA,
        "jaxdist.nn.context.ring._Masks.of_round",
        lambda self, i, before: None,
    ),
    "gather without its positions": (
        LLAMA._replace(form="gather"),
        "jaxdist.nn.context.forms.own_numbers",
        local_numbers,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, target, mutant = MUTANTS[name]
    monkeypatch.setattr(target, mutant)
    with pytest.raises(AssertionError, match="1e-10"):
        check_wide(case)


def grads_with_dropout(context: int, form: str | None, **mesh: int) -> Any:
    config = dataclasses.replace(model_config(LLAMA), dropout=0.3)
    mesh_of, tx = make_mesh(context=context, **mesh), optax.sgd(0.0)
    model = gpt(config, max_length=SEQ, param_dtype=jnp.float64, context=form)
    state = place_params(initial(config, "fp64"), tx, state_target(model, tx, mesh_of))
    step = make_train_step(model, tx, mesh_of, precision="fp64", return_grads=True)
    return jax.device_get(step(state, make_batch(8, 0))[1]["grads"])


@pytest.mark.parametrize(("form", "tensor"), [("all_to_all", 2), ("gather", 1)])
def test_dropout_is_that_of_one_device(form: str, tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        want, given = grads_with_dropout(1, None), {"context": 2, "form": form, "tensor": tensor}
        assert oracle.error(grads_with_dropout(**given), want) < 1e-10
        monkeypatch.setattr(
            "jaxdist.nn.dropout.own_context", lambda x, *, dim: jax.lax.slice_in_dim(x, 0, x.shape[dim] // 2, axis=dim)
        )
        assert oracle.error(grads_with_dropout(**given), want) > 1e-3  # by local position
