"""Compile a configuration's train step for GPUs that are not there: will it fit, what does it send, what is hidden?

python scripts/plan.py --compile --gpu h200 --hosts 32 --gpus-per-host 8 --config FILE [section.key=value ...]
"""

import os
import sys
from pathlib import Path

from jaxdist.config.load import load_config
from jaxdist.errors import CommandParser, reports_mistakes


@reports_mistakes
def main() -> int:
    """Exit status: 0 it fits; 1 it does not; 2 the configuration is wrong, or something is not installed."""
    parser = CommandParser(description="The step of a configuration, compiled for GPUs that are not there.")
    parser.add_argument("--compile", action="store_true", required=True, help="what it does so far")
    parser.add_argument("--config", required=True, metavar="FILE")
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
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    plain = ["parallel.prefetch=0"] * arguments.by_compiler  # compiled as a step that does not
    config = load_config(arguments.config, [*arguments.overrides, *plain], planned=True)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the GPUs are described, none is started
    from jaxdist.cli.plan import run_plan

    if not arguments.by_compiler:
        return run_plan(config, arguments)
    sys.path.append(str(Path(__file__).parent / "bench"))
    from harness.partitioned import compile_partitioned

    return run_plan(config, arguments, compile_partitioned)


if __name__ == "__main__":
    sys.exit(main())
