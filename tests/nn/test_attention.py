"""Which kernel computes attention, and cuDNN's in the step, which is lowered for a GPU and not run."""

import importlib.util
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

from jaxdist.build import assemble, attention_of, cuda_capability
from jaxdist.config.schema import Config, DevicesConfig, ModelConfig, ParallelConfig
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.config.sections.precision import PrecisionConfig
from jaxdist.errors import UserError
from jaxdist.init import state_target
from jaxdist.mesh import abstract_mesh, make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.models.options.vit import Options as vit_options
from jaxdist.models.vit import vit
from jaxdist.nn import why_not_cudnn
from jaxdist.nn.attention.kernels import PackedDocuments, attention, cudnn_attention
from jaxdist.plan.traced.flops import flops_of
from jaxdist.precision.policy import precision_of
from jaxdist.step import make_train_step

CUDNN = ModelConfig(layers=2, width=32, heads=4, vocab=32, attention="cudnn")
GROUPED = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=32, style="llama", attention="cudnn")
FITS: dict[str, Any] = {"capability": "9.0", "dtype": jnp.bfloat16, "head_width": 64, "dropout": 0.0}


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax passes for one that finds cuDNN 9.10: it asks for the version when it traces."""
    found = SimpleNamespace(cudnn_get_version=lambda: 91000)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", found)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"dtype": jnp.float16}, None),
        ({"head_width": 256}, None),
        ({"capability": "12.0"}, None),
        ({"capability": "8.0", "head_width": 128}, None),
        ({"capability": ""}, "no NVIDIA GPUs"),
        ({"capability": "gfx942"}, "no NVIDIA GPUs"),
        ({"capability": "7.5"}, "8.0"),
        ({"dtype": jnp.float32}, "not float32"),
        ({"dropout": 0.1}, "model.dropout"),
        ({"per_op": True}, "per_op"),
        ({"head_width": 60}, "not 60"),
        ({"head_width": 264}, "8, 16, ... 256"),
        ({"capability": "8.9", "head_width": 136}, "8, 16, ... 128"),
        ({"masked": True}, None),
        ({"window": 4}, None),
        ({"window": 4, "masked": True}, "a mask or a window, not both"),
    ],
)
def test_what_cudnn_can_compute(changes: dict[str, Any], why: str | None) -> None:
    found = why_not_cudnn(**FITS | changes)
    assert found is None if why is None else why in (found or "")


def on(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.build.cuda_capability", lambda *_: capability)


@pytest.mark.parametrize(
    ("asked", "policy", "capability", "want"),
    [
        ("auto", PrecisionConfig("bf16"), "9.0", "cudnn"),
        ("cudnn", PrecisionConfig("fp16"), "8.0", "cudnn"),
        ("auto", PrecisionConfig("fp8"), "9.0", "cudnn"),
        ("xla", PrecisionConfig("bf16"), "9.0", "xla"),
        ("auto", PrecisionConfig("fp32"), "9.0", "xla"),
        ("auto", PrecisionConfig("bf16"), "", "xla"),
        ("auto", PrecisionConfig("O1"), "9.0", "xla"),
        ("auto", PrecisionConfig("bf16", keep_fp32=("*.qkv.*",)), "9.0", "xla"),
        ("auto", PrecisionConfig("bf16", keep_fp32=("embed.*",)), "9.0", "xla"),  # the whole residual stream is fp32
        ("auto", PrecisionConfig("bf16", keep_fp32=("*norm*",)), "9.0", "cudnn"),
    ],
)
def test_what_auto_takes(
    asked: str, policy: PrecisionConfig, capability: str, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(capability, monkeypatch)
    config = Config(model=ModelConfig(attention=asked), precision=policy)
    kernel, why = attention_of(config, precision_of(policy), make_mesh())
    assert kernel == want and (why is None) == (want == "cudnn")


def test_the_same_bits_are_not_computed_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    on("9.0", monkeypatch)
    policy, parallel = PrecisionConfig("bf16"), ParallelConfig(grad_sync=GradSync(deterministic=True))
    config = Config(model=ModelConfig(attention="auto"), precision=policy, parallel=parallel)
    kernel, why = attention_of(config, precision_of(policy), make_mesh())
    assert kernel == "xla" and (why or "").startswith("parallel.grad_sync.deterministic=true, and cuDNN's backward")
    with pytest.raises(UserError, match=r"^model\.attention: 'cudnn' is not possible: parallel\.grad_sync\..*auto"):
        assemble(Config(model=CUDNN, precision=policy, parallel=parallel), make_mesh())


def test_cudnn_where_it_cannot_be_is_refused() -> None:
    config = Config(model=CUDNN, precision=PrecisionConfig("bf16"), devices=DevicesConfig(platform="cpu"))
    for mesh in (make_mesh(), abstract_mesh(data=2)):
        with pytest.raises(UserError, match=r"model\.attention: 'cudnn' is not possible: .*no NVIDIA GPUs; allowed: a"):
            assemble(config, mesh)


def test_a_mesh_without_devices_stands_for_gpus_where_jax_can_trace_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_capability(Config(), make_mesh()) == cuda_capability(Config(), abstract_mesh()) == ""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "jax_cuda13_plugin" or find(name))
    assert cuda_capability(Config(), abstract_mesh()) == "8.0"
    assert cuda_capability(Config(devices=DevicesConfig(platform="cpu")), abstract_mesh()) == ""


def random(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_heads_and_groups_are_passed_as_cudnn_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call, with jax's own path in place of the kernel."""
    call, asked = jax.nn.dot_product_attention, []

    def stand_in(*args: Any, implementation: str, **options: Any) -> jax.Array:
        asked.append(implementation)
        return call(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v = random(2, 8, 2, 3, 8, seed=0), random(2, 8, 2, 8, seed=1), random(2, 8, 2, 8, seed=2)
    want = attention(q, k, v, jax.random.split(jax.random.key(0), 2), dropout=0.0)
    assert oracle.error(cudnn_attention(q, k, v), want) < 1e-6 and asked == ["cudnn"]


@pytest.mark.parametrize("length", [7, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["causal", "window", "both ways", "key mask", "documents"])
def test_odd_lengths_are_padded_and_what_is_added_is_not_seen(
    kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients; the call that cuDNN gets is refused by its own check where a length is odd."""
    call = jax.nn.dot_product_attention

    def stand_in(*args: Any, implementation: str, **options: Any) -> jax.Array:
        assert not any(each.shape[1] % 2 for each in args)
        mask = options["mask"]
        assert mask is None or not (mask.shape[2] % 2 or mask.shape[3] % 2)
        return call(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    seen = jnp.arange(length) < jnp.array([[length], [length - 3]])
    starts = jnp.where(jnp.arange(length) < 3, 0, 3)[None].repeat(2, 0)
    options: dict[str, Any] = {
        "causal": {},
        "window": {"window": 3},
        "both ways": {"causal": False},
        "key mask": {"causal": False, "seen_BT": seen},
        "documents": {"documents": PackedDocuments(starts)},
    }[kind]
    qkv = random(2, length, 2, 3, 8, seed=0), random(2, length, 2, 8, seed=1), random(2, length, 2, 8, seed=2)
    weights = random(2, length, 2, 3, 8, seed=3)
    keys = jax.random.split(jax.random.key(0), 2)
    run = lambda f: jax.value_and_grad(lambda qkv: (f(*qkv) * weights).sum(), has_aux=False)(qkv)  # noqa: E731
    want = run(lambda *qkv: attention(*qkv, keys, dropout=0.0, **options))
    got = run(lambda *qkv: cudnn_attention(*qkv, **options))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.error(a, b) < 1e-5


def test_a_vit_lowers_to_cudnn(cudnn: None) -> None:
    """It has an odd number of positions: the class token before 16 patches."""
    config = vit_options(layers=2, width=32, heads=4, image_size=16, patch_size=4, classes=4, attention="cudnn")
    model, tx, mesh = vit(config, max_length=0), optax.adamw(1e-3), make_mesh(fsdp=2)
    state = state_target(model, tx, mesh, strategy="zero3")
    step = make_train_step(model, tx, mesh, strategy="zero3", precision="bf16")
    batch = {
        "image": np.zeros((8, 16, 16, 3), np.uint8),
        "label": np.zeros(8, np.int32),
        "weights": np.ones(8, np.float32),
    }
    text = step.jitted(state).trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 2 and all("tensor<4x18x4x8xbf16>" in line for line in calls)


def kernels(model: ModelConfig, strategy: str, sizes: dict[str, int], **options: Any) -> Counter[str]:
    """How often each of cuDNN's kernels stands in the step as lowered for CUDA."""
    mesh, tx = make_mesh(**sizes), optax.adamw(1e-3)
    made, ids = gpt(model, max_length=8), np.zeros((8, 8), np.int32)
    state = state_target(made, tx, mesh, strategy=strategy)
    step = make_train_step(made, tx, mesh, strategy=strategy, precision="bf16", **options)
    batch = {"inputs": ids, "targets": ids, "weights": np.ones((8, 8), np.float32)}
    text = step.jitted(state).trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()
    assert "CustomSPMDPartitioning" not in text  # the manual region is nobody's to partition
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert all("bf16" in line for line in calls)
    assert f"tensor<{8 // sizes.get('data', 1) // sizes.get('fsdp', 1)}x8x{4 // sizes.get('tensor', 1)}x8xbf16>" in text
    return Counter(match[1] for line in calls if (match := re.search(r"@__cudnn\$(\w+)", line)))


ONCE, AGAIN = ({"fmhaSoftmax": n, "fmhaSoftmaxBackward": 1} for n in (1, 2))


@pytest.mark.parametrize(
    ("model", "strategy", "sizes", "options", "want"),
    [
        pytest.param(CUDNN, "ddp", {"data": 2}, {}, ONCE, marks=pytest.mark.slow),
        pytest.param(GROUPED, "zero3", {"data": 2, "fsdp": 2}, {}, ONCE, marks=pytest.mark.slow),
        (GROUPED, "ddp", {"tensor": 2}, {}, ONCE),
        pytest.param(CUDNN, "zero3", {"fsdp": 2, "tensor": 2}, {"remat": "full"}, AGAIN, marks=pytest.mark.slow),
        (CUDNN, "zero3", {"fsdp": 2}, {"remat": ("attention.context", "mlp.out")}, AGAIN),
    ],
    ids=["ddp", "zero3", "tensor", "remat", "names"],
)
def test_the_step_lowers_to_cudnn(
    model: ModelConfig, strategy: str, sizes: dict[str, int], options: dict[str, Any], want: dict[str, int], cudnn: None
) -> None:
    assert kernels(model, strategy, sizes, **options) == want


def test_flops_are_counted(cudnn: None) -> None:
    q, k = jnp.zeros((2, 8, 2, 3, 16), jnp.bfloat16), jnp.zeros((2, 8, 2, 16), jnp.bfloat16)
    one = 2 * 2 * 6 * 8 * 8 * 16  # a product of every head's queries and keys
    grads = jax.grad(lambda *qkv: cudnn_attention(*qkv).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    assert flops_of(jax.make_jaxpr(cudnn_attention)(q, k, k)) == 2 * one
    assert flops_of(jax.make_jaxpr(grads)(q, k, k)) == 7 * one
