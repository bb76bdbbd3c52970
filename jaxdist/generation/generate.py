"""`jaxdist.generate`: completions of prompts by a model and its parameters."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxdist.data.text.tokenizer import Tokenizer
from jaxdist.errors import UserError
from jaxdist.generation.loop import Generator
from jaxdist.generation.sampling import Sampling, row_keys
from jaxdist.generation.texts import Completion, Ends, complete, eos_of, ids_of
from jaxdist.mesh import check_mesh, make_mesh
from jaxdist.model import ModelDef, specs_of_params
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.program import check_axes, in_precision
from jaxdist.specs import PyTree, has_shards, map_specs, without_idle


def _on_a_mesh(model: ModelDef, params: PyTree) -> tuple[PyTree, Mesh, PyTree]:
    """(parameters, their mesh, their specs). Arrays that are on no mesh of six axes are put on one device."""
    leaves = jax.tree.leaves(params)
    if leaves and all(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in leaves):
        mesh = leaves[0].sharding.mesh
        check_mesh(mesh)
        return params, mesh, specs_of_params(model, params)
    mesh = make_mesh(devices=jax.devices()[:1])
    specs = map_specs(lambda spec: without_idle(spec, mesh), model.specs)
    return jax.device_put(params, map_specs(lambda spec: NamedSharding(mesh, spec), specs)), mesh, specs


def _generator(
    model: ModelDef, params: PyTree, options: StepOptions | None, sampling: Sampling, **given: Any
) -> tuple[Generator, PyTree]:
    """(The generator, parameters on its mesh)."""
    params, mesh, specs = _on_a_mesh(model, params)
    check_axes(model, mesh)
    sharded = has_shards(specs)
    options = options or StepOptions(strategy="zero3" if sharded else "ddp")
    made = in_precision(model, options.precision)
    return Generator(made, mesh, specs, get_strategy(options), sampling, **given), params


def generate(
    model: ModelDef,
    params: PyTree,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos: int | Sequence[int] | None = None,
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    positions: int | None = None,
    batch: int = 16,
    cache: bool = True,
    options: StepOptions | None = None,
) -> list[Completion]:
    """Completions of prompts, one a prompt, in the layout that the parameters have.

    A completion depends on its prompt, the seed and its place among the prompts, not on the other prompts, on `batch`
    or on the layout; but for rounding, which may decide between two tokens of almost the same score.

    model: built without dropout.
    params: of `init_state` or a checkpoint, in their layout; or arrays on one device.
    prompts: texts, which need a tokenizer, or lists of token ids.
    max_tokens: of a completion. It may be shorter: see eos, stop and positions.
    temperature, top_k, top_p: see `jaxdist.generation.sampling.Sampling`. Temperature 0 takes the likeliest token.
    eos: the ids that end a text; None: that of the tokenizer, if it has one.
    stop: strings that end a text.
    tokenizer: of `jaxdist.data.text.tokenizer`: `byte_tokenizer()`, or `load_tokenizer(folder, key="tokenizer")`.
    positions: the length of the longest text, prompt included; None: as many as the model has.
    batch: how many prompts are completed together.
    cache: whether keys and values of earlier tokens are kept; else every token costs a pass over the whole text.
    options: those of `make_train_step`, for strategy and precision; None: zero3 for parameters that a
        strategy has split, else ddp, in fp32.

    Raises `UserError` for numbers out of range, and for a prompt that leaves no position free.

    >>> from jaxdist.models.gpt import gpt
    >>> model = gpt(jaxdist.Config().model.replace(layers=1, width=16, heads=2, vocab=32), max_length=16)
    >>> state = jaxdist.init_state(model, optax.sgd(0.1), jaxdist.make_mesh(fsdp=2, tensor=2), strategy="zero3")
    >>> one, other = jaxdist.generate(model, state.params, [[1, 2, 3], [4]], max_tokens=5, temperature=0.8)
    >>> len(one.ids), one.ended
    (5, 'max_tokens')
    """
    if isinstance(prompts, str):
        raise UserError(f"prompts: {prompts[:40]!r} is one text; give a list of texts, [{prompts[:40]!r}]")
    if batch < 1:
        raise UserError(f"batch: {batch}; allowed: 1 and more")
    sampling, ends = Sampling(temperature, top_k, top_p), Ends(eos_of(eos, tokenizer), stop, tokenizer)  # type: ignore[arg-type]
    run, params = _generator(model, params, options, sampling, positions=positions, cache=cache)
    ids = [ids_of(prompt, tokenizer) for prompt in prompts]
    run.check(ids, max_tokens)
    found: list[Completion] = []
    for first in range(0, len(ids), batch):
        some = ids[first : first + batch]
        *_, last = complete(run, params, some, row_keys(seed, range(first, first + len(some))), max_tokens, ends)
        found += last
    return found
