"""Mixture of experts: it trains like one device in every layout, drops the same tokens, and counts each token once."""

import itertools
from typing import Any

import experts_oracle
import jax
import numpy as np
import oracle
import pytest
from experts_oracle import split
from layouts import SEQ, STRATEGIES, Case, batch_size, model_config, run
from levels import levels

from jaxdist.config.sections.moe import MoEConfig

DROPPING = MoEConfig(
    experts=8, top_k=2, dispatch="capacity", factor=0.75, group=4, bias_rate=0.05, balance_loss=0.1, z_loss=0.01
)
DROPLESS = MoEConfig(experts=8, top_k=3, scores="sigmoid", scaling=2.5, shared=1, bias_rate=0.05, balance_loss=0.1)
PLAIN = MoEConfig(experts=8, top_k=1, normalised=False, bias_rate=None, balance_loss=0.1, dense=1)
KINDS = {"dropping": DROPPING, "dropless": DROPLESS, "plain": PLAIN}


def case(kind: str, expert: int, i: int, **given: Any) -> Case:
    """A case whose other options change with i."""
    tensor = 2 if expert < 8 and i % 2 else 1
    fsdp = 2 if expert * tensor < 8 and i % 3 else 1
    style = ("llama", "gpt2")[i % 2]
    usual = {"documents": bool(i % 5 % 2), "remat": ("none", "full", ("attention.out", "mlp.rows"))[i % 3]}
    strategy, mesh = STRATEGIES[i % len(STRATEGIES)], (1, fsdp, tensor)
    found = Case(style, style == "gpt2", strategy, 1 + i % 2, mesh, expert=expert, options=(("moe", KINDS[kind]),))
    return found._replace(**{**usual, **given})


CASES = [
    *(case(kind, expert, i) for i, (kind, expert) in enumerate(itertools.product([*KINDS] * 4, (2, 4, 8)))),
    *(case(kind, 1, 5 * i + 1) for i, kind in enumerate(KINDS)),
    *(case(kind, 2, 2 * i + 1, sequence=True) for i, kind in enumerate(KINDS)),
    *(case(kind, 2, 2 * i, context=2, form=form) for i, kind in enumerate(KINDS) for form in ("all_to_all", "ring")),
    *(case(kind, 2, i, prefetch=1, strategy="zero3") for i, kind in enumerate(KINDS)),
    *(case(kind, 2, i, remat="sqrt") for i, kind in enumerate(KINDS)),
    *(case(kind, 2, i, scan_blocks=2, remat="full") for i, kind in enumerate(KINDS)),
    *(case(kind, 2, i, algorithm=name) for i, (kind, name) in enumerate(zip(KINDS, ("ring", "tree", "two_level"), strict=True)))
]  # fmt: skip
PIPELINES = [
    case(kind, 2, i)._replace(pipe=2, schedule=schedule, microbatches=4, mesh=(1, 1, 1 + i % 2))
    for i, (kind, schedule) in enumerate(itertools.product(KINDS, ("one_f_one_b", "zero_bubble", "gpipe")))
]


def statistics_of(grads: Any) -> Any:
    """(chosen, dropped), [L, E], in tokens: of gradients, which are divided by one number in all leaves."""
    _, own = split(grads)
    chosen, dropped, _ = np.split(np.asarray(own["statistics"]), (8, 16), axis=1)
    return chosen, dropped, own


def check(case: Case) -> None:
    with jax.enable_x64(True):
        config, rows = model_config(case), batch_size(case)
        want = experts_oracle.reference(config, rows, documents=case.documents)
        got = run(case, "fp64", 3)
        assert max(abs(a - b) / b for a, b in zip(got.losses, want.losses, strict=True)) < 1e-10
        for step in range(3):
            assert oracle.error(split(got.grads[step])[0], want.grads[step]) < 1e-10
            chosen, dropped, own = statistics_of(got.grads[step])
            factor = rows * SEQ * config.moe.top_k / chosen.sum(1, keepdims=True)
            assert np.allclose(
                chosen * factor, want.chosen[step], rtol=1e-12, atol=0
            )  # each token once, in no layout n times
            assert np.allclose(dropped * factor, want.dropped[step], rtol=1e-12, atol=0)
            if "bias" in own:
                excess = want.chosen[step] - want.chosen[step].mean(1, keepdims=True)
                assert np.allclose(own["bias"] * factor, excess, rtol=1e-12, atol=1e-9)
        assert oracle.error(got.params, want.params) < 1e-10
        if config.moe.dispatch == "capacity":
            assert all(0.05 < each.sum() / (rows * SEQ * config.moe.top_k * len(each)) < 0.7 for each in want.dropped)


@pytest.mark.parametrize("case", levels([*CASES, *PIPELINES], everyday=20, slow=3, common=4), ids=str)
def test_it_trains_like_one_device(case: Case) -> None:
    check(case)
