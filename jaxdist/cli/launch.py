"""`jaxdist launch`: start the processes of a job, here or on the hosts of a Ray cluster."""

from collections.abc import Sequence

from jaxdist.errors import reports_mistakes
from jaxdist.launcher.options import check_separator, make_parser, split_command
from jaxdist.launcher.supervisor import run_launcher


@reports_mistakes
def main(arguments: Sequence[str], prog: str = "jaxdist launch") -> int:
    """Run a command line. Returns the exit status."""
    check_separator(make_parser(prog), arguments)
    if "--ray" in split_command(arguments)[0]:
        from jaxdist.elastic.launch import run_on_ray

        return run_on_ray(arguments, prog)
    return run_launcher(arguments, prog)
