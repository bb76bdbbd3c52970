"""The command `plan`: compile a train step for GPUs that are not there. Will it fit, what does it send?"""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist.config.load import load_config
from jaxdist.config.shipped import add_config, take_config, with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

_EXAMPLES = (
    "jaxdist plan --compile --gpu h200 llama_7b_h200",
    "jaxdist plan --compile --gpu h100 --hosts 32 my.yaml mesh.fsdp=256",
)


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist plan") -> int:
    """Exit status: 0 it fits; 1 it does not; 2 the configuration is wrong, or something is not installed."""
    parser = CommandParser(
        prog=prog,
        description="The step of a configuration, compiled for GPUs that are not there.",
        **with_examples(_EXAMPLES),
    )
    parser.add_argument("--compile", action="store_true", required=True, help="what it does so far")
    add_config(parser)
    parser.add_argument("--gpu", default="h200", help="a100-40, a100-80, h100, h200, b200, gb200")
    parser.add_argument("--hosts", type=int, help="default: as many as the mesh needs")
    parser.add_argument("--gpus-per-host", type=int, default=8)
    parser.add_argument("--network", type=float, metavar="GB/S", help="assumed of a GPU; default: by the GPU, see docs")
    parser.add_argument("--latency", type=float, default=0.0, metavar="US", help="assumed of a collective")
    parser.add_argument("--target-config", type=Path, metavar="FILE", help="XLA's description of the GPU")
    parser.add_argument("--by-compiler", action="store_true", help="compare: a plain step, XLA partitions it at O1")
    parser.add_argument("--rows", type=int, default=12, help="collectives printed of each loop; 0: all")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="the compiled program, as scheduled")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    arguments = parser.parse_intermixed_args(argv)
    path, overrides = take_config(parser, arguments)
    plain = ["parallel.prefetch=0"] * arguments.by_compiler  # compiled as a step that does not
    config = load_config(path, [*overrides, *plain], planned=True)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the GPUs are described, none is started
    from jaxdist.cli.work.plan import run_plan

    if not arguments.by_compiler:
        return run_plan(config, arguments)
    bench = Path(__file__).parents[2] / "scripts" / "bench"
    if not bench.is_dir():
        raise UserError("--by-compiler: the program it compares with is in scripts/bench; use it from a checkout")
    sys.path.append(str(bench))
    return run_plan(config, arguments, importlib.import_module("harness.partitioned").compile_partitioned)
