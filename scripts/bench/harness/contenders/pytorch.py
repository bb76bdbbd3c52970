"""PyTorch: `torch.compile`, scaled_dot_product_attention by the faster of flash and cuDNN, fused AdamW, autocast.

`pytorch_autotuned`, in a file of its own, is the same with `mode="max-autotune"`, which includes CUDA graphs.
"""

import contextlib
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.pytorch_models import Model, weights
from harness.task import BETAS, CLIP, DECAY, EPS, LR, Contender, Task

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def faster_attention(task: Task, device: str) -> tuple[str, dict[str, float | str]]:
    """(the backend whose forward and backward pass is faster for this task's sizes, milliseconds of each)."""
    model, found = task.model, dict[str, float | str]()
    kv_heads = model.kv_heads or model.heads
    shape = task.size.rows, model.heads + 2 * kv_heads, task.size.length, model.width // model.heads
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    shared = {"enable_gqa": True} if model.heads != kv_heads else {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                for i in range(13):
                    if i == 3:
                        torch.cuda.synchronize()
                        begun = time.perf_counter()
                    q, k, v = qkv.split((model.heads, kv_heads, kv_heads), 1)
                    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **shared)
                    out.backward(out.detach())
                torch.cuda.synchronize()
                found[name] = (time.perf_counter() - begun) / 10 * 1e3
        except RuntimeError as error:  # a backend that this build or these shapes lack is no contender; say why
            found[name] = str(error).splitlines()[0]
    times = {name: each for name, each in found.items() if isinstance(each, float)}
    assert times, f"neither flash nor cuDNN attention runs: {found}"
    return min(times, key=lambda name: times[name]), found


def pytorch(task: Task) -> Contender:
    """On the GPU by fused kernels; on a CPU the same code as it comes, for trying."""
    return compiled(task, mode=None)


def compiled(task: Task, *, mode: str | None) -> Contender:
    """mode: of `torch.compile`."""
    device = "cuda" if task.gpu else "cpu"
    if task.gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if task.gpu else 0
    torch.set_float32_matmul_precision("high" if task.precision == "bf16" else "highest")
    half = task.gpu and task.precision == "bf16"
    chosen, probed = faster_attention(task, device) if half else ("default", {})
    model = Model(task)
    model.load_state_dict(weights(task.params))
    model = model.to(device)
    tx = torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, DECAY, fused=True)
    run = torch.compile(model, mode=mode) if task.gpu else model
    batches = [
        {name: torch.tensor(ids, dtype=torch.int64, device=device) for name, ids in batch.items()}
        for batch in task.batches
    ]

    def step(i: int) -> tuple[Any, Any]:
        batch = batches[i % len(batches)]
        torch.compiler.cudagraph_mark_step_begin()
        kernel = sdpa_kernel(BACKENDS[chosen]) if half else contextlib.nullcontext()
        cast = torch.autocast(device, torch.bfloat16, enabled=task.precision == "bf16")
        with kernel:
            with cast:
                loss = run(batch["inputs"], batch["targets"])
            loss.backward()
        loss = loss.detach().clone()  # a graph writes its results into the same memory each time
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        tx.step()
        tx.zero_grad(set_to_none=True)
        return loss, norm

    def wait() -> None:
        if task.gpu:
            torch.cuda.synchronize()

    def peak() -> int | None:
        return torch.cuda.max_memory_allocated() - before if task.gpu else None

    about = {"torch": torch.__version__, "attention": chosen, "attention_ms": probed, "compile": task.gpu, "mode": mode}
    return Contender(step, wait, about, None, peak)
