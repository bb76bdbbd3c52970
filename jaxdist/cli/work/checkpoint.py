"""The command `checkpoint`: list, verify, export, import and average the checkpoints of runs."""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.build import make_model, optimizer_of
from jaxdist.checkpoint import Checkpoints, SaveFailed, verify
from jaxdist.checkpoint.block_order import settings_of_run
from jaxdist.checkpoint.checksums import newer_format, own_meta
from jaxdist.checkpoint.huggingface.convert import check_model, export
from jaxdist.checkpoint.huggingface.family import CONFIG
from jaxdist.checkpoint.huggingface.peft import Merged, export_adapter, has_adapters
from jaxdist.checkpoint.huggingface.safetensors import TensorFiles, read_json
from jaxdist.checkpoint.reader import FOLDER, Stored, is_complete, open_steps, step_folders
from jaxdist.config.load import to_yaml
from jaxdist.config.schema import Config
from jaxdist.config.sections.optimizer import LORA
from jaxdist.data import load_source
from jaxdist.data.text.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer
from jaxdist.errors import UserError
from jaxdist.files.regular import DAMAGED, read_regular, replace_file
from jaxdist.model import ModelDef, rules_of
from jaxdist.observe import read_metrics, redact_settings
from jaxdist.optim import only_trained
from jaxdist.plan.traced.sharding import aligned
from jaxdist.precision.loss_scale import fresh_guard
from jaxdist.precision.policy import enable_x64, precision_of
from jaxdist.pretrained import open_pretrained
from jaxdist.specs import leaves_by_name, path_name
from jaxdist.state import TrainState
from jaxdist.trainer.batches.load import check_vocabulary
from jaxdist.trainer.resume import record

_TOKENIZER = "data.tokenizer"


def checkpoint_command(arguments: Namespace, config: Config | None) -> int:
    """Run the subcommand in `arguments`, and print its result. Returns the exit status.

    config: for `import`, None for the others.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing here needs more
    try:
        if arguments.command == "ls":
            print("\n".join(listing(arguments.run_dir)))
        elif arguments.command == "verify":
            return check_all(arguments.run_dir)
        elif arguments.command == "export":
            (stored,) = open_steps(arguments.run_dir, step=arguments.step)
            chosen = Stored(stored.folder, ema=True) if arguments.ema else stored
            said = export_as(chosen, arguments.output, arguments)
            if stored.averages() and not arguments.ema:
                said += "; the parameters as trained: --ema exports their moving average, which evaluations take"
            print(f"step {stored.step} to {arguments.output}: {said}")
        elif arguments.command == "import":
            assert config is not None
            said = import_model(arguments.folder, config, arguments.run_dir)
            print(f"{arguments.folder} to {arguments.run_dir}: {said}")
        else:
            print(average(arguments.run_dir, arguments.output, last=arguments.last))
    except (SaveFailed, OSError) as error:
        writes = arguments.command not in ("ls", "verify")
        mend = "nothing complete was written: remove what there is of it, and try again" if writes else "mend it"
        raise UserError(f"{arguments.command}: {error}; {mend}") from error
    return 0


def export_as(stored: Stored, output: Path, arguments: Namespace) -> str:
    """Export a step as a whole model, or only its adapters (`--adapter`). Returns a line about it."""
    asked = "--adapter" if arguments.adapter else "--merged"
    if (arguments.adapter or arguments.merged) != has_adapters(stored):
        raise UserError(
            f"{asked}: {stored.folder} has no adapters; leave it out"
            if arguments.adapter or arguments.merged
            else f"{stored.folder}: holds a model and LoRA's adapters; give --merged for a model that has both in its"
            " kernels, or --adapter for the adapters alone, in PEFT's format"
        )
    if arguments.adapter and arguments.vocab is not None:
        raise UserError(f"--vocab: {arguments.vocab}, but adapters have no vocabulary; leave it out")
    if arguments.adapter:
        return export_adapter(stored, output)
    tokenizer, missing = _tokenizer_of(stored)
    ends = {} if tokenizer is None else {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    whole = Merged(stored.folder, ema=arguments.ema) if arguments.merged else stored
    said = export(whole, output, vocab=arguments.vocab, ends=ends)
    if tokenizer is None:
        return said + missing
    return f"{said}; and {', '.join(copy_tokenizer(tokenizer, output))} of {tokenizer.folder}"


def _tokenizer_of(stored: Stored) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a run's data; where it cannot be read any more, what to say of it."""
    folder = settings_of_run(stored.meta).get("config", {}).get(_TOKENIZER)
    if folder in (None, "bytes"):
        return None, ""
    try:
        return load_tokenizer(Path(folder), key=_TOKENIZER), ""
    except UserError as error:  # the model does not need it
        return None, f"; without a tokenizer: {error}"


