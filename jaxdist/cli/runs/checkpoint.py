"""The command `checkpoint`: ls, verify, export, import, average (docs/huggingface.md)."""

from collections.abc import Sequence
from pathlib import Path

from jaxdist.config.arguments import COUNT, output_folder, step_of_run
from jaxdist.config.load import load_config
from jaxdist.config.shipped import find_config, with_examples
from jaxdist.errors import CommandParser, reports_mistakes

_EXAMPLES = (
    "jaxdist checkpoint ls runs/mine",
    "jaxdist checkpoint export runs/mine --output hf      # of a run with LoRA --merged, or --adapter",
)


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist checkpoint") -> int:
    """Exit status: 0; 1 a checkpoint is damaged; 2 the arguments, the configuration or a file is wrong."""
    parser = CommandParser(
        prog=prog, description="List, check, convert and average checkpoints.", **with_examples(_EXAMPLES)
    )
    commands = parser.add_subparsers(dest="command", required=True, help="what to do")
    for name, text in (
        ("ls", "the steps of a run"),
        ("verify", "whether their files are as written"),
        ("export", "to Hugging Face safetensors"),
        ("average", "the mean of steps"),
    ):
        where = "of a run, or the folder in which your own loop saves"
        commands.add_parser(name, help=text).add_argument("run_dir", metavar="RUN_DIR", type=Path, help=where)
    for name in ("export", "average"):
        commands.choices[name].add_argument(
            "--output", required=True, metavar="DIR", type=output_folder, help="a new folder"
        )
    commands.choices["export"].add_argument(
        "--step",
        type=step_of_run,
        metavar="N",
        help="a number, or best: the least evaluation loss; default: the newest",
    )
    text = "rows of the vocabulary that are no padding"
    commands.choices["export"].add_argument("--vocab", type=COUNT, metavar="N", help=text)
    commands.choices["export"].add_argument("--ema", action="store_true", help="the moving average of train.ema")
    how = commands.choices["export"].add_mutually_exclusive_group()
    how.add_argument("--adapter", action="store_true", help="only the adapters of LoRA, in PEFT's format")
    how.add_argument("--merged", action="store_true", help="the model with the adapters of LoRA in its kernels")
    commands.choices["average"].add_argument("--last", required=True, metavar="N", type=COUNT, help="newest steps")
    importer = commands.add_parser("import", help="from Hugging Face safetensors, into step 0 of a new run")
    importer.add_argument("folder", metavar="HF_DIR", type=Path, help="with config.json and safetensors")
    importer.add_argument("--config", required=True, metavar="FILE", help="of the run; [section.key=value ...] on top")
    importer.add_argument("--run-dir", required=True, metavar="DIR", type=output_folder, help="a new run directory")
    arguments, overrides = parser.parse_known_args(argv)
    if overrides and (arguments.command != "import" or any(text[0] == "-" for text in overrides)):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    config = load_config(find_config(arguments.config), overrides) if arguments.command == "import" else None
    from jaxdist.cli.work.checkpoint import checkpoint_command

    return checkpoint_command(arguments, config)
