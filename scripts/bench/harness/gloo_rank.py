"""One process of a contender of scripts/bench/gloo.py: it trains when it is told to, and says how long that took.

    python gloo_rank.py CONTENDER SIZE RANK PROCESSES HOST:PORT

It reads numbers of steps, a line each, and answers each with {"seconds", "loss"} once all of them are done; seconds are
those of a step. CONTENDER: jaxdist-ddp, jaxdist-zero3, torch-ddp, torch-fsdp2, and the last two with -compiled behind;
jaxdist-ddp-ALGORITHM[-WIRE][-SIZEmb], as -ring, -ring-int8 and -ring-2mb (parallel.grad_sync).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Step = Callable[[int], Any]  # runs on the i-th batch, and gives the loss: a number, or an array to be computed


def jaxdist(kind: str, size: Any, rank: int, processes: int, address: str) -> Step:
    """kind: a strategy, and how it sums gradients. The loss is the mean over all processes."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, rank)
    import numpy as np
    import optax
    from jax.sharding import NamedSharding

    from harness.task import BETAS, CLIP, DECAY, EPS, LR, make_task
    from jaxdist.config.rules.grad_sync import WIRE_DTYPES
    from jaxdist.config.schema import ParallelConfig
    from jaxdist.config.sections.grad_sync import GradSync
    from jaxdist.init import state_target
    from jaxdist.mesh import make_mesh
    from jaxdist.models.gpt import gpt
    from jaxdist.nn.matmul.plain import one_core
    from jaxdist.specs import BATCH_SPEC
    from jaxdist.state import place_params
    from jaxdist.step import make_train_step

    one_core.set_global(True)  # as of a run in a job
    task = make_task(size, gpu=False, precision="fp32")
    strategy, *names = kind.split("-")
    mesh = make_mesh(data=processes) if strategy == "ddp" else make_mesh(fsdp=processes)
    wires = [name for name in names if name in WIRE_DTYPES]
    buckets = [float(name.removesuffix("mb")) for name in names if name.endswith("mb")]
    sync = GradSync((*names, "native")[0], (*buckets, GradSync().bucket_mb)[0], (*wires, None)[0])
    model = gpt(size.model.replace(loss_chunk=0, scan_blocks=0), max_length=size.length)
    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LR, *BETAS, eps=EPS, weight_decay=DECAY))
    least = ParallelConfig().min_shard_bytes
    options: Any = {"strategy": strategy, "min_shard_bytes": least, "grad_sync": sync}
    target = state_target(model, tx, mesh, **options)
    run = make_train_step(model, tx, mesh, **options)
    whole = NamedSharding(mesh, BATCH_SPEC)

    def placed(batch: dict[str, Any]) -> Any:
        batch = {**batch, "weights": np.ones(batch["inputs"].shape, np.float32)}
        return {name: jax.make_array_from_callback(x.shape, whole, x.__getitem__) for name, x in batch.items()}

    batches = [placed(batch) for batch in task.batches]
    state: Any = place_params(task.params, tx, target)

    def step(i: int) -> Any:
        nonlocal state
        state, metrics = run(state, batches[i % len(batches)])
        return metrics["loss"]

    return step


def torch(kind: str, size: Any, rank: int, processes: int, address: str) -> Step:
    """kind: ddp or fsdp2, with -compiled for `torch.compile`. The first loss is the mean over all processes, later ones
    are this process's."""
    import torch
    from torch import distributed, nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from harness.pytorch_models import Model, weights
    from harness.task import BETAS, CLIP, DECAY, EPS, LR, make_task

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://{address}", world_size=processes, rank=rank)
    task = make_task(size, gpu=False, precision="fp32")
    model: Any = Model(task)
    model.load_state_dict(weights(task.params))
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = distributed.init_device_mesh("cpu", (processes,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    tx = torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, DECAY, fused=True)
    run = torch.compile(model) if kind.endswith("compiled") else model
    rows = size.rows // processes
    own = slice(rank * rows, (rank + 1) * rows)
    batches = [
        {name: torch.tensor(ids[own], dtype=torch.int64) for name, ids in batch.items()} for batch in task.batches
    ]

    def step(i: int) -> Any:
        batch = batches[i % len(batches)]
        loss = run(batch["inputs"], batch["targets"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        tx.step()
        tx.zero_grad(set_to_none=True)
        loss = loss.detach()
        if i == 0:  # later steps do not pay for the comparison
            distributed.all_reduce(loss)
            loss /= processes
        return loss

    return step


def main() -> None:
    """The process: until there is nothing more to read."""
    contender, name, *numbers, address = sys.argv[1:]
    rank, processes = map(int, numbers)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # one core each, where there are as many
    from harness.task import get_size
    from jaxdist.runtime.cpu_process import avoid_interruptions, keep_freed_memory

    avoid_interruptions()  # as in jaxdist's runs, and for PyTorch, too
    keep_freed_memory(os.environ)

    make = {"jaxdist": jaxdist, "torch": torch}[contender.partition("-")[0]]
    step, done = make(contender.partition("-")[2], get_size(name), rank, processes, address), 0
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            loss, done = step(done), done + 1
        value = float(loss)  # waits for all steps
        print(json.dumps({"seconds": (time.perf_counter() - begun) / int(line), "loss": value}), flush=True)


if __name__ == "__main__":
    main()
