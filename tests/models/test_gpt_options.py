"""Options of `gpt` that Llama 3, Mistral and Qwen need: every layout against the oracle, and what is refused."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from layouts import Case, check_wide
from levels import levels

from jaxdist import init_state, make_mesh, make_train_step
from jaxdist.config.load import load_config
from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.models.gpt import gpt
from jaxdist.nn.attention.kernels import attention, cudnn_attention
from jaxdist.trainer.resume import check_identity

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
LLAMA3 = (("rope_type", "llama3"), ("rope_theta", 100.0), ("rope_factor", 4.0), ("rope_positions", 40))
QWEN3 = (("qk_norm", True), ("head_width", 6), ("heads", 8), ("kv_heads", 4))
EVERY = (*LLAMA3, *QWEN3, ("window", 3), ("qkv_bias", True))
CASES = [
    Case("llama", False, "zero3", 2, (1, 2, 2), options=EVERY),
    Case("llama", False, "ddp", 4, (1, 1, 2), pipe=2, schedule="one_f_one_b", options=EVERY),
    Case("llama", False, "zero3", 1, (2, 2, 2), sequence=True, options=EVERY),
    Case("llama", True, "ddp", 1, (1, 1, 1), options=(("rope_type", "linear"), ("window", 1))),
    Case("gpt2", True, "zero1", 1, (2, 1, 2), options=(("qk_norm", True), ("qkv_bias", False), ("window", 5))),
    Case("llama", False, "zero3", 1, (2, 2, 2), sequence=True, collective_matmul=True, options=QWEN3),
]


@pytest.mark.parametrize("case", levels(CASES, slow=2, common=1), ids=str)
def test_every_layout_computes_what_the_oracle_does(case: Case) -> None:
    check_wide(case)


@pytest.mark.slow
def test_a_window_with_a_key_mask_and_as_cudnn_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loop over queries. jax's own path stands for the kernel."""
    call, rng = jax.nn.dot_product_attention, np.random.default_rng(0)

    def stand_in(*args: jax.Array, implementation: str, **options: object) -> jax.Array:
        assert implementation == "cudnn"
        return call(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v = (rng.normal(size=(2, 8, 2, *more, 8)) for more in ((3,), (), ()))
    seen = rng.random((2, 8)) < 0.25
    want = np.zeros(q.shape)
    for b, i in np.ndindex(2, 8):
        keys = [j for j in range(max(0, i - 2), i + 1) if seen[b, j]]
        if keys:
            scores = np.einsum("ngk,jnk->ngj", q[b, i], k[b, keys]) / 8**0.5
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            want[b, i] = np.einsum("ngj,jnk->ngk", weights, v[b, keys])
    given = [jnp.asarray(each, jnp.float32) for each in (q, k, v)]
    assert (want == 0).all((2, 3, 4)).any()  # a query that sees none
    keys = jax.random.split(jax.random.key(0), 2)
    assert oracle.error(attention(*given, keys, dropout=0.0, window=3, seen_BT=jnp.asarray(seen)), want) < 1e-6
    assert oracle.error(cudnn_attention(*given, window=3, seen_BT=jnp.asarray(seen)), want) < 1e-6
    plain, wide = (attention(*given, keys, dropout=0.0, window=each) for each in (None, 8))
    assert (plain == wide).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["model.rope_type=llama3"],
            r"model\.rope_type: 'llama3', but model\.positions is learned; allowed: default; o",
        ),
        (["model.style=llama", "model.head_width=7"], r"model\.head_width: 7 is odd, and rope rotates pairs; allowed"),
        (
            ["model.style=llama", "model.rope_type=llama3", "model.rope_low=4"],
            r"model\.rope_low: 4; allowed: below model\.rope_high, 4, with model\.rope_type=llama3",
        ),
        (["model.heads=3"], r"model\.heads: 3 does not divide model\.width 128; .*; or give model\.head_width"),
        (
            ["model.position_losses=9", "data.seq_len=8"],
            r"model\.position_losses: 9 parts of a text of 8 positions; allowed: 0 to 8; or longer texts",
        ),
        (["model.window=0"], r"model\.window: 0 is out of range; allowed: an integer >= 1, or null"),
    ],
)
def test_what_cannot_be_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(UserError, match="^" + message) as error:
        load_config(CONFIG, given)
    assert "\n" not in str(error.value)


def test_more_parts_than_positions_are_refused_from_python() -> None:
    """All parts were empty."""
    config = ModelConfig(layers=1, width=16, heads=2, vocab=16, position_losses=9)
    with pytest.raises(UserError, match=r"^model\.position_losses: 9 parts of a text of 8 positions"):
        gpt(config, max_length=8)
    assert gpt(config, max_length=9).layers == 1


def test_older_records_are_of_models_without_these_options() -> None:
    saved = {"model": {"layers": 4}}
    now = {"model": {"layers": 4, "window": None, "rope_type": "default", "qk_norm": False}}
    assert check_identity(saved, now, Path()) == {}
    with pytest.raises(UserError, match=r"^model\.window: 3, but the run in \. was started with None"):
        check_identity(saved, {"model": now["model"] | {"window": 3}}, Path())


def test_rows_that_are_longer_than_the_positions_are_one_line() -> None:
    model = gpt(ModelConfig(layers=1, width=16, heads=2, vocab=16), max_length=16)
    batch = {name: jnp.zeros((2, 32), jnp.int32) for name in ("inputs", "targets")}
    batch["weights"] = jnp.ones((2, 32))
    mesh, optimizer = make_mesh(), optax.sgd(0.1)
    state = init_state(model, optimizer, mesh, strategy="ddp")
    with pytest.raises(UserError, match=r"^max_length: 16 positions, and rows of a batch have 32 tokens; allowed"):
        make_train_step(model, optimizer, mesh, strategy="ddp")(state, batch)
