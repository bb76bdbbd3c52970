"""Two processes, or one without the launcher: jaxdist launch -n 2 -- python docs/examples/loop_processes.py FOLDER"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

import jaxdist
from jaxdist.checkpoint import Checkpoints
from jaxdist.runtime.join.environment import find_job
from jaxdist.runtime.join.join import join_job
from jaxdist.runtime.run_folder import leave_stop_note


def main(folder):
    from bare_loop import adamw, batch_of, loss, mesh, params  # asks for devices, which are those of the whole job

    def global_batch(i):
        rows = NamedSharding(mesh, jaxdist.BATCH_SPEC)
        own = {name: np.split(x, jax.process_count())[jax.process_index()] for name, x in batch_of(i).items()}
        return {name: jax.make_array_from_process_local_data(rows, x) for name, x in own.items()}

    # In every process the same parameters (here by the same random key), the same loss and the same optimizer.
    state = jaxdist.init_state(params, adamw, mesh, strategy="zero3")
    step = jaxdist.make_train_step(loss, adamw, mesh, strategy="zero3")
    with Checkpoints(folder, keep=3) as checkpoints:
        newest = checkpoints.newest_intact(print)
        if newest is not None:
            state = checkpoints.restore(newest, jaxdist.state_target(params, adamw, mesh, strategy="zero3"))
        for i in range(int(state.step), 100):
            state, metrics = step(state, global_batch(i))
            stop = jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(i)  # after SIGTERM
            if stop or (i + 1) % 50 == 0:
                checkpoints.save(i + 1, state, {})  # in every process: each writes its part, and waits for the others
                if jax.process_index() == 0:
                    print(f"step {i + 1}: {jax.process_count()} processes, {mesh.size} devices, {metrics['loss']:.3f}")
            if stop:
                leave_stop_note(os.environ)  # tells the launcher: stopped, not to be started again
                return 75  # the same command goes on
    return 0


if __name__ == "__main__":
    join_job(find_job(os.environ))  # before anything asks for devices; a process of no job goes on by itself
    sys.exit(main(Path(sys.argv[1])))
