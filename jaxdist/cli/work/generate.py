"""The work of the command `generate`, once its arguments are read."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax

from jaxdist.build import attention_of, make_model
from jaxdist.checkpoint.reader import FOLDER
from jaxdist.config.entries import ModelFacts, bound
from jaxdist.config.json_reader import parse_document
from jaxdist.config.load import load_config
from jaxdist.config.rules.fields import show
from jaxdist.config.schema import Config, ParallelConfig
from jaxdist.data.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from jaxdist.errors import UserError
from jaxdist.files.user_path import user_path
from jaxdist.generation.loop import Generator
from jaxdist.generation.sampling import Sampling, row_keys
from jaxdist.generation.texts import Completion, Ends, complete, eos_of, ids_of
from jaxdist.init import state_target
from jaxdist.mesh import make_mesh
from jaxdist.model import ModelDef
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.program import in_precision
from jaxdist.precision.policy import enable_x64, precision_of
from jaxdist.pretrained import Pretrained, open_pretrained
from jaxdist.runtime.cache import set_up
from jaxdist.runtime.start import choose_platform, count_devices
from jaxdist.specs import PyTree
from jaxdist.state import specs_of_arrays

LINE_BYTES, PROMPTS = 1 << 20, 1 << 16  # of a file of prompts


def run_generate(arguments: Namespace) -> int:
    """Print completions: of one prompt as they are generated, of several one after the other, of a file as JSON."""
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    texts = arguments.prompt if arguments.prompts is None else list(read_prompts(arguments.prompts))
    own = run_config(arguments.source)
    devices = replace((own or Config()).devices, simulated=math.prod(arguments.mesh.values()))
    choose_platform(devices)
    count_devices(devices)
    with open_pretrained(arguments.source, key="FROM", ema=arguments.ema) as found:
        config = own or folder_config(found, arguments.mesh)
        enable_x64(config.precision.policy)
        set_up(config.devices.compilation_cache, jax.default_backend())
        tokenizer = tokenizer_for(arguments.tokenizer, config, found.tokenizer)
        ends = Ends(eos_of(None, tokenizer), tuple(arguments.stop), tokenizer)
        prompts = [ids_of(text, tokenizer) for text in texts]
        generator, target = make_generator(config, arguments.mesh, sampling, cache=not arguments.no_cache)
        generator.check(prompts, arguments.max_tokens)
        try:
            generator.trace(target, arguments.max_tokens)
        except UserError as error:
            raise UserError(
                f"FROM: the model of {found.described} writes no text, from token ids alone: {error}"
            ) from error
        params = found.load(target, say=lambda line: print(line, file=sys.stderr))
    if generator.why_no_cache and not arguments.no_cache:
        print(f"generates without a cache: {generator.why_no_cache}", file=sys.stderr)
    shows = show_json if arguments.prompts is not None else show_stream if len(texts) == 1 else show_texts
    for first in range(0, len(prompts), arguments.batch):
        some = prompts[first : first + arguments.batch]
        keys = row_keys(arguments.seed, range(first, first + len(some)))
        shows(texts[first:], complete(generator, params, some, keys, arguments.max_tokens, ends), arguments.stop)
    return 0


def run_config(source: Path) -> Config | None:
    """The configuration of a run, by its directory or the folder of a step; None of what is no run."""
    folder = user_path(source, key="SOURCE").absolute()
    run_dir = folder.parent.parent if folder.parent.name == FOLDER else folder
    file = run_dir / "config.yaml"  # any machine may generate from a run, with what devices it has
    config = load_config(file, ["devices.platform=auto"]) if file.is_file() else None
    return config and generating(config)


def generating(config: Config) -> Config:
    """The configuration. Raises `UserError` for a model of a family that writes no text."""
    name = config.model.name
    if not ModelFacts.of(name).generates:
        able = ", ".join(ModelFacts.with_fact(generates=True))
        raise UserError(
            f"FROM: model.name {name!r} cannot generate: it does not predict the next token; allowed: {able}, or a"
            " model of your own that does; give a run or folder of such a model"
        )
    return config


def folder_config(found: Pretrained, sizes: dict[str, int]) -> Config:
    """A configuration for a place that has none: in fp32, and sharded over fsdp. Raises `UserError` for one that does
    not say its architecture."""
    if found.model is None or found.positions is None:
        raise UserError(f"FROM: {found.described} does not say its architecture; give a run, or a Hugging Face folder")
    config = Config()
    strategy = "zero3" if sizes.get("fsdp", 1) > 1 else "ddp"
    data, parallel = replace(config.data, seq_len=found.positions), replace(config.parallel, strategy=strategy)
    return generating(replace(config, model=found.model, data=data, parallel=parallel))


def tokenizer_for(given: str | None, config: Config, folder: Path | None) -> Tokenizer:
    """The tokenizer that is given, or else that of the folder or of the run's data. Raises `UserError` where none is
    known."""
    if given is not None:
        return byte_tokenizer() if given == "bytes" else load_tokenizer(Path(given), key="--tokenizer")
    if folder is not None:
        return load_tokenizer(folder, key="--tokenizer")
    if hasattr(config.data, "tokenizer") or getattr(config.model, "vocab", None) == 256:
        return byte_tokenizer()
    raise UserError("--tokenizer: none is known for the ids of FROM; give a folder with tokenizer.json, or bytes")


def make_generator(
    config: Config, sizes: dict[str, int], sampling: Sampling, *, cache: bool
) -> tuple[Generator, PyTree]:
    """(The generator, the parameters as ShapeDtypeStructs in their layout). Raises `UserError` for a mesh that does not
    fit."""
    mesh, precision = make_mesh(**sizes, devices=jax.devices()), precision_of(config.precision)
    alone = replace(config, parallel=replace(config.parallel, chunks=1, stages=()))  # a run's pipeline is off
    kernel, _ = attention_of(alone, precision, mesh)
    model = make_model(alone, precision, stages=1, training=False, attention=kernel)
    if not isinstance(model, ModelDef):
        raise UserError(f"FROM: model.name {config.model.name!r} is a loss, which gives no logits; give a model's run")
    strategy, least = bound(ParallelConfig, config.parallel, "strategy"), config.parallel.min_shard_bytes
    options = StepOptions(strategy=strategy, precision=precision, min_shard_bytes=least)
    target = state_target(model, optax.identity(), mesh, options).params
    specs, made = specs_of_arrays(target), in_precision(model, precision)
    generator = Generator(
        made, mesh, specs, get_strategy(options), sampling, positions=config.data.seq_len, cache=cache
    )
    return generator, target


def read_prompts(file: Path) -> Iterator[str]:
    """The prompts in a file of lines {"prompt": TEXT}. Raises `UserError` for a line that is something else."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES + 1), b""), start=1):
                where = f"--prompts: line {number} of {str(file)!r}"
                if len(line) > LINE_BYTES or number > PROMPTS:
                    raise UserError(f"{where} is too much; allowed: {PROMPTS} lines of {LINE_BYTES} bytes")
                if not line.strip():
                    continue
                yield _prompt(line, where)
    except OSError as error:
        raise UserError(f"--prompts: cannot read {str(file)!r}: {error.strerror}; give a file of JSON lines") from error


