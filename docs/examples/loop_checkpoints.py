"""Saving and resuming in a loop of your own, in another layout too: python docs/examples/loop_checkpoints.py"""

import tempfile
from pathlib import Path

import jax
from bare_loop import adamw, batch_of, loss, params

import jaxdist
from jaxdist.checkpoint import Checkpoints


def train(folder, until, mesh, strategy):
    step = jaxdist.make_train_step(loss, adamw, mesh, strategy=strategy)
    with Checkpoints(folder, keep=3) as checkpoints:  # writes in the background; waits at its end
        newest = checkpoints.newest_intact(print)
        if newest is None:
            state = jaxdist.init_state(params, adamw, mesh, strategy=strategy)
        else:
            target = jaxdist.state_target(params, adamw, mesh, strategy=strategy)
            state = checkpoints.restore(newest, target)
        first = int(state.step)
        for i in range(first, until):
            state, metrics = step(state, batch_of(i))
            if (i + 1) % 20 == 0:
                checkpoints.save(i + 1, state, {"note": "any JSON"})
    print(f"steps {first + 1} to {until}: loss {metrics['loss']:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), 40, jaxdist.make_mesh(fsdp=8), "zero3")
        train(Path(folder), 100, jaxdist.make_mesh(data=2, devices=jax.devices()[:2]), "ddp")
