"""The modules of own_blocks.py as a loss of your own, gathered whole: python docs/examples/own_loss.py"""

import jax
from flax import nnx
from own_blocks import GPT, train

import jaxdist

jax.config.update("jax_num_cpu_devices", 8)
graph, params = nnx.split(GPT(nnx.Rngs(0)), nnx.Param)


def loss(params, batch, keys):
    model = nnx.merge(graph, params, copy=True)
    h = model.embed(batch, keys)
    for block in model.blocks:
        h = block(h, keys)
    return model.head(h, batch, model.embed)


for strategy in ("ddp", "zero3"):
    train(nnx.to_pure_dict(params), loss, jaxdist.make_mesh(fsdp=8), strategy=strategy, remat="full")