def listing(run_dir: Path) -> list[str]:
    """The table of a run's steps, in lines."""
    metrics = run_dir / "metrics.jsonl"
    records = {each["step"]: each for each in read_metrics(metrics)} if metrics.exists() else {}
    rows: list[tuple[str, ...]] = [("step", "MiB", "written", "loss", "eval loss", "state")]
    for folder in step_folders(run_dir):
        found = records.get(int(folder.name), {}) if folder.name.isdigit() else {}
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
        written = f"{datetime.fromtimestamp(folder.stat().st_mtime):%Y-%m-%d %H:%M:%S}"
        losses = [f"{found[key]:.4f}" if key in found else "-" for key in ("loss", "eval/loss")]
        aside = f"damaged, moved aside ({folder.name})" if DAMAGED in folder.name else f"not complete ({folder.name})"
        newer = newer_format(folder)
        state = f"of format {newer}, a later version's" if newer else "complete" if is_complete(folder) else aside
        rows.append((folder.name.partition(".")[0], f"{size:.1f}", written, *losses, state))
    return aligned(rows, right=range(5))


def check_all(run_dir: Path) -> int:
    """Print for each step whether it is as it was written. Returns 1 if one is not, else 0."""
    status = 0
    for folder in step_folders(run_dir):
        if DAMAGED in folder.name:
            print(f"{folder.name}: was damaged, and is no step any more")
            continue
        problems = verify(folder) if is_complete(folder) else ["not complete"]
        print(f"{folder.name}: {'; '.join(problems) or 'ok'}")
        status = 1 if problems else status
    return status


def import_model(folder: Path, config: Config, run_dir: Path) -> str:
    """Make a run directory with a checkpoint of step 0: the parameters of a Hugging Face folder, and a new optimizer
    state. Returns a line about it."""
    _check_new(run_dir, "--run-dir")
    model, positions = config.model.resolved(), config.data.seq_len
    enable_x64(config.precision.policy)
    with TensorFiles(folder) as files:
        check_model(files, read_json(folder / CONFIG), model, positions=positions)
    source = load_source(config.data)
    check_vocabulary(config, source)
    whole = replace(config, parallel=replace(config.parallel, chunks=1, stages=()))  # in one piece, as it is saved
    made = make_model(whole, precision_of(config.precision), stages=1, training=True)
    assert isinstance(made, ModelDef), "a loss has no format of Hugging Face, which check_model has said"

    def drawn(names: frozenset[str]) -> dict[str, jax.Array]:
        whole = jax.jit(made.init)(jax.random.key(config.train.seed))
        return {name: leaf for name, leaf in leaves_by_name(whole).items() if name in names}

    here, said = jax.sharding.SingleDeviceSharding(jax.devices()[0]), list[str]()
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), made.shapes)
    with open_pretrained(folder, key="--from") as found:
        params = found.load(target, fresh=drawn, partial=[LORA] * bool(config.optimizer.lora.rank), say=said.append)
    optimizer = only_trained(optimizer_of(config), config.optimizer.frozen, rules_of(made))
    opt_state = jax.jit(optimizer.init)(params)
    state = TrainState(jnp.zeros((), jnp.int32), params, opt_state, guard=fresh_guard())
    with Checkpoints(run_dir / FOLDER, keep=config.checkpoint.keep) as checkpoints:
        checkpoints.save(0, state, record(config, source))
    replace_file(run_dir / "config.yaml", to_yaml(config, redact_settings).encode())
    return f"{made.parameters:,} parameters{said[0].removeprefix(f'--from: parameters of {folder}')}"


