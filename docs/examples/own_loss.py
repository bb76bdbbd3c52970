"""The modules of own_blocks.py as a loss of your own, gathered whole: python docs/examples/own_loss.py"""

import jax
from flax import nnx
from own_blocks import GPT, train

import jaxdist

jax.config.update("jax_num_cpu_devices", 8)


def run(model, batch, keys):
    h = model.embed(batch, keys)
    for block in model.blocks:
        h = block(h, keys)
    return model.head(h, batch, model.embed)


loss = jaxdist.nnx_loss(GPT(nnx.Rngs(0)), run)
for strategy in ("ddp", "zero3"):
    train(loss, loss, jaxdist.make_mesh(fsdp=8), strategy=strategy, remat="full")
