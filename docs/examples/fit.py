"""jaxdist.fit with evaluation, a moving average and an early stop: python docs/examples/fit.py"""

import sys
import tempfile

from bare_loop import adamw, batch_of, loss, mesh, params

import jaxdist


def tell(step, metrics):  # one step late, so that no device waits for it
    if step % 100 == 0:
        print(f"told of step {step}: {metrics['loss']:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # in place of a folder that stays, and is resumed
        done = jaxdist.fit(
            loss,
            adamw,
            [batch_of(i) for i in range(50)],  # or a generator function, a DataLoader, a dataset
            steps=200,
            params=params,
            mesh=mesh,
            strategy="zero3",
            run_dir=folder,
            eval_data=[batch_of(10_000 + i) for i in range(4)],
            ema=0.98,
            patience=3,
            callbacks=[tell],
            settings={"train.eval_every": 25, "checkpoint.every": 50, "observe.log_every": 50},
        )
    print(f"accuracy {done.metrics['eval/accuracy']:.2f}", done.stopped or "complete")
    sys.exit(done.exit_status)
