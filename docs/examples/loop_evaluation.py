"""An evaluation of your own, on sharded parameters: python docs/examples/loop_evaluation.py"""

import jax
from bare_loop import adamw, batch_of, loss, mesh, params
from jax.sharding import NamedSharding

import jaxdist

held_out = [batch_of(10_000 + i) for i in range(4)]


@jax.jit  # plain JAX on whole arrays: the compiler gathers what it needs. With dropout, call the model without it here
def sums(params, batch):
    total, weight, metrics = loss(params, batch, None)
    return {"loss": (total, weight), **metrics}


def evaluate(params):
    rows = NamedSharding(mesh, jaxdist.BATCH_SPEC)
    found = [sums(params, jax.device_put(batch, rows)) for batch in held_out]
    whole = jax.tree.map(lambda *each: sum(map(float, each)), *found)
    return {name: total / weight for name, (total, weight) in whole.items()}


if __name__ == "__main__":
    state = jaxdist.init_state(params, adamw, mesh, strategy="zero3")
    step = jaxdist.make_train_step(loss, adamw, mesh, strategy="zero3")
    for i in range(100):
        state, metrics = step(state, batch_of(i))
        if (i + 1) % 50 == 0:
            print(f"step {i + 1}:", {name: round(value, 3) for name, value in evaluate(state.params).items()})
