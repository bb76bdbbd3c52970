"""A moving average of the parameters, sharded like them: python docs/examples/loop_ema.py"""

from functools import partial

import jax
from bare_loop import adamw, batch_of, loss, mesh, params

import jaxdist


@partial(jax.jit, donate_argnums=0)
def averaged(ema, params, decay=0.98):
    return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)


if __name__ == "__main__":
    state = jaxdist.init_state(params, adamw, mesh, strategy="zero3")
    step = jaxdist.make_train_step(loss, adamw, mesh, strategy="zero3")
    ema = jax.tree.map(lambda leaf: leaf + 0, state.params)  # a copy: the step uses up the state that it is given
    for i in range(100):
        state, metrics = step(state, batch_of(i))
        ema = averaged(ema, state.params)
    print(f"average of the parameters, {ema['down'].sharding.spec}, norm {(ema['down'] ** 2).sum() ** 0.5:.3f}")
