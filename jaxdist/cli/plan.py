"""The command `plan`: choose a layout for a cluster, or compile a step for GPUs that are not there."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from jaxdist.config.arguments import COUNT, numeric, output_file, output_folder
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config, MeshConfig
from jaxdist.config.shipped import add_config, take_config, with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

_ONE_DEVICE = (  # a mesh that goes with any batch
    *(f"mesh.{axis.name}=1" for axis in fields(MeshConfig)),
    "parallel.microbatches=1",
    "parallel.chunks=1",
    "parallel.stages=[]",
)
_CHOOSING = ("link", "inside", "calibration", "explain", "out", "check", "quick", "finalists")  # not with --compile
_COMPILING = ("network", "latency", "target_config", "by_compiler", "rows", "hlo")  # only with it
_OF_A_TABLE = ("gpu", "hosts", "gpus_per_host", "link", "inside")  # not with --calibration
_EXAMPLES = (
    "jaxdist plan llama_7b_h200 --gpu h200 --hosts 4 --link 100gbit --out plan",
    "jaxdist plan --compile --gpu h200 llama_7b_h200",
)


def _refuse_given(parser: CommandParser, arguments: argparse.Namespace, names: Sequence[str], where: str) -> None:
    """Raise `UserError` for one of these options that is given. where: it has no effect, and what to do."""
    for name in names:
        if getattr(arguments, name) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')}: has no effect {where}")


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist plan") -> int:
    """Exit status: 0; with --compile 1 if it does not fit; 2 the configuration is wrong, nothing fits, or something is
    not installed."""
    parser = CommandParser(
        prog=prog,
        description="The layout of a configuration that trains fastest on a cluster, with reasons; or, with --compile,"
        " its step as it is, compiled for GPUs that are not there.",
        **with_examples(_EXAMPLES),
    )
    add_config(parser)
    parser.add_argument("--gpu", default="h200", help="a100-40, a100-80, h100, h200, b200, gb200; default: h200")
    count, text = numeric(int, at_least=1, at_most=1_000_000), "default: 1; with --compile as many as the mesh needs"
    parser.add_argument("--hosts", type=count, metavar="N", help=text)
    parser.add_argument("--gpus-per-host", type=count, default=8, metavar="N", help="default: 8")
    _add_choice(parser)
    _add_compiling(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="everything, for programs")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.compile:
        _refuse_given(parser, arguments, _CHOOSING, "with --compile; leave one of the two out")
    else:
        _refuse_given(parser, arguments, _COMPILING, "without --compile; add it")
    if arguments.calibration is not None:
        _refuse_given(
            parser, arguments, _OF_A_TABLE, "with --calibration, whose devices count; leave one of the two out"
        )
    if arguments.check is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        from jaxdist.cli.work.choose import run_check

        return run_check(arguments, given=argv)
    path, overrides = take_config(parser, arguments)
    given = [*overrides, *(["parallel.prefetch=0"] * arguments.by_compiler)]  # compiled as a step that does not
    if arguments.compile:
        config = load_config(path, given, planned=True)
    else:
        config, given = _whatever_the_mesh(path, given)
    if arguments.calibration is None:  # what memory.remat auto is there
        there = load_config(path, ["devices.platform=gpu", *given], planned=True)
        config = replace(config, memory=there.memory)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the GPUs are described, none is started
    if arguments.compile:
        return _compile(config, arguments)
    from jaxdist.cli.work.choose import run_choose

    return run_choose(config, arguments)


def _whatever_the_mesh(path: str, overrides: list[str]) -> tuple[Config, list[str]]:
    """(the configuration, the overrides that it was loaded with). Its mesh is replaced anyway, and may be one that does
    not go with the batch: these overrides then leave it out."""
    # The last is for a schedule of several stages.
    tried = [[], [*_ONE_DEVICE], [*_ONE_DEVICE, "parallel.schedule=accumulate"]]
    refused = list[UserError]()
    for more in tried:
        try:
            config = load_config(path, [*overrides, *more], planned=True)
        except UserError as error:
            refused.append(error)
            continue
        if refused:
            print(f"the configured mesh is left out, which the plan replaces: {refused[0]}", file=sys.stderr)
        return config, [*overrides, *more]
    raise refused[-1]  # what is wrong with any mesh


def _add_choice(parser: CommandParser) -> None:
    group = parser.add_argument_group("choosing a layout")
    add = group.add_argument
    add(
        "--link",
        metavar="RATE",
        help="between hosts, of a host: 100gbit, or a name of jaxdist cost; default: 400 Gbit/s a GPU",
    )
    add("--inside", metavar="RATE", help="between the GPUs of a host: pcie3, pcie4, a rate; default: NVLink")
    add("--calibration", type=Path, metavar="FILE", help="rates that jaxdist calibrate measured, in place of the table")
    add(
        "--explain",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="say why this layout is not the choice, as mesh.fsdp=8; repeat it for other keys",
    )
    add("--out", type=output_folder, metavar="DIR", help="write plan.json, plan.yaml, which trains, and plan.svg")
    add("--check", type=Path, metavar="RUN", help="what was predicted for a run, beside what it measured")
    add("--quick", action="store_true", help="estimate only: nothing is traced or compiled")
    add("--finalists", type=COUNT, default=3, metavar="N", help="how many are compiled; default: 3")


def _add_compiling(parser: CommandParser) -> None:
    group = parser.add_argument_group("with --compile")
    add = group.add_argument
    add("--compile", action="store_true", help="compile the step as it is configured")
    add(
        "--network",
        type=numeric(float, above=0),
        metavar="GB/S",
        help="assumed of a GPU; default: by the GPU, see docs",
    )
    text = "assumed of a collective; default: 0, and 12 in realistic rates"
    add("--latency", type=numeric(float, at_least=0), metavar="US", help=text)
    add("--target-config", type=Path, metavar="FILE", help="XLA's description of the GPU")
    add("--by-compiler", action="store_true", help="compare: a plain step, XLA partitions it at O1")
    text = "collectives of each loop, and source lines, that are printed; 0: all; default: 12"
    add("--rows", type=numeric(int, at_least=0), default=12, metavar="N", help=text)
    add("--hlo", type=output_file, metavar="FILE", help="the compiled program, as scheduled")


def _compile(config: Config, arguments: argparse.Namespace) -> int:
    from jaxdist.cli.work.plan import run_plan

    if not arguments.by_compiler:
        return run_plan(config, arguments)
    bench = Path(__file__).parents[2] / "scripts" / "bench"
    if not bench.is_dir():
        raise UserError("--by-compiler: the program it compares with is in scripts/bench; use it from a checkout")
    sys.path.append(str(bench))
    return run_plan(config, arguments, importlib.import_module("harness.partitioned").compile_partitioned)
