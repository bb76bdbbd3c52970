"""Make report.html of a run again, or compare several: also while a run goes on, and after it was killed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.config.arguments import output_file
from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

if TYPE_CHECKING:
    from jaxdist.observe.report import RunRecord

_EXAMPLES = (
    "jaxdist report runs/quickstart                         # writes runs/quickstart/report.html",
    "jaxdist report runs/a runs/b --output both.html        # compares the two",
)


@reports_mistakes
def main(argv: Sequence[str] | None = None, prog: str = "jaxdist report") -> int:
    """Exit status: 0; 2 for wrong arguments.

    >>> from jaxdist.cli.runs.report import main
    >>> main(["no/such/run"])
    2
    """
    parser = CommandParser(prog=prog, description=__doc__, **with_examples(_EXAMPLES))
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the directory of a run")
    text = "default: RUN/report.html, or comparison.html"
    parser.add_argument("--output", type=output_file, metavar="FILE", help=text)
    parser.add_argument("--remedies", action="store_true", help="also compile what would free memory (minutes)")
    parser.add_argument("--no-trace", action="store_true", help="without memory and communication, which are traced")
    options = parser.parse_args(argv)
    if options.remedies and (options.no_trace or len(options.runs) > 1):
        raise UserError("--remedies: is for one run, and without --no-trace; leave one of them out")
    if missing := [str(folder) for folder in options.runs if not (folder / "metrics.jsonl").is_file()]:
        raise UserError(f"RUN: {missing[0]!r} holds no metrics.jsonl; give the directory of a run, such as runs/NAME")
    configs = [configuration(folder / "config.yaml") for folder in options.runs]
    if not options.no_trace:
        import jax  # not before the arguments hold

        jax.config.update("jax_platforms", "cpu")
        if options.remedies and isinstance(configs[0], Config):
            jax.config.update("jax_num_cpu_devices", configs[0].mesh.devices)
    try:
        output = _write(options.runs, configs, options.output, trace=not options.no_trace, compiled=options.remedies)
    except OSError as error:
        what = f"{str(error.filename or options.runs[0])!r} cannot be read or written: {error.strerror}"
        raise UserError(f"{what}; give a file in a folder that is there, by --output") from error
    print(f"written: {output}")
    return 0


def configuration(path: Path) -> Config | str:
    """The configuration of a run or, as a sentence, why there is none."""
    if not path.is_file():
        return "The run has no config.yaml: it was started from Python, or the file is gone."
    try:
        return load_config(path, planned=True)
    except UserError as error:
        return f"Its config.yaml cannot be used: {error}."


def _write(
    runs: Sequence[Path], configs: Sequence[Config | str], output: Path | None, *, trace: bool, compiled: bool
) -> Path:
    from jaxdist.observe.report import read_run, write_comparison, write_report
    from jaxdist.observe.report.read import defaults_of

    records = []
    for folder, config in zip(runs, configs, strict=True):
        record = read_run(folder)
        if isinstance(config, str):
            record = record._replace(prediction=config)
        else:
            record = record._replace(defaults=defaults_of(config))
            record = _traced(record, config, compiled=compiled) if trace else record
        records.append(record)
    if len(records) == 1:
        output = output or runs[0] / "report.html"
        write_report(output, records[0])
    else:
        output = output or Path("comparison.html")
        write_comparison(output, records)
    return output


def _traced(record: "RunRecord", config: Config, *, compiled: bool) -> "RunRecord":
    """The record with what the traced step predicts, on a mesh without devices."""
    from jaxdist.build import assemble, planned_mesh
    from jaxdist.plan.compiled.memory import batch_of
    from jaxdist.plan.remedies.table import remedies
    from jaxdist.precision.policy import enable_x64
    from jaxdist.trainer.summary import compiled_memory, predict, remedy_rows

    enable_x64(config.precision.policy)
    try:
        mesh = planned_mesh(config)
        parts, batch = assemble(config, mesh), batch_of(config, mesh)
        prediction = predict(config, parts, mesh, batch)
        table = None
        if compiled:
            table = remedies(config, progress=lambda text: print(text, file=sys.stderr, flush=True))
            prediction = prediction._replace(compiled=compiled_memory(config, parts, batch, table))
    except UserError as error:
        return record._replace(prediction=f"The step cannot be traced: {error}.")
    return record._replace(prediction=prediction, remedies=remedy_rows(config, table))
