"""The command `distill`: the largest logits of a teacher, for `distill.cache`."""

from collections.abc import Sequence

from jaxdist.config.load import load_config
from jaxdist.config.schema import Config
from jaxdist.config.shipped import add_config, take_config, with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

_EXAMPLES = (
    "jaxdist distill student.yaml distill.teacher=runs/teacher distill.cache=runs/logits",
    "jaxdist distill distill_quickstart distill.teacher=runs/teacher distill.cache=runs/logits",
)


@reports_mistakes
def main(argv: Sequence[str], prog: str = "jaxdist distill") -> int:
    """Exit status: 0 done, 2 something is wrong with the configuration."""
    about = "Write the largest logits of distill.teacher, for all steps of a run, into distill.cache."
    parser = CommandParser(prog=prog, description=about, **with_examples(_EXAMPLES))
    add_config(parser)
    config = load_config(*take_config(parser, parser.parse_intermixed_args(argv)))
    for key in ("teacher", "cache"):
        if getattr(config.distill, key) is None:
            raise UserError(f"distill.{key}: null; give the {'teacher' if key == 'teacher' else 'folder to write'}")
    _write(config)
    return 0


def _write(config: Config) -> None:
    import jax

    from jaxdist.build import forward_only, mesh_of_config
    from jaxdist.distill.teaching import load_teacher, make_cache
    from jaxdist.runtime.start import start
    from jaxdist.specs import format_bytes
    from jaxdist.trainer.batches.load import load_data, loader_of
    from jaxdist.trainer.resume import identity

    config = start(config)
    if jax.process_count() > 1:
        raise UserError("jaxdist distill: runs in one process, which may have several devices; start it without launch")
    mesh = mesh_of_config(config)
    teacher, source = load_teacher(config, mesh, forward_only), load_data(config)
    loader = loader_of(config, source, mesh)
    kept = make_cache(config, teacher, loader, identity(config, source), lambda line: print(line, flush=True))
    what = f"the {kept.top_k} largest of {kept.vocab} logits of {kept.samples:,} samples"
    print(f"{config.distill.cache}: {what}, {format_bytes(sum(kept.sizes().values()))}")
