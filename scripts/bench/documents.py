"""The price of keeping packed documents apart: a step with `data.documents=mask` beside one with `join`, on ONE device.

    python scripts/bench/documents.py [--steps 20] [--length 300] [--json OUT] [section.key=value ...]

Rows of random ids hold documents of random lengths. Both steps have the same ids, and run alternately in one process.
The figures are medians. Ratio = time with mask / time with join: 1.00 is no price.
"""

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config, MeshConfig
from jaxdist.errors import CommandParser, reports_mistakes
from jaxdist.observe import measured_on

WARM_UP = 2  # steps of each


def rows(config: Config, mean: int) -> dict[str, Any]:
    """A batch with the leaf `documents`, whose documents have `mean` tokens on average."""
    import numpy as np

    draw = np.random.default_rng(0)
    shape = config.data.global_batch, config.data.seq_len
    begins = draw.random(shape) < 1 / mean
    begins[:, 0] = True
    starts = np.maximum.accumulate(np.where(begins, np.arange(shape[1]), 0), axis=1)
    ids = draw.integers(0, config.model.vocab, (2, *shape), dtype=np.int32)
    return {
        "inputs": ids[0],
        "targets": ids[1],
        "weights": np.ones(shape, np.float32),
        "documents": starts.astype(np.int32),
    }


def measure(config: Config, steps: int, mean: int) -> dict[str, Any]:
    """Median seconds of each step."""
    import jax

    from jaxdist.build import assemble
    from jaxdist.init import init_state
    from jaxdist.mesh import make_mesh

    mesh = make_mesh()
    parts = assemble(config, mesh)
    batch = jax.tree.map(jax.numpy.asarray, rows(config, mean))
    batches = {"mask": batch, "join": {name: leaf for name, leaf in batch.items() if name != "documents"}}
    states = {name: init_state(parts.model, parts.optimizer, mesh, options=parts.options) for name in batches}
    taken: dict[str, list[float]] = {name: [] for name in batches}
    for i in range(-WARM_UP, steps):
        for name, given in batches.items():
            began = time.perf_counter()
            states[name], metrics = parts.step(states[name], given)
            jax.block_until_ready((states[name], metrics))
            taken[name] += [time.perf_counter() - began] if i >= 0 else []
    return {name: statistics.median(found) for name, found in taken.items()} | {"device": jax.devices()[0].device_kind}


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments."""
    parser = CommandParser(description="The price of data.documents=mask on one device.")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--steps", type=COUNT, default=20)
    parser.add_argument("--length", type=COUNT, default=300, metavar="TOKENS", help="of documents, on average")
    parser.add_argument("--json", type=output_file, metavar="OUT")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, [*arguments.overrides, "parallel.strategy=ddp"])
    config = replace(config, mesh=MeshConfig(), devices=replace(config.devices, simulated=1))
    from jaxdist.runtime.start import start

    found, config = [], start(config)
    for length in (128, 512, 1024, 2048):
        sized = replace(config, data=replace(config.data, seq_len=length, global_batch=max(1, 4096 // length)))
        result = {"seq_len": length, **measure(sized, arguments.steps, arguments.length)}
        found.append(result | {"ratio": result["mask"] / result["join"]})
        print(
            "seq_len {seq_len}: mask {mask:.4f} s, join {join:.4f} s, ratio {ratio:.3f}".format(**found[-1]), flush=True
        )
    if arguments.json:
        result = {**measured_on(), "overrides": arguments.overrides, "documents": arguments.length, "rows": found}
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
