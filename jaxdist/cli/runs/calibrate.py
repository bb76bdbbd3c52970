"""The command `calibrate`: measure what a plan needs, on the devices of this job."""

import os
import sys
from collections.abc import Sequence

from jaxdist.config.arguments import numeric, output_file
from jaxdist.config.load import load_config
from jaxdist.config.shipped import add_config, take_config, with_examples
from jaxdist.errors import CommandParser, reports_mistakes
from jaxdist.runtime.join.environment import add_job_flags, take_job_flags
from jaxdist.runtime.output import quiet_job

_EXAMPLES = (
    "jaxdist calibrate quickstart --out calibration.json",
    "jaxdist launch -n 2 -- jaxdist calibrate my.yaml --link 10gbit --out calibration.json",
)


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist calibrate") -> int:
    """Exit status: 0; 2 for wrong arguments, a wrong configuration, or a rate that no link of that kind has."""
    parser = CommandParser(
        prog=prog,
        description="Measure the blocks of a model and the links of these devices, for jaxdist plan --calibration. All"
        " processes of a job run it, as they run jaxdist train.",
        **with_examples(_EXAMPLES),
    )
    add_config(parser)
    out = "calibration.json"
    parser.add_argument("--out", type=output_file, metavar="FILE", default=out, help=f"to write; default: {out}")
    parser.add_argument("--link", metavar="RATE", help="of the link between hosts, as 10gbit: more is refused")
    burst, text = numeric(int, at_least=0), "that a shaped link takes at once; default: 0"
    parser.add_argument("--burst", type=burst, default=0, metavar="BYTES", help=text)
    add_job_flags(parser)
    arguments = parser.parse_intermixed_args(argv)
    path, overrides = take_config(parser, arguments)
    take_job_flags(arguments, os.environ)
    config = load_config(path, overrides)
    with quiet_job(config.devices.platform):
        import jax

        from jaxdist.observe import measured_on
        from jaxdist.plan.calibration.file import write_calibration
        from jaxdist.plan.calibration.measure import calibrate
        from jaxdist.plan.machines import rate_of_link
        from jaxdist.runtime.start import start

        config = start(config)
        declared = None if arguments.link is None else rate_of_link(arguments.link, key="--link")

        def progress(text: str) -> None:
            if jax.process_index() == 0:
                print(text, file=sys.stderr, flush=True)

        found = calibrate(config, declared=declared, burst=arguments.burst, measured=measured_on(), progress=progress)
        if jax.process_index() == 0:
            write_calibration(found, arguments.out)
            print(calibration_text(found), f"written: {arguments.out}", sep="\n")
    return 0


def calibration_text(found: "object") -> str:
    """What was measured, in a few lines."""
    from jaxdist.plan.calibration.file import Calibration
    from jaxdist.plan.traced.sharding import aligned

    assert isinstance(found, Calibration)
    rows: list[tuple[object, ...]] = [("remat", "tensor", "rows", "ms a block", "ms the rest", "spread")]
    for each in found.compute:
        figures = (f"{1e3 * each.block:.3f}", f"{1e3 * each.ends:.3f}", f"{each.spread:.1%}")
        rows.append((each.remat, each.tensor, each.rows, *figures))
    lines = [
        f"{found.hosts} x {found.per_host} {found.device}, {found.conditions['seconds']} s",
        *aligned(rows, right=range(1, 6)),
    ]
    for name, link in (("inside a host", found.inside), ("between hosts", found.between)):
        if link is not None:
            lines.append(
                f"link {name}: {link.bytes_per_s / 1e6:,.4g} MB/s, {1e6 * link.latency_s:,.4g} us a round,"
                f" spread {link.spread:.1%}"
            )
    return "\n".join([*lines, f"two predictions that differ by less than {found.spread:.1%} are a tie"])
