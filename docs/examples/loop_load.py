"""The parameters of a checkpoint alone, for inference: python docs/examples/loop_load.py"""

import tempfile
from pathlib import Path

import jax
import optax
from bare_loop import adamw, batch_of, loss, mesh, params

import jaxdist
from jaxdist.checkpoint import Checkpoints


def load(where, source, mesh, strategy="ddp"):
    """source: what init_state was given; a function key -> parameters is asked for shapes only."""
    target = jaxdist.state_target(source, optax.identity(), mesh, strategy=strategy)  # identity: no optimizer state
    with jaxdist.open_pretrained(where) as found:  # ema=True: the moving average of fit, or of with_ema
        return found.load(target)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        state = jaxdist.init_state(params, adamw, mesh, strategy="zero3")
        step = jaxdist.make_train_step(loss, adamw, mesh, strategy="zero3")
        state, metrics = step(state, batch_of(0))
        with Checkpoints(Path(folder), keep=3) as checkpoints:
            checkpoints.save(1, state, {})
        trained = load(folder, params, jaxdist.make_mesh(devices=jax.devices()[:1]))  # or the run_dir of fit or train
    total, weight, _ = loss(trained, batch_of(10_000), None)
    print(f"loaded: loss {total / weight:.3f} on one device")
