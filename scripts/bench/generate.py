"""Tokens per second with a key/value cache and without: python scripts/bench/generate.py [--prompt 128] [--new 128]

Generates from a GPT with random parameters, greedily: both ways give the same tokens, which is checked. The first call
compiles and is not counted. Run it on a machine that does nothing else.
"""

import sys
import time
from typing import Any

import jax
import numpy as np

from jaxdist import Config, UserError
from jaxdist.config.arguments import COUNT
from jaxdist.errors import CommandParser, reports_mistakes
from jaxdist.generation.loop import Generator
from jaxdist.generation.sampling import Sampling, row_keys
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.specs import map_specs, without_idle


def measured(generator: Generator, params: Any, prompts: list[list[int]], new: int) -> tuple[np.ndarray, float]:
    """(The tokens, seconds of the fastest of three calls after the first)."""
    seconds, keys = [], row_keys(0, range(len(prompts)))
    for _ in range(4):
        begun = time.perf_counter()
        tokens = np.concatenate(list(generator(params, prompts, keys, new)), axis=1)
        seconds.append(time.perf_counter() - begun)
    return tokens, min(seconds[1:])


@reports_mistakes
def main(argv: list[str]) -> int:
    """Exit status: 0, or 2 for numbers that do not fit."""
    parser = CommandParser(prog="generate.py", description="Tokens per second with a key/value cache and without.")
    for name, usual in (("layers", 4), ("width", 256), ("heads", 8), ("prompt", 128), ("new", 128), ("batch", 1)):
        parser.add_argument(f"--{name}", type=COUNT, default=usual)
    given = parser.parse_args(argv)
    if given.width % given.heads:
        raise UserError(f"--heads: {given.heads}; allowed: divisors of --width, {given.width}")
    sizes = {"layers": given.layers, "width": given.width, "heads": given.heads, "vocab": 256}
    length = given.prompt + given.new
    model, mesh = gpt(Config().model.replace(**sizes), max_length=length), make_mesh(devices=jax.devices()[:1])
    params, specs = (
        jax.jit(model.init)(jax.random.key(0)),
        map_specs(lambda spec: without_idle(spec, mesh), model.specs),
    )
    prompts = np.random.default_rng(0).integers(0, 256, (given.batch, given.prompt)).tolist()
    print(f"{model.parameters:,} parameters, {given.batch} prompts of {given.prompt} tokens, {given.new} new ones")
    speeds, tokens = [], []
    for cache in (True, False):
        made = Generator(model, mesh, specs, get_strategy(StepOptions()), Sampling(0.0), cache=cache, chunk=given.new)
        found, seconds = measured(made, params, prompts, given.new)
        tokens.append(found)
        speeds.append(found.size / seconds)
        print(f"{'with' if cache else 'without'} a cache: {speeds[-1]:,.0f} tokens/s")
    same = np.array_equal(tokens[0], tokens[1])
    print(f"{speeds[0] / speeds[1]:.1f} times as fast; the tokens are {'the same' if same else 'not the same'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
