"""The command `bench`: how fast the step of a configuration is, beside that of variants of it."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jaxdist.config.arguments import numeric, output_file
from jaxdist.config.load import load_config
from jaxdist.config.shipped import add_config, take_config, with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes
from jaxdist.runtime.join.environment import add_job_flags, take_job_flags

_EXAMPLES = (
    "jaxdist bench quickstart --steps 20",
    'jaxdist bench my.yaml --with parallel.strategy=zero2 --with "parallel.strategy=zero3 memory.remat=full"',
)


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist bench") -> int:
    """Exit status: 0; 2 for wrong arguments or a wrong configuration.

    >>> from jaxdist.cli.runs.bench import main
    >>> main(["quickstart", "--steps", "0"])
    2
    """
    parser = CommandParser(
        prog=prog,
        description="Time the train step of a configuration: milliseconds, tokens per second, MFU, memory, bytes sent."
        " Nothing is written but --json. Every variant is compiled, warmed up, and timed on one batch of its data.",
        **with_examples(_EXAMPLES),
    )
    add_config(parser)
    text = "a variant: settings on top of the others; give it as often as you like"
    parser.add_argument("--with", dest="variants", metavar="'section.key=value ...'", action="append", help=text)
    steps, text = numeric(int, at_least=2), "steps that count, of each; default: 20"
    parser.add_argument("--steps", type=steps, default=20, metavar="N", help=text)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="every step's seconds and the conditions")
    add_job_flags(parser)
    arguments = parser.parse_intermixed_args(argv)
    path, overrides = take_config(parser, arguments)
    take_job_flags(arguments, os.environ)
    variants = {name: load_config(path, [*overrides, *name.split()]) for name in ["", *(arguments.variants or ())]}
    devices = {name: config.devices for name, config in variants.items()}
    if other := next((name for name in variants if devices[name] != devices[""]), None):
        raise UserError(f"--with: {other!r} changes devices, which a process starts once; run bench twice")

    import jax

    from jaxdist.observe import measured_on
    from jaxdist.trainer.measures.bench import check_variants, time_step, timing_table

    check_variants([*variants.values()])
    timings = []
    for name, config in variants.items():
        label = name or Path(path).stem
        print(f"{label}: compiling, then {arguments.steps} steps ...", file=sys.stderr, flush=True)
        timings.append(time_step(label, config, arguments.steps))
    if jax.process_index() == 0:
        print("\n".join(timing_table(timings)))
        print(f"on {timings[0].devices} x {timings[0].device}, jax {jax.__version__}")
        if timings[0].device == "cpu" and timings[0].devices > 1:
            print("simulated devices share this machine's processor: their times say nothing about real ones")
        if arguments.json is not None:
            found = {"measured": measured_on(), "timings": [asdict(each) for each in timings]}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0
