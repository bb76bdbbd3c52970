"""A profile of three steps, for XProf or Perfetto: python docs/examples/loop_profile.py"""

import tempfile
from pathlib import Path

import jax
from bare_loop import adamw, batch_of, loss, mesh, params

import jaxdist

if __name__ == "__main__":
    state = jaxdist.init_state(params, adamw, mesh, strategy="zero3")
    step = jaxdist.make_train_step(loss, adamw, mesh, strategy="zero3")
    state, metrics = step(state, batch_of(0))  # compiles, outside of the profile
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for i in range(1, 4):
                with jax.profiler.StepTraceAnnotation("train", step_num=i):
                    state, metrics = step(state, batch_of(i))
            jax.block_until_ready(state)  # or the last steps are not in it
        print("written:", *sorted({path.suffix for path in Path(folder).rglob("*") if path.is_file()}))
