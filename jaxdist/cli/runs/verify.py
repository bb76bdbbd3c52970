"""Does a model train the same in this layout as on one device? If not: the causes, their lines, and the remedies."""

import inspect
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxdist.config.load import load_config
from jaxdist.config.reader import read_config
from jaxdist.config.schema import Config
from jaxdist.config.shipped import add_config, find_config, with_examples
from jaxdist.errors import CommandParser, UserError, reports_mistakes

_EXAMPLES = (
    "jaxdist verify quickstart model.layers=2 model.width=32 data.global_batch=16",
    "jaxdist verify my_module:loss_fn --example my_module:example mesh.fsdp=4 parallel.strategy=zero3",
)
_STEPS = 3
_LAYOUT = ("mesh.data=2", "mesh.fsdp=2", "parallel.strategy=zero3")  # of a loss, where none is given


@reports_mistakes
def main(argv: Sequence[str] | None = None, prog: str = "jaxdist verify") -> int:
    """Exit status: 0 the same; 1 not, with a line for each cause; 2 for wrong arguments.

    >>> from jaxdist.cli.runs.verify import main
    >>> main(["my_module:loss_fn"])
    2
    """
    parser = CommandParser(
        prog=prog,
        description=f"{__doc__} Simulated CPU devices, float64, {_STEPS} steps. In place of CONFIG: MODULE:LOSS, a loss"
        " of your own, then keys of the sections mesh and parallel.",
        **with_examples(_EXAMPLES),
    )
    add_config(parser)
    parser.add_argument(
        "--example",
        metavar="MODULE:FUNCTION",
        help="for MODULE:LOSS: a function that returns (params, batch) or (params, batch, model_state)",
    )
    parser.add_argument("--synthetic", action="store_true", help="batches by the shapes alone: reads no data")
    arguments = parser.parse_intermixed_args(argv)
    words = [*([arguments.config] if arguments.config is not None else []), *arguments.words]
    if not words or "=" in words[0]:
        parser.error("the following arguments are required: CONFIG, or MODULE:LOSS")
    if ":" in words[0] and not Path(words[0]).exists():
        found = _verify_loss(words[0], arguments.example, words[1:])
    elif arguments.example is not None:
        raise UserError(
            f"--example: {arguments.example}, but {words[0]!r} is a configuration; allowed: with MODULE:LOSS"
        )
    else:
        found = _verify_config(words[0], words[1:], synthetic=arguments.synthetic)
    print(found)
    return 0 if found.clean else 1


def _start(config: Config) -> Any:
    """The mesh of a configuration, of simulated devices."""
    sizes = asdict(config.mesh)
    if -1 in sizes.values():
        raise UserError("mesh: has a -1; allowed: numbers of devices, which are simulated here, such as mesh.fsdp=4")
    import jax

    from jaxdist.mesh import make_mesh
    from jaxdist.runtime.start import choose_platform

    needed = config.mesh.devices
    choose_platform(replace(config.devices, platform="cpu", simulated=needed))
    return make_mesh(**sizes, devices=jax.devices()[:needed])


def _verify_config(given: str, overrides: Sequence[str], *, synthetic: bool) -> Any:
    config = load_config(find_config(given), ["devices.platform=cpu", *overrides], planned=synthetic)
    mesh = _start(config)
    from jaxdist.plan.verify import configs
    from jaxdist.trainer.batches.load import load_data, loader_of

    if synthetic:
        drawn = configs.synthetic(config, mesh)
        batches = [next(drawn) for _ in range(_STEPS)]
    else:
        import jax

        loader = loader_of(config, load_data(config), mesh)
        batches = [configs.ragged(jax.device_get(loader.batch(step))) for step in range(_STEPS)]
    return configs.verify_config(config, mesh, batches, lambda text: print(f"{text} ...", file=sys.stderr, flush=True))


def _verify_loss(target: str, example: str | None, overrides: Sequence[str]) -> Any:
    if example is None:
        raise UserError(
            f"--example: is missing for {target}; allowed: MODULE:FUNCTION, a function that returns (params, batch)"
        )
    if wrong := next((each for each in overrides if each.partition(".")[0] not in ("mesh", "parallel")), None):
        raise UserError(f"{wrong}: is no key of a layout; allowed: keys of the sections mesh and parallel")
    with tempfile.TemporaryDirectory() as folder:
        nothing = Path(folder, "nothing.yaml")
        nothing.write_text("{}", encoding="utf-8")
        given = overrides if any(each.startswith("mesh") for each in overrides) else [*_LAYOUT, *overrides]
        config = read_config(Config, nothing, given)
    mesh = _start(config)
    from jaxdist import registry
    from jaxdist.build import step_options
    from jaxdist.plan.verify.check import verify_training

    loss, made = (
        registry.load("jaxdist.models", each.replace(":", "."), key=key)
        for each, key in ((target, "loss"), (example, "--example"))
    )
    result = made
    if callable(made):
        try:
            inspect.signature(made).bind()
        except TypeError as error:
            raise UserError(
                f"--example: {example}: {error}; allowed: a function without arguments that returns (params, batch)"
            ) from error
        result = made()
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise UserError(f"--example: {example} gives a {type(result).__name__}; allowed: (params, batch), a tuple")
    params, batch, *state = result
    options = step_options(config, mesh)
    return verify_training(loss, params, batch, mesh, options=options, **({"model_state": state[0]} if state else {}))
