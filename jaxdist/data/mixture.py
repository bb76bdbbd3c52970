"""Several sources, mixed with weights. Which one sample k comes from is a pure function of k.

Samples come in blocks of BLOCK. In each block each source has its exact number of samples, and at any place in it no
source is a whole sample or more ahead of its share or behind. So a batch has the proportions of the whole to within two
samples: random draws would stray by the square root of its size.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jaxdist import registry
from jaxdist.config.rules.fields import SMALLEST_SHARE, parse_mixture
from jaxdist.config.schema import DataConfig
from jaxdist.data.file_array import Ids
from jaxdist.data.loader import GlobalBatches, Loader, batch_shapes
from jaxdist.data.samples import Leaves, Samples, batch_leaves, shuffled, spread
from jaxdist.data.source import Part, Source, fingerprint, kind_of
from jaxdist.errors import UserError

BLOCK = round(1 / SMALLEST_SHARE)


def load_source(config: DataConfig) -> Source:
    """What `data` says: a source, or a mixture of some. Raises `UserError`, also where bytes and other tokens meet."""
    if not config.mixture:
        return registry.make("jaxdist.data.sources", config.source, Source, config, key="data.source")
    said = parse_mixture(config.mixture)
    counts = block_counts([each.weight for each in said])
    parts = tuple(
        Part(each.name, count, load_source(part))
        for each, count, part in zip(said, counts, config.parts(), strict=True)
    )
    units = {part.name: _unit(part.source) for part in parts}
    if len(set(units.values())) > 1:
        raise UserError(
            f"data.mixture: {', '.join(f'{name} holds {unit}' for name, unit in units.items())}; sources of"
            " a mixture must be of one kind; prepare all texts with one tokenizer"
        )
    infos = [part.source.info for part in parts]
    total = {key: _total([info[key] for info in infos]) for key in ("train", "held_out", "files", "held_out_files")}
    parts_of = ((f"{part.name} {kind_of(part.source)}", 64, [part.source.info["sha256"].encode()]) for part in parts)
    info = {
        "name": "mixture of " + ", ".join(f"{part.name} ({part.samples / BLOCK:g})" for part in parts),
        "path": ", ".join(info["path"] for info in infos),
        "unit": infos[0]["unit"],
        **total,
        "sha256": fingerprint(parts_of),
        "lines": [f"{part.name}: {line}" for part in parts for line in part.source.info.get("lines", ())],
    }
    nothing = np.zeros(0, np.int32)
    labels = max((part.source.labels or 0 for part in parts), default=0) or None
    return Source(nothing, nothing, max(part.source.vocab for part in parts), info, None, parts, labels=labels)


def _unit(source: Source) -> str:
    return source.info["unit"] if isinstance(source.train, Ids) else kind_of(source)


def _total(numbers: Sequence[int | None]) -> int | None:
    """None: one of them is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def block_counts(weights: Sequence[float]) -> list[int]:
    """How many of BLOCK samples each source has: its share, rounded so that the sum is BLOCK (largest remainders)."""
    exact = [Fraction(str(weight)) for weight in weights]
    quotas = [weight * BLOCK / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    for i in sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])[: BLOCK - sum(counts)]:
        counts[i] += 1
    assert min(counts) >= 1 and sum(counts) == BLOCK
    return counts


def block_order(counts: Sequence[int]) -> np.ndarray:
    """The source of each sample of a block: after n samples source i has had counts[i] n / BLOCK to within
    1 - 1 / (2m - 2), m sources (Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32)."""
    block, twice = sum(counts), 2 * len(counts) - 2
    assert twice > 0, "one source is no mixture"
    behind = [0] * len(counts)  # times block * twice
    order = np.zeros(block, np.int64)
    for n in range(block):
        behind = [each + twice * count for each, count in zip(behind, counts, strict=True)]
        ready = [i for i, each in enumerate(behind) if each >= block]
        order[n] = chosen = min(ready, key=lambda i: Fraction((twice - 1) * block - behind[i], counts[i]))
        behind[chosen] -= twice * block
    return order


class MixedLoader(GlobalBatches):
    """Global batches as `Loader` gives them, of the parts of a mixture, each with its own shuffled epochs."""

    def __init__(
        self, parts: Sequence[Part], *, seq_len: int, global_batch: int, sharding: NamedSharding, seed: int
    ) -> None:
        self._order = block_order([part.samples for part in parts])
        self._counts = np.array([part.samples for part in parts])
        self._rank = np.empty(BLOCK, np.int64)  # of a sample among those of its source in the block
        for i, part in enumerate(parts):
            self._rank[self._order == i] = np.arange(part.samples)
        batches: dict[str, Any] = {"global_batch": global_batch, "sharding": sharding}
        self._loaders = [
            make_loader(part.source, seq_len=seq_len, seed=_seed_of(seed, i), **batches) for i, part in enumerate(parts)
        ]
        super().__init__(self._mixed, self._loaders[0].leaves, **batches)

    def choose(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part of each sample `k`, and which of the part's own samples it is, both from 0."""
        block, place = np.divmod(k, BLOCK)
        part = self._order[place]
        return part, block * self._counts[part] + self._rank[place]

    def _mixed(self, k: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of samples `k` (int64), each from its part."""
        part, own = self.choose(k)
        made = [(part == i, loader.samples(own[part == i])) for i, loader in enumerate(self._loaders)]
        whole = {leaf: np.empty((part.size, *value.shape[1:]), value.dtype) for leaf, value in made[0][1].items()}
        for here, values in made:
            for leaf, value in values.items():
                whole[leaf][here] = value
        return whole


def _seed_of(seed: int, part: int) -> int:
    """A seed for one part, so that two parts with the same text are read in different orders."""
    return int(np.random.SeedSequence(seed, spawn_key=(part,)).generate_state(1, np.uint64)[0])


def leaves_of(source: Source, *, seq_len: int, global_batch: int) -> Leaves:
    """Shapes and dtypes of the leaves of a global batch of `make_loader`."""
    first = source.first
    if isinstance(first, Ids):
        return batch_shapes(global_batch, seq_len, apart=source.apart)
    return batch_leaves(first.leaves, global_batch)


def make_loader(
    source: Source, *, seq_len: int, global_batch: int, sharding: NamedSharding, seed: int
) -> GlobalBatches:
    """The training batches of a source, or of a mixture."""
    batches: dict[str, Any] = {"global_batch": global_batch, "sharding": sharding, "seed": seed}
    if source.parts:
        return MixedLoader(source.parts, seq_len=seq_len, **batches)
    if not isinstance(source.train, Ids):
        return shuffled(source.train, **batches)
    documents = source.documents and source.documents[0]
    return Loader(source.train, seq_len=seq_len, documents=documents, apart=source.apart, **batches)


def make_eval_loader(
    source: Source, *, seq_len: int, global_batch: int, sharding: NamedSharding, batches: int | None
) -> GlobalBatches:
    """The held-out batches of a source that is no mixture, the same each time. batches: at most so many; None: all."""
    if source.held_out is None:
        raise UserError(
            f"data.val_path: null, and source {source.info['name']} holds nothing out; give one, or train"
            " without evaluations: train.eval_every=0"
        )
    fixed: dict[str, Any] = {"global_batch": global_batch, "sharding": sharding, "batches": batches}
    if isinstance(source.held_out, Samples):
        return spread(source.held_out, **fixed)
    documents = source.documents and source.documents[1]
    marked: dict[str, Any] = {"documents": documents, "apart": source.apart}
    return Loader(source.held_out, seq_len=seq_len, shuffle=False, **marked, **fixed)
