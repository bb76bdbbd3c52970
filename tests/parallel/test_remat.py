"""What the modes of `memory.remat` keep, gather and compute again; they all train like one device."""

import dataclasses
import functools
import importlib
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from jax import lax
from jaxprs import collectives, names_of_values
from levels import levels

from jaxdist import make_mesh, make_train_step
from jaxdist.config.rules.remat import ATTENTION_RESULT, MODES, NAMES
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import AnyMesh, abstract_mesh
from jaxdist.models.gpt import gpt
from jaxdist.parallel.blocks.remat import _policy
from jaxdist.parallel.blocks.sqrt_remat import sizes
from jaxdist.plan.traced.activations import ON_HOST, SavedArray, saved_activations
from jaxdist.plan.traced.flops import flops_of
from jaxdist.plan.traced.ledger import ledger

LENGTH, ROWS = 8, 16
NAMED = ("attention.out", "mlp.hidden")
LLAMA = ModelConfig(style="llama", layers=7, width=16, heads=4, kv_heads=2, vocab=32, mlp_width=24)
BLOCK = 6  # parameters of a block
BATCH = {
    name: jax.ShapeDtypeStruct((ROWS, LENGTH), kind)
    for name, kind in (("inputs", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
}


class Traced:
    """A step of Llama on abstract values."""

    def __init__(self, remat: Any, layers: int = 7, *, mesh: AnyMesh | None = None, **options: Any) -> None:
        mesh, tx = mesh or abstract_mesh(fsdp=4), optax.sgd(0.1)
        model = gpt(dataclasses.replace(LLAMA, layers=layers), max_length=LENGTH)
        options = {"strategy": "zero3"} | options
        self.step = make_train_step(model, tx, mesh, remat=remat, **options)
        self.state = state_target(model, tx, mesh, strategy=options["strategy"])
        self.traced = self.step.jitted(self.state).trace(self.state, BATCH)

    def kept(self) -> list[SavedArray]:
        return saved_activations(self.step, self.state, BATCH)


@functools.cache
def traced(remat: Any, layers: int = 7) -> Traced:
    return Traced(remat, layers)


CASES = [
    layouts.Case("llama", True, "zero3", 1, (1, 2, 1), remat="sqrt"),
    layouts.Case("gpt2", False, "zero2", 1, (1, 2, 1), remat="dots"),
    layouts.Case("gpt2", False, "zero3", 1, (1, 2, 1), remat=NAMED),
]
SLOW = [
    layouts.Case(("gpt2", "llama")[i % 2], i % 3 == 0, strategy, 1 + i % 2, mesh, remat=remat)
    for j, strategy in enumerate(layouts.STRATEGIES)
    for i, (remat, mesh) in enumerate(
        (
            ("sqrt", (2, 2, 2)),
            ("dots", (1, 2, 4)),
            (NAMED, (2, 4, 1)),
            ("offload", (4, 2, 1)),
            ("sqrt", (1, 8, 1)),
            (("attention.qkv", "mlp.out"), (1, 3, 1)),
        ),
        start=j,
    )
] + [
    layouts.Case("gpt2", True, "zero3", 1, (2, 2, 2), remat="dots", prefetch=1),
    layouts.Case("llama", False, "ddp", 1, (2, 2, 1), remat=NAMED, prefetch=1, overlap=True),
    layouts.Case("llama", False, "ddp", 1, (2, 2, 1), remat="sqrt", overlap=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*levels(CASES, everyday=6, slow=4, common=2), *levels(SLOW, slow=16, common=4)], ids=str
)
def test_layout_equals_one_device(case: layouts.Case) -> None:
    layouts.check_wide(case)


def test_layers_name_what_is_documented() -> None:
    moe = layouts.Case("llama", False, "ddp", 1, (1, 1, 1), expert=2, options=(("moe", MoEConfig(4)),))
    _, target, step = layouts.parts_of(moe, "fp32")
    experts = step.trace(target, jax.eval_shape(lambda: layouts.make_batch(8, 0))).jaxpr
    every = {*NAMES, ATTENTION_RESULT}
    assert {name for name, _ in names_of_values(traced("none").traced.jaxpr)} == every - {"mlp.rows", "mlp.tokens"}
    assert {name for name, _ in names_of_values(experts)} == every


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param(each, marks=[] if each in ("full", "sqrt", NAMED) else [pytest.mark.slow])
        for each in (*MODES, NAMED)
    ],
    ids=str,
)
def test_gathered_parameters_are_never_kept(remat: Any) -> None:
    """Blocks are gathered forward and backward; with segments once more for all but the last of each. The head's, whose
    backward pass is the next thing, once."""
    layers, counts = 7, collectives(traced(remat).traced.jaxpr, "fsdp")
    size, count, left = sizes(layers)
    in_segments = count * (size - 1) + max(left - 1, 0) if remat == "sqrt" else 0
    assert counts["all_gather", "float32"] == BLOCK * (2 * layers + in_segments) + 1 + 2
    assert counts["reduce_scatter", "float32"] == BLOCK * layers + 3
    kept = [each for each in traced(remat).kept() if not each.what.startswith("head")]
    assert not [each for each in kept if each.kind == "copies of parameters" and remat != "none"]


