"""The model of own_blocks.py, its MLP split over two devices by two other lines: python docs/examples/own_tensor.py"""

import jax
from own_blocks import GPT, Block, train

import jaxdist
from jaxdist.nn import ColumnParallelLinear, RowParallelLinear


class SplitBlock(Block):
    def __init__(self, rngs, width):
        super().__init__(rngs, width)
        self.up = ColumnParallelLinear(rngs, width, (4 * width,), bias=True)
        self.down = RowParallelLinear(rngs, 4 * width, width, bias=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    model = jaxdist.model_def(lambda rngs: GPT(rngs, SplitBlock), tied=True)
    for sizes in ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}):
        print(sizes, end=" ")
        train(model, model, jaxdist.make_mesh(**sizes), strategy="zero3", remat="full")
