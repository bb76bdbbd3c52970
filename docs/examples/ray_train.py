"""jaxdist.fit as the train function of Ray Train's JaxTrainer: python docs/examples/ray_train.py"""

import json
import sys
import tempfile
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

GPUS = False  # True on a cluster with GPUs
CPUS = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}


def train(config):  # in the process of each worker, where JaxTrainer has called jax.distributed.initialize
    import jax
    import numpy as np
    import optax

    import jaxdist

    rows = 64 // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)

    def batches():  # of each process its own rows of a batch of 64
        for step in range(config["steps"]):
            x = np.random.default_rng(step).normal(size=(64, 8)).astype(np.float32)[mine]
            yield {"x": x, "y": x[:, :4]}

    def loss(params, batch, keys):
        return ((batch["x"] @ params["w"] - batch["y"]) ** 2).sum(), batch["x"].shape[0]

    def fails_once(step, metrics):  # as a lost host would
        if step == config["fails_at"] and not Path(config["run_dir"], "failed").exists():
            Path(config["run_dir"], "failed").touch()
            raise RuntimeError("this worker fails")

    jaxdist.fit(
        loss,
        optax.sgd(0.1),
        batches,
        steps=config["steps"],
        params={"w": np.zeros((8, 4), np.float32)},
        strategy="zero3",
        run_dir=config["run_dir"],
        callbacks=[fails_once],
        settings={"checkpoint.every": 10},
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # in place of one that all hosts share
        JaxTrainer(
            train,
            train_loop_config={"steps": 30, "run_dir": f"{folder}/run", "fails_at": 15},
            jax_config=JaxConfig(use_gpu=True),  # on CPUs too: without it, jax.distributed.initialize is not called
            scaling_config=ScalingConfig(num_workers=2, use_gpu=GPUS),
            run_config=RunConfig(
                storage_path=folder,
                failure_config=FailureConfig(max_failures=2),  # the workers start again, and fit resumes
                worker_runtime_env={} if GPUS else {"env_vars": CPUS},
            ),
        ).fit()
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    print(f"{len(steps)} steps, the last is {steps[-1]}, loss {lines[-1]['loss']:.1e}")
    sys.exit(steps[-1] != 30)
