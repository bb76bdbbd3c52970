"""Load the data of a configuration, and refuse what its model cannot be trained on."""

import math
from dataclasses import fields, replace

from jax.sharding import Mesh, NamedSharding

from jaxdist.config.entries import ModelFacts, SourceFacts, options_of
from jaxdist.config.schema import Config
from jaxdist.data import GlobalBatches, Ids, Source, batch_shapes, leaves_of, load_source, make_loader
from jaxdist.errors import UserError
from jaxdist.plan.compiled.memory import sample_of
from jaxdist.specs import BATCH_SPEC


def load_data(config: Config) -> Source:
    """The data of this configuration. Raises `UserError` where the model cannot be trained on it."""
    source = load_source(config.data)
    check_vocabulary(config, source)
    check_leaves(config, source)
    check_labels(config, source)
    check_shapes(config, source)
    return packed(config, source)


def check_vocabulary(config: Config, source: Source) -> None:
    """Raise `UserError` when the data holds ids that the model has no row for."""
    if config.model.vocab is not None and source.vocab > config.model.vocab:
        raise UserError(
            f"model.vocab: {config.model.vocab} is too small for {source.info['path']!r}, whose ids need {source.vocab}"
        )


def check_leaves(config: Config, source: Source) -> None:
    """Raise `UserError` when samples are not what the model takes. Of a user's own model that is not known."""
    first, wanted = source.first, batch_shapes(1, 1)
    leaves = wanted if isinstance(first, Ids) else first.leaves
    sample = sample_of(config)
    if not sample.keys() <= leaves.keys():
        raise UserError(
            f"data.source: {source.info['name']!r} gives {', '.join(leaves)}, and model.name"
            f" {config.model.name!r} takes {', '.join(sample)}; allowed: {', '.join(SourceFacts.giving(sample))}"
        )
    if isinstance(first, Ids) or not ModelFacts.of(config.model.name).ids_only:
        return
    if source.vocab and wanted.keys() <= first.leaves.keys() and first.leaves["inputs"].dtype.kind in "iu":
        return
    raise UserError(
        f"data.source: {source.info['name']!r} gives {', '.join(first.leaves)}, and model.name"
        f" {config.model.name!r} takes {', '.join(sorted(wanted))} of a vocabulary; allowed:"
        f" {', '.join(SourceFacts.with_fact(ids=True))}; or a model of your own, by a dotted path"
    )


def check_labels(config: Config, source: Source) -> None:
    """Raise `UserError` when the data holds labels that the model does not have."""
    options = options_of(ModelFacts.folder, config.model.name)
    # A user's own model without options has the keys of all shipped ones, and may read none of them.
    classes = config.model.classes if len(options) == 1 and hasattr(options[0], "classes") else None
    if classes is not None and source.labels is not None and source.labels > classes:
        raise UserError(
            f"model.classes: {classes} is too small for {source.info['name']!r}, whose labels need {source.labels}"
        )


def check_shapes(config: Config, source: Source) -> None:
    """Raise `UserError` when samples have another shape than keys of the model say, such as another size of image."""
    leaves, model = {} if isinstance(source.first, Ids) else source.first.leaves, config.model
    numbers = {each.name: getattr(model, each.name) for each in fields(model)}
    for name, wanted in sample_of(config).items():
        found = leaves[name].shape if name in leaves else wanted.shape  # of windows of ids data.seq_len says it
        for key in [key for key, value in numbers.items() if type(value) is int and found != wanted.shape]:
            other = sample_of(replace(config, model=replace(model, **{key: numbers[key] + 1})))[name].shape
            changes = [i for i, (a, b) in enumerate(zip(wanted.shape, other, strict=True)) if a != b]
            if [found[i : i + 1] for i in changes] != [wanted.shape[i : i + 1] for i in changes]:
                raise UserError(
                    f"model.{key}: {numbers[key]}, but data.source {source.info['name']!r} gives {name} {list(found)},"
                    f" and the model takes {list(wanted.shape)}; give the key that fits, or another data.source"
                )


def packed(config: Config, source: Source) -> Source:
    """The source with document starts only where `data.packing` wants them. Raises `UserError` if it has none."""
    if source.parts:
        parts = tuple(part._replace(source=packed(config, part.source)) for part in source.parts)
        return source._replace(parts=parts, apart=config.data.apart)
    if config.data.packing == "none":
        return source._replace(documents=None)
    if source.documents is None:
        raise UserError(
            f"data.packing: {config.data.packing!r} needs document starts, and source"
            f" {source.info['name']} gives none; allowed: none; or data.source=tokens"
        )
    return source._replace(apart=config.data.apart)


def work_of_a_step(config: Config, source: Source) -> tuple[int, str]:
    """(tokens that a step is trained on, "tokens"); where samples are not ids, (samples, "samples")."""
    leaves = leaves_of(source, global_batch=config.data.global_batch, seq_len=config.data.seq_len)
    if source.vocab and "targets" in leaves:
        return math.prod(leaves["targets"].shape), "tokens"
    return config.data.global_batch, "samples"


def loader_of(config: Config, source: Source, mesh: Mesh) -> GlobalBatches:
    """The batches that a configuration trains on, by the number of the step."""
    return make_loader(
        source,
        seq_len=config.data.seq_len,
        global_batch=config.data.global_batch,
        seed=config.train.seed,
        sharding=NamedSharding(mesh, BATCH_SPEC),
    )
