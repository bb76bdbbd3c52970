"""Where the time of a run's steps went: the longest items of the trace that `observe.profile` wrote."""

from collections.abc import Sequence
from pathlib import Path

from jaxdist.config.arguments import COUNT
from jaxdist.config.shipped import with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

_EXAMPLES = (
    "jaxdist profile runs/quickstart              # the ten longest items",
    "jaxdist profile runs/quickstart --top 50",
)


@reports_mistakes
def main(argv: Sequence[str] | None = None, prog: str = "jaxdist profile") -> int:
    """Exit status: 0; 2 for wrong arguments, and where the run has no trace.

    >>> from jaxdist.cli.runs.profile import main
    >>> main(["no/such/run"])
    2
    """
    parser = CommandParser(prog=prog, description=__doc__, **with_examples(_EXAMPLES))
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a run")
    parser.add_argument("--top", type=COUNT, default=10, metavar="N", help="how many items; default: 10")
    options = parser.parse_args(argv)
    if not options.run.is_dir():
        raise UserError(f"RUN: {str(options.run)!r} is no folder; give the directory of a run")

    from jaxdist.trainer.measures.profile import item_table, longest, trace_of  # not before the arguments hold

    path = trace_of(options.run)
    print(f"trace: {path}")
    print("\n".join(item_table(longest(path, options.top))))
    return 0
