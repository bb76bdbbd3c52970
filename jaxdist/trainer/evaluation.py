"""Evaluation during a run."""

import math
from typing import Any

import jax
import numpy as np

from jaxdist.data import BLOCK, Part, make_eval_loader
from jaxdist.mesh import on_cpu
from jaxdist.trainer.forward import make_eval_step
from jaxdist.trainer.run import Run, forward_parts


class Evaluator:
    """Mean loss over the same held-out windows or samples, every time; of a mixture, over those of each part."""

    def __init__(self, run: Run) -> None:
        config, whole = run.config, [Part("", BLOCK, run.source)]
        self._parts = [
            (
                part.name,
                part.samples / BLOCK,
                make_eval_loader(
                    part.source,
                    seq_len=config.data.seq_len,
                    global_batch=config.data.global_batch,
                    sharding=run.sharding,
                    batches=config.train.eval_batches,
                ),
            )
            for part in run.source.parts or whole
        ]
        self._step = make_eval_step(*forward_parts(run))
        self._crumbs = run.watch.crumbs
        self._unit, self._on_cpu = run.source.info["unit"], on_cpu(run.mesh)

    def __call__(self, params: Any) -> dict[str, float]:
        """{"eval/loss": nats a token, for bytes "eval/bits_per_byte", of a mixture "eval/loss/NAME" for each part}.
        The loss of a mixture is the mean of its parts' by their shares."""
        self._crumbs.enter("evaluation")
        mean, named = 0.0, dict[str, float]()
        for name, share, loader in self._parts:
            sums: list[Any] = []
            for i in range(loader.batches or 0):
                sums.append(self._step(params, loader.batch(i)))
                if self._on_cpu:  # as in `TrainStep`: two under way
                    jax.block_until_ready(sums[-2:][0])
            loss, weight = np.asarray(jax.device_get(sums), np.float64).sum(axis=0).tolist()
            mean += share * loss / weight
            named |= {f"eval/loss/{name}": loss / weight} if name else {}
        bits = {"eval/bits_per_byte": mean / math.log(2)} if self._unit == "bytes" else {}
        return {"eval/loss": mean, **bits, **named}