def average(run_dir: Path, output: Path, *, last: int) -> str:
    """Make a run directory with the newest checkpoint of a run, its parameters the mean of the newest `last`.

    The mean is computed in float64, of the floats of a model_state too: running statistics of other parameters would
    not fit. The moving average of `train.ema` becomes the mean, too. The residual of lossy gradient sums is left out.
    Returns a line about it.
    """
    _check_new(output, "--output")
    steps = open_steps(run_dir, last=last)
    newest = steps[-1]
    for other in steps[:-1]:
        _check_same(newest, other)
    run = settings_of_run(newest.meta)
    enable_x64(run.get("precision", {}).get("policy", "fp32"))
    means = {name: _mean(each.param(name) for each in steps) for name in newest.params()}
    rest = jax.tree.map(jnp.asarray, newest.rest())
    others = {"guard": rest["guard"]} if "guard" in rest else {}
    carried = jax.tree.map(lambda *each: _mean(each), *(stored.model_state() for stored in steps))
    stateful = bool(jax.tree.leaves(carried))
    if newest.averages():  # what evaluations read
        typed = lambda path, leaf: means[path_name(path)].astype(leaf.dtype)  # noqa: E731  # frozen ones have none
        rest["opt_state"]["ema"] = jax.tree_util.tree_map_with_path(typed, rest["opt_state"]["ema"])
        if "model_state" in rest["opt_state"]:
            like = rest["opt_state"]["model_state"]
            rest["opt_state"]["model_state"] = jax.tree.map(lambda old, new: new.astype(old.dtype), like, carried)
    state = TrainState(rest["step"], newest.tree_of(means), rest["opt_state"], **others, model_state=carried)
    meta = own_meta(newest.meta)
    meta = {name: value for name, value in meta.items() if name != "ending" or "config" not in meta}
    with Checkpoints(output / FOLDER, keep=1) as checkpoints:
        checkpoints.save(newest.step, state, meta)
    if (run_dir / "config.yaml").exists():
        replace_file(output / "config.yaml", read_regular(run_dir / "config.yaml"))
    also = "; its running statistics (model_state) are the mean of theirs" * stateful
    return f"the mean of steps {', '.join(str(each.step) for each in steps)} to {output}, as step {newest.step}{also}"


def _mean(arrays: Iterable[np.ndarray]) -> jax.Array:
    """The mean of arrays that are alike; of those that are no floats the last."""
    each = iter(arrays)
    last = next(each)
    total, count = last.astype(np.float64), 1
    for last in each:
        total, count = total + last, count + 1
    if not jnp.issubdtype(last.dtype, jnp.floating):
        return jnp.asarray(last)
    return jnp.asarray((total / count).astype(last.dtype))


def _check_same(newest: Stored, other: Stored) -> None:
    mine, its = (each.params() | leaves_by_name({"model_state": each.model_state()}) for each in (newest, other))
    for name in sorted(mine.keys() | its.keys()):
        kinds = [
            f"{leaves[name].dtype}{list(leaves[name].shape)}" if name in leaves else "not there"
            for leaves in (mine, its)
        ]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"{name}: is {kinds[0]} in step {newest.step} and {kinds[1]} in step {other.step}; give"
                " --last a smaller number"
            )


def _check_new(run_dir: Path, key: str) -> None:
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UserError(f"{key}: {run_dir} is there already; give a new run directory")
