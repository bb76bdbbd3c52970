"""What every contender of a benchmark is given, and what it gives back: the same model, weights, batches, optimizer.

The model is GPT-2's (Radford et al. 2019): learned positions, LayerNorm, GELU (tanh), tied embeddings, biases, no
dropout. Or it is a Llama's (Touvron et al. 2023): rotary positions, RMSNorm, SwiGLU, grouped-query heads, a head of its
own, no biases. The optimizer is AdamW (Loshchilov and Hutter 2019) with its numbers below, after clipping the whole
gradient to norm 1. Parameters and optimizer state are fp32; products are bf16 under "bf16".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config.schema import ModelConfig
from jaxdist.errors import UserError
from jaxdist.models.gpt import gpt
from jaxdist.nn import ModelDef

PyTree = Any
LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
BATCHES = 4  # made before the race; a step takes them in turn


class Size(NamedTuple):
    """A model and a batch: rows sequences of `length` tokens a step."""

    model: ModelConfig
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.rows * self.length


def _size(layers: int, width: int, heads: int, rows: int, length: int, vocab: int = 50304) -> Size:
    return Size(ModelConfig(layers=layers, width=width, heads=heads, vocab=vocab), rows, length)


def _llama(layers: int, width: int, heads: int, kv_heads: int, mlp: int, rows: int, length: int, vocab: int) -> Size:
    model = ModelConfig(style="llama", layers=layers, width=width, heads=heads, vocab=vocab)
    return Size(model.replace(kv_heads=kv_heads, mlp_width=mlp, tied=False), rows, length)


# 50304: GPT-2's 50,257 tokens, filled up to a multiple of 128, as nanoGPT does.
SIZES = {
    "toy": _size(2, 64, 2, 4, 64, 256),
    "small": _size(6, 256, 8, 16, 128, 512),
    "gloo": _size(4, 256, 8, 16, 128, 512),
    "links": _size(4, 256, 8, 12, 64, 512),
    "124m": _size(12, 768, 12, 32, 1024),
    "350m": _size(24, 1024, 16, 32, 1024),
    "1.3b": _size(24, 2048, 16, 8, 2048),
    "toy_llama": _llama(2, 64, 4, 2, 160, 4, 64, 256),
    "llama": _llama(16, 2048, 16, 8, 5504, 8, 2048, 32000),
}


class Task(NamedTuple):
    """params: initial weights, fp32, on the host, as jaxdist names them. batches: dicts of inputs and targets, int32
    [rows, length]. gpu: what to run on. precision: fp32 or bf16."""

    size: Size
    model: ModelConfig
    params: PyTree
    batches: list[dict[str, np.ndarray]]
    gpu: bool
    precision: str

    @property
    def compute(self) -> Any:
        """The dtype of matrix products."""
        return jnp.bfloat16 if self.precision == "bf16" else jnp.float32


class Contender(NamedTuple):
    """step: runs on the i-th batch, without waiting; gives (loss, norm of the gradient) still to be computed. wait: for
    all that was begun. about: what it consists of. predicted: bytes on the device while it runs, by its compiler, or
    None. peak: bytes at most allocated since it was made, or None where nobody counts."""

    step: Callable[[int], tuple[Any, Any]]
    wait: Callable[[], None]
    about: dict[str, Any]
    predicted: int | None = None
    peak: Callable[[], int | None] = lambda: None


class OtherModelError(Exception):
    """A contender is not written for the model of this size."""


def get_size(name: str) -> Size:
    """By its name. Raises `UserError` for one that is not there."""
    if name not in SIZES:
        raise UserError(f"--sizes: {name!r} is not known; allowed: {', '.join(SIZES)}")
    return SIZES[name]


def model_of(size: Size) -> ModelDef:
    """jaxdist's model, which the weights come from."""
    return gpt(size.model, max_length=size.length)


def make_task(size: Size, *, gpu: bool, precision: str, seed: int = 0) -> Task:
    """Weights and batches from a seed. The ids follow one another by a rule, with noise, so that there is something to
    learn: equal losses then say that attention and targets are the same, not only the vocabulary."""
    params = jax.tree.map(np.asarray, jax.jit(model_of(size).init)(jax.random.key(seed)))
    rng, vocab = np.random.default_rng(seed), size.model.vocab
    batches = []
    for _ in range(BATCHES):
        ids = np.empty((size.rows, size.length + 1), np.int32)
        ids[:, 0] = rng.integers(0, vocab, size.rows)
        for i in range(size.length):
            ids[:, i + 1] = (5 * ids[:, i] + 17 + rng.integers(0, 4, size.rows)) % vocab
        batches.append({"inputs": ids[:, :-1], "targets": ids[:, 1:]})
    return Task(size, size.model.resolved(), params, batches, gpu, precision)


def set_products(precision: str) -> str:
    """Have jax multiply fp32 as fp32 in this process if that is measured: on GPUs it takes TF32 by itself, and PyTorch
    does not. Returns the setting."""
    if precision == "fp32":
        jax.config.update("jax_default_matmul_precision", "highest")
    return str(jax.config.values["jax_default_matmul_precision"] or "default")


def parameters(size: Size) -> int:
    """Of the model, all of them."""
    return model_of(size).parameters


def flops_per_token(size: Size) -> float:
    """6 N + 12 L d S: N all parameters, L blocks, d the width, S tokens of a sequence (Chowdhery et al. 2022, appendix
    B). The masked half of attention counts, as is usual; what is computed again does not."""
    return 6 * parameters(size) + 12 * size.model.layers * size.model.width * size.length


def compiled_bytes(compiled: Any) -> int | None:
    """Bytes on the device while a compiled program runs: arguments, results that are no arguments, temporaries."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    own = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + own + found.temp_size_in_bytes + found.generated_code_size_in_bytes)


def jax_peak(before: tuple[int, int]) -> Callable[[], int | None]:
    """Since `before`, of `jax_memory`: the bytes that were added at the peak. None where the process has seen a higher
    one before, or does not count: the peak of a process is never forgotten."""

    def peak() -> int | None:
        in_use, highest = before
        now = jax_memory()[1]
        return now - in_use if now > highest else None

    return peak


def jax_memory() -> tuple[int, int]:
    """(bytes in use, most bytes ever in use) of the first device; zeros where nobody counts."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_in_use", 0), stats.get("peak_bytes_in_use", 0)