def test_what_is_kept_to_the_byte() -> None:
    tokens, width, hidden, layers = ROWS // 4 * LENGTH, LLAMA.width, LLAMA.mlp_width or 0, 7

    def elements(remat: Any) -> int:
        kept = [each for each in traced(remat).kept() if each.kind in ("activations", ON_HOST)]
        return sum(each.bytes_per_device for each in kept if each.what != "head") // 4

    given = tokens * width
    assert elements("full") == elements("offload") == (layers + 1) * given  # the last one's output is the head's input
    assert elements(("attention.out",)) == elements("full") + layers * given
    assert elements(NAMED) == elements("full") + layers * (given + 2 * tokens * hidden)
    qkv = 2 * given  # as many keys and values as half the queries each
    attention = given + tokens * LLAMA.heads  # its result, and the statistics
    assert elements("dots") == elements("full") + layers * (qkv + attention + given + 2 * tokens * hidden)
    size, count, left = sizes(layers)
    assert (size, count, left) == (2, 3, 1)
    assert elements("sqrt") == (count + 2) * given
    kinds = {each.kind for each in traced("offload").kept() if not each.what.startswith("head")}
    assert kinds == {"activations", ON_HOST}


def test_dots_keeps_what_cudnn_attention_computes() -> None:
    """Its backward pass reads the output and the statistics; without them, the forward kernel runs twice."""
    kernels = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    keeps = _policy("dots", constants=True)
    assert keeps is not None and keeps(kernels._dot_product_attention_fwd_p_wrapper)
    assert not keeps(kernels._dot_product_attention_bwd_p_wrapper) and not keeps(lax.tanh_p)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 16, 31, 64])
def test_segments_hold_every_block_once(layers: int) -> None:
    size, count, left = sizes(layers)
    assert size * count + left == layers and 0 <= left < size
    assert size <= math.sqrt(layers) and count + (left > 0) + size <= 2 * math.sqrt(layers) + 2


