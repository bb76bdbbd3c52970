"""The first state of a run: parameters at random, or those that exist already."""

import json
from collections.abc import Callable
from fnmatch import fnmatch

import jax
from jax.sharding import Mesh

from jaxdist.build import Parts, resolved_model
from jaxdist.config.schema import Config
from jaxdist.config.sections.optimizer import LORA
from jaxdist.errors import UserError
from jaxdist.init import init_state
from jaxdist.model import ModelDef, rules_of
from jaxdist.optim import only_trained
from jaxdist.optim.ema import carrying, not_carrying
from jaxdist.parallel.modules.module_loss import ModuleLoss
from jaxdist.precision.reproducible import products_rounded
from jaxdist.pretrained import Pretrained, open_pretrained
from jaxdist.processes import from_all
from jaxdist.specs import PyTree, leaves_by_name
from jaxdist.state import TrainState, fresh_state, shardings_of

_KEY = "init.from"


Origin = dict[str, str]  # "from": the place of a run's first parameters, "digest": their hash; {}: they were random


def first_state(config: Config, parts: Parts, mesh: Mesh, say: Callable[[str], None]) -> tuple[TrainState, Origin]:
    """The state of a new run, and where its parameters come from: from nowhere, or from what `init.from` names.

    say: gets a line about what is read, and one about what is not. Raises `UserError` where it does not fit the model.
    """
    if (replicas := parts.replicas) is not None:
        one, origin = first_state(config, parts._replace(target=replicas.one, replicas=None), mesh, say)
        return replicas.start(one), origin
    if config.init.from_ is None:
        return init_state(parts.model, parts.optimizer, mesh, parts.options), {}
    params, carried, origin = _read_from(config, parts, say)
    optimizer = only_trained(parts.optimizer, parts.options.freeze, rules_of(parts.model))

    def others(params: PyTree) -> TrainState:
        return fresh_state(params, optimizer, parts.target.residual)._replace(params=())

    rest = shardings_of(not_carrying(parts.target)._replace(params=()))
    state = jax.jit(others, out_shardings=rest)(params)._replace(params=params)
    return carrying(state, carried, parts.target), origin


def _initial(model: ModelDef | ModuleLoss) -> Callable[[jax.Array], tuple[PyTree, PyTree]]:
    """key -> the parameters and the model_state that a new run has."""
    if isinstance(model, ModelDef):
        return lambda key: (model.init(key), ())
    return model.init or (lambda key: (model.params, model.model_state))


def _read_from(config: Config, parts: Parts, say: Callable[[str], None]) -> tuple[PyTree, PyTree, Origin]:
    """The parameters and the model_state that `init.from` names, in the layout of the run."""
    init, target = config.init, parts.target
    assert init.from_ is not None
    initial = _initial(parts.model)

    def fresh(names: frozenset[str]) -> dict[str, jax.Array]:
        make = products_rounded(lambda key: initial(key)[0])  # as `init_state`; of the others nothing is computed
        chosen = lambda tree: {name: leaf for name, leaf in leaves_by_name(tree).items() if name in names}  # noqa: E731
        key, layout = jax.random.key(parts.options.seed), chosen(shardings_of(target.params))
        return jax.jit(lambda key: chosen(make(key)), out_shardings=layout)(key)

    with open_pretrained(init.from_, key=_KEY, ema=init.ema) as found:
        digests = from_all(found.digest())
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise UserError(
                f"{_KEY}: {init.from_!r} holds other parameters on rank {other} than on rank 0; copy the same place to"
                " all hosts"
            )
        found.check_architecture(resolved_model(config), init.partial)
        _check_ids(found, config)
        _check_adapters(found, config)
        # Adapters begin at random beside parameters that have none.
        new = config.optimizer.lora.rank and not any(fnmatch(name, LORA) for name in found.shapes())
        partial = (*init.partial, LORA) if new else init.partial
        params = found.load(target, fresh=fresh, partial=partial, say=say)
        carried = _state_from(found, parts, say)
    return params, carried, {"from": init.from_, "digest": digests[0]}


def _state_from(found: Pretrained, parts: Parts, say: Callable[[str], None]) -> PyTree:
    """The model_state of the place, in the layout of the run; that of a new run where the place has none."""
    target = parts.target.model_state
    if not jax.tree.leaves(target):
        return target
    if found.model_state():
        return found.load_model_state(target)
    say(f"{_KEY}: {found.described} has no running statistics (model_state); they are those of a new run")
    key, initial = jax.random.key(parts.options.seed), _initial(parts.model)
    return jax.jit(lambda key: initial(key)[1], out_shardings=shardings_of(target))(key)


def _check_ids(found: Pretrained, config: Config) -> None:
    """Raise `UserError` for parameters of the ids of a tokenizer, and data whose ids are bytes."""
    if found.tokenizer is not None and any(part.source == "text" for part in config.data.parts() or (config.data,)):
        raise UserError(
            f"data.source: text, whose ids are bytes, but the parameters of {_KEY} {config.init.from_!r} are of the ids"
            f" of the tokenizer in {found.tokenizer}; write the text as JSON lines for data.source=jsonl, or make ids"
            f" with scripts/prepare_data.py --tokenizer {found.tokenizer} for data.source=tokens"
        )


def _check_adapters(found: Pretrained, config: Config) -> None:
    """Raise `UserError` where adapters of the place would be left out, or add another multiple of their product."""
    theirs, ours = found.lora, config.optimizer.lora
    if theirs is None or LORA in config.init.partial:
        return
    pairs = {key: (getattr(theirs, key), getattr(ours, key)) for key in ("rank", "alpha")}
    if wrong := [f"optimizer.lora.{key}={a:g} (is {b:g})" for key, (a, b) in pairs.items() if a != b]:
        raise UserError(
            f"{_KEY}: {found.described} has LoRA's adapters: set {', '.join(wrong)}; or start from the folder that"
            f" jaxdist checkpoint export --merged writes; or init.partial={json.dumps([LORA])} leaves them out"
        )