def _prompt(line: bytes, where: str) -> str:
    try:
        found = parse_document(line)
    except ValueError as error:
        raise UserError(f'{where} is no JSON ({error}); allowed: {{"prompt": TEXT}}') from error
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str):
        given = f'"prompt" that is {show(prompt)}' if isinstance(found, dict) and "prompt" in found else show(found)
        raise UserError(f'{where} is {given}; allowed: {{"prompt": TEXT}}')
    return prompt


Batch = Iterator[list[Completion]]


def show_stream(texts: Sequence[str], batch: Batch, stop: Sequence[str]) -> None:
    """Print one completion after its prompt, chunk by chunk."""
    print(texts[0], end="", flush=True)
    done = 0
    for (found,) in batch:
        text = found.shown(stop)
        print(text[done:], end="", flush=True)
        done = len(text)
    print()


def show_texts(texts: Sequence[str], batch: Batch, stop: Sequence[str]) -> None:
    """Print prompts with their completions, a line of dashes between two."""
    *_, last = batch
    print("\n----\n".join(text + found.text for text, found in zip(texts, last, strict=False)), flush=True)


def show_json(texts: Sequence[str], batch: Batch, stop: Sequence[str]) -> None:
    """Print a line of JSON for each prompt."""
    *_, last = batch
    for text, found in zip(texts, last, strict=False):
        line: dict[str, Any] = {
            "prompt": text,
            "completion": found.text,
            "ended": found.ended,
            "tokens": len(found.ids),
        }
        print(json.dumps(line, ensure_ascii=False), flush=True)
