"""Batches of tokens by jaxdist's loader and PyTorch's DataLoader, in turns: python scripts/bench/loader.py [--rows 32]

Both read random ids from memory and shuffle windows that do not overlap. A batch is inputs and targets, with jaxdist
weights too, as arrays of the device that jax has, or as tensors of the host. Milliseconds a batch, as a training loop
without other work waits for it: medians over rounds.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.data import Loader
from jaxdist.errors import CommandParser, reports_mistakes
from jaxdist.mesh import make_mesh
from jaxdist.specs import BATCH_SPEC


def jaxdist_batches(ids: np.ndarray, rows: int, length: int) -> Iterator[Any]:
    """Endless batches by jaxdist, each waited for."""
    sharding = NamedSharding(make_mesh(devices=jax.devices()[:1]), BATCH_SPEC)
    loader = Loader(ids, seq_len=length, global_batch=rows, sharding=sharding)
    return (jax.block_until_ready(loader.batch(i)) for i in itertools.count())


def pytorch_batches(ids: np.ndarray, rows: int, length: int, workers: int) -> Iterator[Any]:
    """Endless batches by PyTorch. workers: processes that make them; 0: this one does."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Windows(Dataset):
        """Inputs and targets of a window."""

        def __len__(self) -> int:
            return (ids.size - 1) // length

        def __getitem__(self, i: int) -> tuple[Any, Any]:
            window = torch.from_numpy(ids[i * length : (i + 1) * length + 1].astype(np.int64))
            return window[:-1], window[1:]

    loader = DataLoader(Windows(), batch_size=rows, shuffle=True, drop_last=True, num_workers=workers)
    return itertools.chain.from_iterable(loader for _ in itertools.count())


def contenders(ids: np.ndarray, rows: int, length: int) -> dict[str, Iterator[Any]]:
    """{name: batches}; without PyTorch jaxdist alone."""
    found = {"jaxdist": jaxdist_batches(ids, rows, length)}
    try:
        import torch
    except ImportError:
        return found
    named = {f"PyTorch {torch.__version__}, {n} workers": n for n in (0, 2)}
    return found | {name: pytorch_batches(ids, rows, length, n) for name, n in named.items()}


def race(found: dict[str, Iterator[Any]], *, rounds: int, burst: int) -> dict[str, list[float]]:
    """Milliseconds a batch of each, one number a round."""

    def milliseconds(work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(burst):
            work()
        return (time.perf_counter() - began) / burst * 1e3

    works = {name: (lambda batches=batches: next(batches)) for name, batches in found.items()}
    for work in works.values():
        milliseconds(work)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(milliseconds(work))
    return times


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 32, "length": 1024, "tokens": 10**7, "rounds": 20, "burst": 50}.items():
        parser.add_argument(f"--{name}", type=COUNT, default=default)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    ids = np.random.default_rng(0).integers(0, 50257, arguments.tokens).astype(np.uint16)
    found = contenders(ids, arguments.rows, arguments.length)
    times = race(found, rounds=arguments.rounds, burst=arguments.burst)
    first = statistics.median(times["jaxdist"])
    for name, each in times.items():
        median, spread = statistics.median(each), f"({min(each):.3f} to {max(each):.3f})"
        print(f"{name:<32} {median:7.3f} ms a batch {spread}  {median / first:5.2f} x jaxdist's")
    if arguments.json is not None:
        facts = {"rows": arguments.rows, "length": arguments.length, "cpus": os.cpu_count(), "jax": jax.__version__}
        arguments.json.write_text(json.dumps({**facts, "milliseconds": times}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
