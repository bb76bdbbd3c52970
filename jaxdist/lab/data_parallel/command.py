"""The command `jaxdist lab data-parallel`: who sends, receives and holds how much, beside `ddp`."""

import json
from dataclasses import replace
from typing import Any

from jaxdist.config.arguments import numeric, output_file
from jaxdist.config.schema import DevicesConfig
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

MODEL_NAMES = ("gpt", "resnet101")
MOST_DEVICES = 64
_EXAMPLES = ("jaxdist lab data-parallel --devices 4", "jaxdist lab data-parallel --balanced --model resnet101")


def data_parallel_parser(prog: str) -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog=prog,
        description="Run a step of PyTorch's DataParallel, or of its balanced form, written in JAX: one program that"
        " drives all devices. Print the bytes that each device sends and receives, its memory, and where the time goes,"
        " beside ddp on the same batch; and the same for a model of full size, by closed forms.",
        **with_examples(_EXAMPLES),
    )
    add = parser.add_argument
    add("--balanced", action="store_true", help="scatter the labels, too: every device computes loss and gradients")
    devices = numeric(int, at_least=2, at_most=MOST_DEVICES)
    add("--devices", type=devices, default=4, metavar="P", help="default: 4, simulated where there are no GPUs")
    add("--model", default="gpt", choices=MODEL_NAMES, help="default: gpt, with a large vocabulary")
    add("--full", action="store_true", help="run the model of full size; it needs GPUs, or hours")
    add("--json", type=output_file, metavar="FILE", help="all figures")
    return parser


@reports_mistakes
def run_data_parallel(arguments: list[str], prog: str) -> int:
    """Exit status: 0 done; 1 if bytes differ from the closed forms; 2 for wrong arguments."""
    options = data_parallel_parser(prog).parse_args(arguments)
    from jaxdist.runtime.start import choose_platform, count_devices

    devices = replace(DevicesConfig(), simulated=options.devices)
    choose_platform(devices)
    if (count := count_devices(devices)) < options.devices:
        raise UserError(f"--devices: {options.devices}, and there are {count}; allowed: 2 to so many")
    import jax

    return _run(options, jax.devices()[: options.devices])


def _run(options: Any, devices: list[Any]) -> int:
    import jax

    from jaxdist.lab.data_parallel.cases import make_case
    from jaxdist.lab.data_parallel.measure import measure, measure_ddp
    from jaxdist.lab.data_parallel.text import closed_form_lines, lines_of
    from jaxdist.observe import measured_on

    case = make_case(options.model, full=options.full)
    name = "balanced DataParallel" if options.balanced else "DataParallel"
    kind = devices[0].device_kind
    print(f"{name}: {case.about}\n{len(devices)} x {kind}, jax {jax.__version__}, AdamW\n", flush=True)
    found, ddp = measure(case, devices, balanced=options.balanced), measure_ddp(case, devices)
    print("\n".join(lines_of(found, ddp, simulated=kind == "cpu")))
    full = make_case(options.model, full=True)
    sizes = full.sizes(len(devices))
    if not options.full:
        print(f"\nOf full size, by the closed forms; nothing of it was run: {full.about}")
        print("\n".join(closed_form_lines(sizes, len(devices))))
    if options.json is not None:
        figures = {
            "measured": measured_on(),
            "case": case.about,
            "balanced": options.balanced,
            "data_parallel": found._asdict() | {"agrees": found.agrees},
            "ddp": ddp._asdict(),
            "full": {"case": full.about, "sizes": sizes._asdict()},
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if found.agrees else 1