@pytest.mark.slow
def test_what_is_computed_again() -> None:
    """Matrix products, counted in the program. A block: forward F, backward 2 F."""
    tokens, width, layers = ROWS // 4 * LENGTH, LLAMA.width, 7
    kernels = width * 2 * width + width * width + 3 * width * (LLAMA.mlp_width or 0)
    scores = 2 * LLAMA.heads * LENGTH * (width // LLAMA.heads)  # both products of a token's attention
    down = width * (LLAMA.mlp_width or 0)  # the last of a block: nobody needs its result again
    forward, head = 2 * tokens * (kernels + scores), 2 * tokens * width * LLAMA.vocab
    flops = {remat: flops_of(traced(remat).traced.jaxpr) for remat in (*MODES, NAMED)}
    # The backward pass of attention computes the scores again, in every mode.
    assert flops["none"] == 3 * (layers * forward + head) + layers * tokens * scores
    again = layers * (forward - 2 * tokens * down)  # and nothing of the head
    assert flops["full"] - flops["none"] == flops["offload"] - flops["none"] == again
    assert flops["dots"] == flops["none"]
    size, count, _ = sizes(layers)
    more = layers + count * (size - 1)  # segments, then blocks; the rest of one block is one block
    assert flops["sqrt"] - flops["none"] == more * forward - layers * 2 * tokens * down
    assert flops["none"] < flops[NAMED] < flops["full"]


def test_offloaded_inputs_are_in_host_memory_of_a_gpu() -> None:
    """Lowered for CUDA from here: one array goes to the host, and comes back."""
    text = traced("offload").traced.lower(lowering_platforms=("cuda",)).as_text()
    places = [
        line.split('_xla_buffer_placement = "')[1].split('"')[0]
        for line in text.splitlines()
        if "@annotate_device_placement" in line
    ]
    assert sorted(places) == ["device", "pinned_host"]
    assert "pinned_host" not in traced("full").traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_cpu_has_nowhere_to_offload_to(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        offload = Traced("offload", 2, mesh=make_mesh(fsdp=4))
    assert [record.getMessage() for record in caplog.records if "memory.remat" in record.getMessage()] == [
        "memory.remat: a CPU has no memory apart from the host's to offload to; 'offload' runs as 'full'"
    ]
    assert not [each for each in offload.kept() if each.kind == ON_HOST]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"remat": ("attention.ot",)},
            r"memory.remat\[0\]: 'attention.ot' is not known; allowed: one of attention.qkv, ",
        ),
        ({"remat": "attention.out"}, r"memory.remat: 'attention.out' is not known; .*; write \[attention.out\]"),
        ({"remat": "sqrt", "prefetch": 1}, "memory.remat: 'sqrt' does not go with parallel.prefetch 1"),
        ({"remat": "offload", "prefetch": 1}, "memory.remat: 'offload' does not go with parallel.prefetch 1"),
        (
            {"remat": NAMED, "grad_sync": GradSync(deterministic=True)},
            r"memory.remat: \[attention.out, mlp.hidden\] does not go with parallel.grad_sync.deterministic",
        ),
        (
            {"remat": "full", "grad_sync": GradSync(deterministic=True)},
            "memory.remat: 'full' does not go with parallel.grad_sync.deterministic",
        ),
        (
            {"remat": "sqrt", "schedule": "zero_bubble", "microbatches": 2},
            "memory.remat: 'sqrt' does not go with the parallel.schedule of this step, whose backward",
        ),
        (
            {"remat": "offload", "schedule": "one_f_one_b", "microbatches": 2},
            "memory.remat: 'offload'.* is for one stage",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Traced(layers=4, mesh=abstract_mesh(pipe=2) if "schedule" in options else None, **options)


@pytest.mark.parametrize("remat", ["sqrt", "offload"])
def test_a_loss_of_ones_own_has_no_blocks(remat: str) -> None:
    tx, mesh = optax.sgd(0.1), make_mesh()
    state = state_target(lambda key: {"w": jnp.zeros((4, 4))}, tx, mesh)
    step = make_train_step(lambda params, batch, keys: ((batch @ params["w"]).sum(), 1.0), tx, mesh, remat=remat)
    with pytest.raises(UserError, match=f"memory.remat: '{remat}' is for blocks, and a user's loss_fn is one unit"):
        step.jitted(state).trace(state, jax.ShapeDtypeStruct((8, 4), jnp.float32))


def test_segments_are_named_as_run_again() -> None:
    found = ledger(traced("sqrt").step, traced("sqrt").state, BATCH).collectives
    phases = {(each.op, each.phase): 0 for each in found}
    for each in found:
        phases[each.op, each.phase] += each.calls
    layers, (size, count, _) = 7, sizes(7)
    assert phases == {
        ("all_gather", "forward"): BLOCK * layers + 3,
        ("all_gather", "recompute"): BLOCK * (layers + count * (size - 1)),
        ("reduce_scatter", "backward"): BLOCK * layers + 3,
        ("psum", "once a step"): 1,
    }


def grown(remat: Any, layers: int) -> int:
    """Temporary bytes that 16 sequences more take: of activations, for gradients do not depend on their number."""
    tx, mesh, found = optax.sgd(0.1), make_mesh(), []
    model = gpt(ModelConfig(layers=layers, width=64, heads=1, vocab=16, mlp_width=64, bias=False), max_length=64)
    state = state_target(model, tx, mesh)
    for rows in (8, 24):
        batch = {name: jax.ShapeDtypeStruct((rows, 64), leaf.dtype) for name, leaf in BATCH.items()}
        program = make_train_step(model, tx, mesh, remat=remat).lower(state, batch).compile()
        found.append(int(program.memory_analysis().temp_size_in_bytes))
    return found[1] - found[0]


@pytest.mark.slow
def test_compiled_memory_by_depth() -> None:
    """Inputs of blocks, 16 sequences: none and full are linear, sqrt keeps as many as segments and blocks of one. What
    a block needs while it runs does not depend on the depth: it is taken from the line of full."""
    depths, given = (4, 8, 16, 32, 64), 16 * 64 * 64 * 4
    full = {layers: grown("full", layers) for layers in (4, 16, 64)}
    for a, b in ((4, 16), (16, 64)):
        assert (full[b] - full[a]) / (b - a) == pytest.approx(given, rel=0.01)
    none = [grown("none", layers) for layers in (4, 16, 64)]
    assert (none[1] - none[0]) / 12 == pytest.approx((none[2] - none[1]) / 48, rel=0.01)
    assert (none[2] - none[1]) / 48 > 10 * given
    workspace = full[4] - 4 * given
    kept = [(grown("sqrt", layers) - workspace) / given for layers in depths]
    for layers, count in zip(depths, kept, strict=True):
        size, segments, left = sizes(layers)
        assert count == pytest.approx(segments + size + (left > 0), abs=1.1)
    slope = np.polyfit(np.log(depths), np.log(kept), 1)[0]
    assert 0.45 < slope < 0.6
