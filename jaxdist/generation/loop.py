"""The loop of generation: compiled programs that draw tokens, and what the host does between them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.collectives import to_varying
from jaxdist.errors import UserError
from jaxdist.generation.forward import cached_passes, whole_passes, why_no_cache
from jaxdist.generation.sampling import KEYS, Sampling, draw
from jaxdist.mesh import AXES, BATCH_AXES, batch_shards
from jaxdist.model import ModelDef
from jaxdist.parallel.strategy import Strategy
from jaxdist.specs import PyTree, active_specs, axes_by_dim, batch_spec, from_entries, map_specs, shard_of

SHORTEST = 16  # the shortest of the lengths for which programs are compiled; each other one is twice the one before


def bucket(length: int, most: int | None = None) -> int:
    """The length of the program for this length: a power of two, and at most `most`."""
    rounded = max(SHORTEST, 1 << (length - 1).bit_length())
    return rounded if most is None else max(length, min(rounded, most))


def whole_sequences(mesh: Mesh, specs: PyTree) -> tuple[Mesh, PyTree]:
    """The same devices with those of `context` counted to `fsdp`, and the specs of the parameters there.

    A text gets one new position at a time, which cannot be split: the devices of `context` have other texts instead.
    Shards stay where they are, but for parameters that `fsdp` and `context` do not both split, which become whole, and
    for those that `expert` splits too, which are then in another order.
    """
    if mesh.shape["context"] == 1:
        return mesh, specs
    both = ("fsdp", "context")
    fsdp, context = map(AXES.index, both)
    grid = np.moveaxis(mesh.devices, context, fsdp + 1)
    sizes = list(mesh.devices.shape)
    sizes[fsdp], sizes[context] = sizes[fsdp] * sizes[context], 1

    def one(spec: P) -> P:
        if (shard := shard_of(spec)) is None:
            return spec
        parts = math.prod(mesh.shape[axis] for axis in both if axis in shard.axes)
        kept = parts == mesh.shape["fsdp"] * mesh.shape["context"]
        first, gone = (shard.axes[0], both) if kept else (None, shard.axes)
        # Its place in an entry counts: one over (fsdp, context, pipe) is in order over (fsdp, pipe) only.
        entries = [
            tuple("fsdp" if axis == first else axis for axis in entry if axis == first or axis not in gone)
            for entry in axes_by_dim(spec, len(spec))
        ]
        return from_entries(entries)

    return Mesh(grid.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES)), map_specs(one, specs)


class Generator:
    """Draws tokens after prompts, for some rows at a time.

    It compiles one program that reads the prompts, for each length of `bucket`, and one that draws up to `chunk` tokens
    in a loop, for each length of the cache. A row's tokens do not depend on the other rows.

    model: for evaluation, without dropout, in its precision (`in_precision`).
    specs: of the parameters, as the strategy stores them.
    positions: the length of the longest text; None: that of the model, if it has a limit.
    cache: False computes the whole text again for each token. So does a model that has no cache.
    """

    def __init__(
        self,
        model: ModelDef,
        mesh: Mesh,
        specs: PyTree,
        strategy: Strategy,
        sampling: Sampling,
        *,
        positions: int | None = None,
        cache: bool = True,
        chunk: int = 16,
    ) -> None:
        of_training = mesh
        mesh, specs = whole_sequences(mesh, specs)
        # Programs take arrays whose devices are in their own order; `expert` lies between `fsdp` and `context`.
        same = list(mesh.devices.flat) == list(of_training.devices.flat)
        self._layout = None if same else map_specs(lambda spec: NamedSharding(mesh, spec), specs)
        self.mesh, self.chunk, self.sampling = mesh, chunk, sampling
        self.positions = min((each for each in (positions, model.positions) if each is not None), default=None)
        of = (model.shapes["head"], model.shapes["embed"] if model.tied else None)
        self.vocab = None if model.vocabulary is None else len(jax.eval_shape(model.vocabulary, *of)[0])
        self.why_no_cache = "it is switched off" if not cache else why_no_cache(model, mesh)
        make = cached_passes if self.why_no_cache is None else whole_passes
        self._forward = make(model, mesh, specs, strategy)
        rows, kept, specs = batch_spec(mesh), self._forward.specs, active_specs(specs, mesh)
        region = lambda function, given, out: jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=out)  # noqa: E731
        self._start = jax.jit(
            lambda params, *given, new: region(
                lambda *each: self._begin(*each, new=new), (specs, rows, rows, rows), (rows, kept)
            )(params, *given),
            static_argnames="new",
        )
        self._go_on = jax.jit(region(self._more, (specs, kept, rows, rows, rows, P()), (rows, kept)), donate_argnums=1)

    def _begin(self, params: PyTree, tokens: jax.Array, lengths: jax.Array, keys: jax.Array, *, new: int) -> Any:
        """(The first token of each row, what is kept)."""
        tokens, lengths, keys = to_varying((tokens, lengths, keys), BATCH_AXES)
        logits, kept = self._forward.start(self._forward.begin(params), tokens, lengths, new)
        return draw(logits, jax.random.wrap_key_data(keys, impl=KEYS), lengths, self.sampling), kept

    def _more(
        self, params: PyTree, kept: PyTree, tokens: jax.Array, positions: jax.Array, keys: Any, steps: Any
    ) -> Any:
        """(`steps` tokens of each row, [B, chunk], what is kept). tokens: the last ones, and their positions."""
        tokens, positions, keys = to_varying((tokens, positions, keys), BATCH_AXES)
        begun, keys = self._forward.begin(params), jax.random.wrap_key_data(keys, impl=KEYS)

        def body(step: jax.Array, carry: PyTree) -> PyTree:
            tokens, positions, kept, found = carry
            logits, kept = self._forward.go_on(begun, kept, tokens, positions)
            tokens, positions = draw(logits, keys, positions + 1, self.sampling), positions + 1
            return (
                tokens,
                positions,
                kept,
                lax.dynamic_update_slice(found, tokens[:, None], (jnp.zeros_like(step), step)),
            )

        found = to_varying(jnp.zeros((len(tokens), self.chunk), jnp.int32), BATCH_AXES)
        *_, kept, found = lax.fori_loop(jnp.int32(0), steps, body, (tokens, positions, kept, found))
        return found, kept

    def check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Raise `UserError` for a prompt without tokens, for one after which there is no room for a token, and for ids
        that are not in the model's vocabulary."""
        if max_tokens < 1:
            raise UserError(f"max_tokens: {max_tokens}; allowed: 1 and more")
        for number, prompt in enumerate(prompts):
            if not (length := len(prompt)):
                raise UserError(f"prompt {number}: has no tokens; give at least one, such as that which begins a text")
            if self.positions is not None and length >= self.positions:
                raise UserError(
                    f"prompt {number}: has {length} tokens, but the model has {self.positions} positions; allowed: up"
                    f" to {self.positions - 1}, which leaves one to generate"
                )
            if self.vocab and not 0 <= (wrong := max(prompt) if min(prompt) >= 0 else min(prompt)) < self.vocab:
                raise UserError(
                    f"prompt {number}: has the token id {wrong}, and the model's vocabulary has the ids 0 to"
                    f" {self.vocab - 1}; give the tokenizer of this model"
                )

    def trace(self, params: PyTree, max_tokens: int) -> jax.ShapeDtypeStruct:
        """Trace the programs, without compiling: raises what they raise. Returns the type of a chunk's tokens.

        params: may be ShapeDtypeStructs.
        """
        rows, width = batch_shards(self.mesh), bucket(1, self.positions)
        ids, keys = (jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, 2), jnp.uint32))
        prompt = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        _, kept = self._start.eval_shape(params, prompt, ids, keys, new=self._slots(width, 1, max_tokens))
        found: jax.ShapeDtypeStruct = self._go_on.eval_shape(params, kept, ids, ids, keys, np.int32(1))[0]
        return found

    def __call__(
        self, params: PyTree, prompts: Sequence[Sequence[int]], keys: np.ndarray, max_tokens: int
    ) -> Iterator[np.ndarray]:
        """New tokens of all rows, int32 [B, n], chunk after chunk, `max_tokens` in all.

        Where the model has fewer positions than a row would need, that row's last tokens mean nothing:
        `room` says how many do.

        keys: of the rows, from `row_keys`.
        """
        self.check(prompts, max_tokens)
        params = params if self._layout is None else jax.device_put(params, self._layout)
        count, shards = len(prompts), batch_shards(self.mesh)
        rows = -(-count // shards) * shards  # rows that fill the last shard repeat the first one
        filled = [prompts[row if row < count else 0] for row in range(rows)]
        lengths = np.array([len(prompt) for prompt in filled], np.int32)
        most = max(self.room(length, max_tokens) for length in lengths[:count])
        width = bucket(int(lengths.max()), self.positions)
        tokens = np.zeros((rows, width), np.int32)
        for row, prompt in zip(tokens, filled, strict=True):
            row[: len(prompt)] = prompt
        keys = np.concatenate([keys, np.repeat(keys[:1], rows - count, axis=0)])
        placed, new = (
            [self._placed(each) for each in (tokens, lengths, keys)],
            self._slots(width, int(lengths.max()), most),
        )
        last, kept = self._start(params, *placed, new=new)
        yield self._fetched(last)[:count, None]
        done = 1
        while done < most:
            steps = min(self.chunk, most - done)
            at = self._placed(lengths + done - 1)
            found, kept = self._go_on(params, kept, last, at, placed[2], np.int32(steps))
            new_tokens = self._fetched(found)
            last, done = self._placed(new_tokens[:, steps - 1]), done + steps
            yield new_tokens[:count, :steps]

    def _slots(self, width: int, longest: int, most: int) -> int:
        """The slots for new tokens, behind those of the prompts; without a cache positions that the texts need beside
        `width`."""
        if self.why_no_cache is None:
            return bucket(most)
        return max(0, bucket(longest + most, self.positions) - width)

    def room(self, length: int, max_tokens: int) -> int:
        """How many tokens may follow a prompt of this length."""
        return max_tokens if self.positions is None else min(max_tokens, self.positions - int(length))

    def _placed(self, array: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self.mesh, batch_spec(self.mesh))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _fetched(self, array: jax.Array) -> np.ndarray:
        if jax.process_count() == 1:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
