"""What a device holds in a step of the same transformer, by the way in which it is given to jaxdist.

    python scripts/bench/own_model.py [--layers 16] [--width 128] [--json OUT]

The model of docs/examples/own_blocks.py on 8 devices (on CPUs simulated ones), as a loss of one's own and by
`model_def`, beside jaxdist's GPT of the same sizes. Compiled, not run: the state, and the temporary memory of the step.
"""

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from jaxdist.config.arguments import COUNT, output_file
from jaxdist.errors import CommandParser, reports_mistakes

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
ROWS, LENGTH, VOCAB = 32, 64, 256


def ways(layers: int, width: int) -> dict[str, tuple[Any, Any, dict[str, int], str]]:
    """{what: (source of the state, model or loss, mesh, strategy)}."""
    import jax
    from flax import nnx

    from jaxdist.config.schema import ModelConfig
    from jaxdist.models.gpt import gpt
    from jaxdist.nn import model_def

    sys.path.insert(0, str(EXAMPLES))
    blocks, tensor = (importlib.import_module(name) for name in ("own_blocks", "own_tensor"))

    def make(rngs: nnx.Rngs, block: Any = blocks.Block) -> Any:
        return blocks.GPT(rngs, block, layers=layers, width=width, vocab=VOCAB, length=LENGTH)

    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def loss(params: Any, batch: Any, keys: jax.Array) -> Any:
        model = nnx.merge(graph, params)
        h = model.embed(batch, keys)
        for block in model.blocks:
            h = block(h, keys)
        return model.head(h, batch, model.embed)

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param))

    stock = model_def(make, tied=True)
    split = model_def(lambda rngs: make(rngs, tensor.SplitBlock), tied=True)
    config = ModelConfig(layers=layers, width=width, heads=4, vocab=VOCAB)
    own = gpt(config, max_length=LENGTH)
    return {
        "a loss of your own, ddp": (init, loss, {"fsdp": 8}, "ddp"),
        "a loss of your own, zero3": (init, loss, {"fsdp": 8}, "zero3"),
        "the same modules by model_def, zero3": (stock, stock, {"fsdp": 8}, "zero3"),
        "its MLP split over tensor, zero3": (split, split, {"fsdp": 4, "tensor": 2}, "zero3"),
        "jaxdist's GPT, zero3": (own, own, {"fsdp": 8}, "zero3"),
    }


def measured(source: Any, model: Any, sizes: Any, strategy: str) -> dict[str, float]:
    """MiB of a device: state, temporary."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxdist.init import state_target
    from jaxdist.mesh import make_mesh
    from jaxdist.state import TrainState
    from jaxdist.step import make_train_step

    mesh, adamw = make_mesh(**sizes), optax.adamw(1e-3)
    state: TrainState = state_target(source, adamw, mesh, strategy=strategy)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), kind) for name, kind in kinds.items()}
    step = make_train_step(model, adamw, mesh, strategy=strategy, remat="full")
    memory = step.lower(state, batch).compile().memory_analysis()
    return {"state": memory.alias_size_in_bytes / 2**20, "temporary": memory.temp_size_in_bytes / 2**20}


@reports_mistakes
def main() -> int:
    """Exit status 0, or 2 for wrong arguments."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=COUNT, default=16)
    parser.add_argument("--width", type=COUNT, default=128)
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    import flax
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    kind, versions = jax.devices()[0].device_kind, f"jax {jax.__version__}, flax {flax.__version__}"
    print(f"8 {kind} devices on {machine}, {versions}; {arguments.layers} blocks of width {arguments.width}")
    found: dict[str, Any] = {"versions": versions, "devices": kind, "machine": machine}
    print("| MiB a device | mesh | state | temporary | together |\n|---|---|---|---|---|")
    for name, way in ways(arguments.layers, arguments.width).items():
        found[name] = each = measured(*way)
        mesh = " ".join(f"{axis}={size}" for axis, size in way[2].items())
        state, temporary = each.values()
        print(f"| {name} | {mesh} | {state:.1f} | {temporary:.1f} | {state + temporary:.1f} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
