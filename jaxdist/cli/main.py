"""The command `jaxdist`: finds the module of a subcommand, and imports nothing else."""

import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from jaxdist.errors import UserError, nearest, reports_mistakes


class Command(NamedTuple):
    """A subcommand: a function `(argv, prog) -> exit status` of a module, and a line about it."""

    module: str
    text: str
    function: str = "main"


COMMANDS = {
    "train": Command("jaxdist.cli.runs.train", "train a model as a YAML file says; the same run directory resumes"),
    "launch": Command("jaxdist.cli.launch", "start the processes of a job, and again if it fails"),
    "generate": Command(
        "jaxdist.cli.runs.generate", "generate text with a model: of a run, a checkpoint, a Hugging Face folder"
    ),
    "eval": Command("jaxdist.cli.runs.evaluate", "evaluate a checkpoint of a run, also on other data or another mesh"),
    "explain": Command("jaxdist.cli.explain", "the collectives, memory and layout of a step, without running it"),
    "plan": Command("jaxdist.cli.plan", "choose the layout that trains fastest on a cluster, or compile a step for it"),
    "calibrate": Command("jaxdist.cli.runs.calibrate", "measure blocks and links here, for plans"),
    "verify": Command("jaxdist.cli.runs.verify", "does a model train the same in this layout? If not, why, and where"),
    "cost": Command("jaxdist.cli.cost", "what communication costs on several hosts, by formulas; links and machines"),
    "doctor": Command("jaxdist.cli.doctor", "check this machine, or all hosts of a job"),
    "checkpoint": Command("jaxdist.cli.runs.checkpoint", "list, verify, export, import and average checkpoints"),
    "data": Command("jaxdist.cli.data", "turn text into files of token ids"),
    "distill": Command("jaxdist.cli.distill", "write a teacher's largest logits, for distill.cache"),
    "elastic": Command("jaxdist.cli.elastic", "train with servers and workers that come and go, on Ray"),
    "replay": Command("jaxdist.cli.elastic", "recompute an elastic run from its log, to the same bits", "replay_main"),
    "lab": Command("jaxdist.lab.command", "run a job on virtual hosts with slow links", "run_lab"),
    "bench": Command("jaxdist.cli.runs.bench", "time the step of a configuration, beside variants of it"),
    "profile": Command("jaxdist.cli.runs.profile", "where the time of a run's steps went"),
    "report": Command("jaxdist.cli.runs.report", "make the report of a run again, or compare runs"),
    "init": Command("jaxdist.cli.init", "write a project of your own: configuration, model, SLURM recipe"),
    "completion": Command("jaxdist.cli.completion", "print the completion script of bash, zsh or fish"),
}
OVERVIEW = """usage: jaxdist COMMAND ...

Train any Flax model on any number of GPUs, with every byte of communication in sight.

commands:
{commands}

examples:
  jaxdist train quickstart
  jaxdist init my-project && cd my-project && jaxdist train config.yaml

jaxdist COMMAND --help says more about a command; jaxdist --version prints the version."""


def overview() -> str:
    """The text of `jaxdist --help`."""
    return OVERVIEW.format(commands="\n".join(f"  {name:<11} {each.text}" for name, each in COMMANDS.items()))


def main(argv: Sequence[str] | None = None, prog: str = "jaxdist") -> int:
    """Run a command line, by default that of this process. Returns the exit status: 2 for a mistake in it. Where nobody
    reads its output any more, as in `jaxdist explain quickstart | head`, it ends in silence, as a shell's commands do.
    """
    try:
        status = _run(argv, prog)
        if sys.stdout is not None:  # None: it was closed, as by `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at its end
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # a run in training stops in its own way
        return 128 + signal.SIGINT
    return status


@reports_mistakes
def _run(argv: Sequence[str] | None, prog: str) -> int:
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"jaxdist {sys.modules['jaxdist'].__version__}")
        return 0
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"; did you mean {prog} {near}?" if near else ""
        raise UserError(f"{name}: unknown command; allowed: {', '.join(COMMANDS)}{hint}")
    command = COMMANDS[name]
    status: int = getattr(importlib.import_module(command.module), command.function)(rest, f"{prog} {name}")
    return status


def is_unread(stream: TextIO | None) -> bool:
    """Whether a stream is a pipe whose reader has ended."""
    if stream is None:
        return False
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream in memory, as in a notebook
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
