"""PyTorch: `torch.compile`, scaled_dot_product_attention by the faster of flash and cuDNN, fused AdamW, autocast."""

import contextlib
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.task import BETAS, CLIP, DECAY, EPS, LR, Contender, Task

PyTree = Any
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Block(nn.Module):
    """Pre-norm, with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        rows, length, width = h.shape
        qkv = self.qkv(self.norm1(h)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return h + self.down(functional.gelu(self.up(self.norm2(h)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2, tied."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        model = task.model
        self.stream = torch.bfloat16 if task.precision == "bf16" else torch.float32
        self.tokens = nn.Embedding(model.vocab, model.width)
        self.positions = nn.Embedding(task.size.length, model.width)
        self.blocks = nn.ModuleList([Block(model.width, model.heads, model.norm_eps) for _ in range(model.layers)])
        self.norm = nn.LayerNorm(model.width, model.norm_eps)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        h = h.to(self.stream)  # autocast alone would leave the residual stream in fp32
        for block in self.blocks:
            h = block(h)
        logits = functional.linear(self.norm(h), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def weights(params: PyTree) -> dict[str, Any]:
    """jaxdist's weights by the names of `Model`; PyTorch's linear layers keep [out, in]."""
    found = {
        "tokens.weight": params["embed"]["tokens"]["table"],
        "positions.weight": params["embed"]["positions"]["table"],
        "norm.weight": params["head"]["norm"]["scale"],
        "norm.bias": params["head"]["norm"]["bias"],
    }
    blocks = params["blocks"]
    qkv, layers = blocks["attention"]["qkv"]["linear"], blocks["norm1"]["scale"].shape[0]
    for i in range(layers):
        for name in ("norm1", "norm2"):
            found[f"blocks.{i}.{name}.weight"] = blocks[name]["scale"][i]
            found[f"blocks.{i}.{name}.bias"] = blocks[name]["bias"][i]
        kernel = qkv["kernel"][i].swapaxes(1, 2)  # [D, heads, 3, K] -> [D, 3, heads, K]
        found[f"blocks.{i}.qkv.weight"] = kernel.reshape(kernel.shape[0], -1).T
        found[f"blocks.{i}.qkv.bias"] = qkv["bias"][i].swapaxes(0, 1).reshape(-1)
        for name, own in (("out", blocks["attention"]["out"]), *blocks["mlp"].items()):
            found[f"blocks.{i}.{name}.weight"] = own["kernel"][i].T
            found[f"blocks.{i}.{name}.bias"] = own["bias"][i]
    return {name: torch.tensor(value) for name, value in found.items()}


def faster_attention(task: Task, device: str) -> tuple[str, dict[str, float | str]]:
    """(the backend whose forward and backward pass is faster for this task's sizes, milliseconds of each)."""
    model = task.model
    found: dict[str, float | str] = {}
    shape = task.size.rows, task.size.length, 3, model.heads, model.width // model.heads
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                for i in range(13):
                    if i == 3:
                        torch.cuda.synchronize()
                        begun = time.perf_counter()
                    q, k, v = qkv.permute(2, 0, 3, 1, 4)
                    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
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
    run = torch.compile(model) if task.gpu else model
    batches = [
        {name: torch.tensor(ids, dtype=torch.int64, device=device) for name, ids in batch.items()}
        for batch in task.batches
    ]

    def step(i: int) -> tuple[Any, Any]:
        batch = batches[i % len(batches)]
        kernel = sdpa_kernel(BACKENDS[chosen]) if half else contextlib.nullcontext()
        cast = torch.autocast(device, torch.bfloat16, enabled=task.precision == "bf16")
        with kernel:
            with cast:
                loss = run(batch["inputs"], batch["targets"])
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        tx.step()
        tx.zero_grad(set_to_none=True)
        return loss.detach(), norm

    def wait() -> None:
        if task.gpu:
            torch.cuda.synchronize()

    def peak() -> int | None:
        return torch.cuda.max_memory_allocated() - before if task.gpu else None

    about = {"torch": torch.__version__, "attention": chosen, "attention_ms": probed, "compile": task.gpu}
    return Contender(step, wait, about, None, peak)
