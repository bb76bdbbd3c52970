"""Tables of pipelines: a machine that knows nothing of how they are made can run every one of them, in as many places
of its buffers as they say and no fewer; damaged tables are refused."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from levels import others_slow

from jaxdist.errors import UserError
from jaxdist.parallel.pipeline.table import Buffer, Slots, Ticks, allocate_slots, check_table, moments
from jaxdist.parallel.schedules import gpipe, interleaved, one_f_one_b, zero_bubble

Pair = tuple[int, int]
TABLES = {
    "gpipe": gpipe.table,
    "one_f_one_b": one_f_one_b.table,
    "interleaved": interleaved.table,
    "zero_bubble": zero_bubble.table,
}
MICROBATCHES = range(1, 41)


def tables(name: str, stages: int) -> Iterator[Ticks]:
    for microbatches in MICROBATCHES:
        for chunks in range(1, 5 if name == "interleaved" and microbatches % stages == 0 else 2):
            yield TABLES[name](stages, microbatches, chunks)


class Places:
    """A buffer of one stage: each place holds one thing at a time, and is read only while it holds it."""

    def __init__(self, size: int) -> None:
        self.size, self.most = size, 0
        self.held: dict[int, Pair] = {}

    def write(self, place: int, pair: Pair) -> None:
        assert 0 <= place < self.size and place not in self.held
        self.held[place] = pair
        self.most = max(self.most, len(self.held))

    def read(self, place: int, pair: Pair, *, last: bool) -> None:
        assert self.held[place] == pair
        if last:
            del self.held[place]


def endless(ticks: Ticks) -> Slots:
    """A place of its own for every pair."""
    tables = (ticks.forward, ticks.backward, ticks.weights)
    own = Buffer(10**6, *(np.where(table[..., 0] < 0, -1, 1000 * table[..., 0] + table[..., 1]) for table in tables))
    return Slots(own, own._replace(forward=np.full_like(own.forward, -1)), False)


def run(ticks: Ticks, slots: Slots) -> tuple[list[int], list[int], bool]:
    """Run the table: one register for the message from each side, and buffers.

    Returns the most places in use on each stage, of residuals and of cotangents, and whether a loss had to wait.
    """
    stages, last, places = ticks.stages, ticks.chunks * ticks.stages - 1, ticks.weights.shape[2]
    kept, cotangents = ([Places(buffer.size) for _ in range(stages)] for buffer in slots[:2])
    parts = (ticks, *slots[:2])
    columns = [(kind, *(getattr(part, kind).tolist() for part in parts)) for kind in ("forward", "backward")]
    columns += [("weights", *(part.weights[:, :, w].tolist() for part in parts)) for w in range(places)]
    from_before: list[Pair | None] = [None] * stages
    from_next: list[Pair | None] = [None] * stages
    done: set[tuple[str, int, int, int]] = set()
    late = False
    for t in range(ticks.length):
        to_next: list[Pair | None] = [None] * stages
        to_before: list[Pair | None] = [None] * stages
        for s in range(stages):
            for kind, table, residual, cotangent in columns:
                m, c = pair = tuple(table[t][s])
                if pair == (-1, -1):
                    assert residual[t][s] == cotangent[t][s] == -1
                    continue
                assert 0 <= m < ticks.microbatches and 0 <= c < ticks.chunks and (kind, s, m, c) not in done
                done.add((kind, s, m, c))
                virtual = c * stages + s
                if kind == "forward":
                    assert virtual == 0 or from_before[s] == (m, virtual - 1)
                    to_next[s] = (m, virtual)
                    kept[s].write(residual[t][s], pair)
                elif kind == "backward":
                    assert virtual == last or from_next[s] == (m, virtual + 1)
                    to_before[s] = (m, virtual)
                    late |= virtual == last and tuple(ticks.forward[t, s]) != pair
                    kept[s].read(residual[t][s], pair, last=places == 0)
                    if places:
                        cotangents[s].write(cotangent[t][s], pair)
                else:
                    kept[s].read(residual[t][s], pair, last=True)
                    cotangents[s].read(cotangent[t][s], pair, last=True)
        from_before, from_next = [to_next[-1], *to_next[:-1]], [*to_before[1:], to_before[0]]
    assert len(done) == ticks.microbatches * ticks.chunks * stages * (3 if places else 2)
    return [each.most for each in kept], [each.most for each in cotangents], late


@pytest.mark.parametrize("stages", others_slow([*range(1, 9), 16], 1, 2, 3, 4, 8))
@pytest.mark.parametrize("name", TABLES)
def test_tables_run_in_their_buffers_and_in_no_smaller_ones(name: str, stages: int) -> None:
    for ticks in tables(name, stages) if stages <= 8 else [TABLES[name](stages, m) for m in (1, 15, 16, 31, 32)]:
        check_table(ticks)
        slots = allocate_slots(ticks)
        kept, cotangents, late = run(ticks, slots)
        assert slots.residuals.size == max(kept)
        assert slots.cotangents.size == max(cotangents)
        assert slots.late_loss == late
        for array in (*ticks[2:], *slots.residuals[1:], *slots.cotangents[1:]):
            assert array.dtype == np.int32 and array.flags.c_contiguous


@pytest.mark.parametrize("stages", range(1, 9))
def test_lengths_and_places_are_those_of_the_docstrings(stages: int) -> None:
    for m in MICROBATCHES:
        assert gpipe.table(stages, m).length == 2 * (m + stages - 1)
        assert allocate_slots(gpipe.table(stages, m)).residuals.size == m
        assert allocate_slots(gpipe.table(stages, m)).late_loss
        for module in (one_f_one_b, zero_bubble):
            assert module.table(stages, m).length == m + 2 * stages - 2
            slots = allocate_slots(module.table(stages, m))
            assert slots.residuals.size == min(m, 2 * stages - 1)  # with W apart, no more than without
            assert not slots.late_loss
        ticks = one_f_one_b.table(stages, m)
        kept = run(ticks, endless(ticks))[0]
        assert kept == [min(m, 2 * (stages - stage) - 1) for stage in range(stages)]


@pytest.mark.parametrize("chunks", range(1, 5))
def test_lengths_and_places_with_chunks(chunks: int) -> None:
    for stages in range(1, 9):
        for m in range(stages, 41, stages):
            ticks = interleaved.table(stages, m, chunks)
            assert ticks.length == chunks * stages - 1 + m * chunks + stages - 1
            assert allocate_slots(ticks).residuals.size == min(m * chunks, (chunks + 1) * stages - 1)
            assert not allocate_slots(ticks).late_loss


def test_one_chunk_is_one_f_one_b() -> None:
    for stages, microbatches in ((1, 1), (3, 7), (4, 8)):
        one, other = one_f_one_b.table(stages, microbatches), interleaved.table(stages, microbatches)
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_places_that_gradients_of_parameters_need() -> None:
    for stages in (1, 2, 3, 4, 8, 16):
        for m in (1, stages, 2 * stages - 2 or 1, 2 * stages - 1, 2 * stages, 4 * stages):
            ticks = zero_bubble.table(stages, m)
            assert ticks.weights.shape[2] <= 2 and (ticks.weights >= 0).any(axis=(0, 1, 3)).all()
            assert allocate_slots(ticks).cotangents.size == min(m, max(1, 2 * stages - 2))


def test_tables_of_the_papers() -> None:
    """Megatron's figure 4 (S = 4, M = 8, v = 2), its first and last stage: the order of forwards and of backwards."""
    ticks = interleaved.table(4, 8, 2)
    once = [(m, c) for first in (0, 4) for c in (0, 1) for m in range(first, first + 4)]
    back = [(m, 1 - c) for m, c in once]
    for stage in (0, 3):
        for table, want in ((ticks.forward, once), (ticks.backward, back)):
            assert [(int(m), int(c)) for m, c in table[:, stage] if m >= 0] == want
    when = moments(ticks)
    assert when.forward[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert when.backward[0].tolist() == when.weights[0].tolist() == [[14, 13, 12, 11], [10, 9, 8, 7]]


# Damage


def put(table: str, where: tuple[int, ...], value: Any) -> Callable[[Ticks], Ticks]:
    def change(ticks: Ticks) -> Ticks:
        array = getattr(ticks, table).copy()
        array[where] = value
        return ticks._replace(**{table: array})

    return change


def moved(table: str, by: int, stage: int | slice = slice(None)) -> Callable[[Ticks], Ticks]:
    def change(ticks: Ticks) -> Ticks:
        array = getattr(ticks, table).copy()
        array[:, stage] = np.roll(array[:, stage], by, axis=0)
        return ticks._replace(**{table: array})

    return change


def cast(table: str, dtype: Any) -> Callable[[Ticks], Ticks]:
    return lambda ticks: ticks._replace(**{table: getattr(ticks, table).astype(dtype)})


DAMAGE = [  # of zero_bubble with S = 3, M = 6: F of microbatch m on stage s at tick m + s, B at m + 4 - s
    (put("forward", (3, 1), -1), r"stage 1: microbatch 2, chunk 0 has 0 F, not one; ticks \[\]"),
    (put("backward", (5, 0), -1), "stage 0: microbatch 1, chunk 0 has 0 B"),
    (put("weights", (4, 0, 0), -1), "stage 0: microbatch 0, chunk 0 has 0 W"),
    (put("forward", (8, 0), (3, 0)), r"stage 0: microbatch 3, chunk 0 has 2 F, not one; ticks \[3, 8\]"),
    (put("forward", (2, 0), (1, 0)), "microbatch 1, chunk 0 has 2 F"),
    (put("forward", (2, 0), (6, 0)), "stage 0, tick 2: F of microbatch 6, chunk 0; there are 6 microbatches"),
    (put("backward", (4, 0), (0, 1)), "stage 0, tick 4: B of microbatch 0, chunk 1; there are .* 1 chunks"),
    (put("backward", (4, 0), (0, -1)), "stage 0, tick 4: B of microbatch 0, chunk -1"),
    (put("backward", (0, 0), (-1, 0)), "stage 0, tick 0: B of microbatch -1, chunk 0"),
    (put("weights", (0, 1, 0), (-2, -2)), "stage 1, tick 0: W of microbatch -2"),
    (put("forward", (slice(1, 3), 0), [(2, 0), (1, 0)]), "stage 1: microbatch 1, chunk 0 has F at tick 2; must be 3"),
    (moved("forward", 1, stage=1), "stage 1: microbatch 0, chunk 0 has F at tick 2; must be 1, .* F on stage 0"),
    (moved("forward", 1, stage=2), "stage 2: microbatch 0, chunk 0 has F at tick 3; must be 2, .* F on stage 1"),
    (moved("backward", -1, stage=0), "stage 0: microbatch 0, chunk 0 has B at tick 3; must be 4, .* B on stage 1"),
    (moved("backward", 1, stage=1), "stage 0: microbatch 0, chunk 0 has B at tick 4; must be 5"),
    (moved("backward", -1), "stage 2: microbatch 0, chunk 0 has B at tick 1, before its F at 2"),
    (moved("weights", -1, stage=0), "stage 0: microbatch 0, chunk 0 has W at tick 3, before its B at 4"),
    (cast("forward", np.int64), "forward is int64, not int32"),
    (cast("weights", np.int16), "weights is int16"),
    (lambda ticks: ticks._replace(backward=ticks.backward[1:]), "backward has shape"),
    (lambda ticks: ticks._replace(forward=ticks.forward[..., 0]), "forward has shape"),
    (lambda ticks: ticks._replace(weights=ticks.weights[..., 0]), "weights has shape"),
    (lambda ticks: ticks._replace(microbatches=7), "microbatch 6, chunk 0 has 0 F"),
    (lambda ticks: ticks._replace(chunks=2), "microbatch 0, chunk 1 has 0 F"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_tables_are_refused(damage: Callable[[Ticks], Ticks], message: str) -> None:
    ticks = zero_bubble.table(3, 6)
    check_table(ticks)
    for refuse in (check_table, allocate_slots):
        with pytest.raises(AssertionError, match=message):
            refuse(damage(ticks))


def runs(ticks: Ticks) -> bool:
    try:
        run(ticks, endless(ticks))
    except (AssertionError, KeyError):
        return False
    return True


@pytest.mark.parametrize("name", TABLES)
def test_what_is_refused_is_what_the_machine_cannot_run(name: str) -> None:
    """Two entries of one stage change places, or one entry becomes another: some such tables run, most do not."""
    random = np.random.default_rng(0)
    ticks = TABLES[name](3, 6, 2 if name == "interleaved" else 1)
    kinds = [kind for kind in ("forward", "backward", "weights") if getattr(ticks, kind).size]
    seen = {True: 0, False: 0}
    for _ in range(300):
        kind = str(random.choice(kinds))
        array = getattr(ticks, kind).copy()
        stage, (a, b) = int(random.integers(3)), random.integers(ticks.length, size=2)
        array[a, stage] = array[b, stage] if random.random() < 0.2 else array[a, stage]
        array[[a, b], stage] = array[[b, a], stage]
        changed = ticks._replace(**{kind: array})
        fine = runs(changed)
        seen[fine] += 1
        if fine:
            check_table(changed)
        else:
            with pytest.raises(AssertionError):
                check_table(changed)
    assert min(seen.values()) > 10, seen


@pytest.mark.parametrize("buffer", ["residuals", "cotangents"])
def test_the_machine_notices_wrong_places(buffer: str) -> None:
    """A machine that would run anything would prove nothing."""
    ticks = zero_bubble.table(3, 6)
    slots = allocate_slots(ticks)
    run(ticks, slots)
    used = getattr(slots, buffer)._asdict()
    fewer = {kind: np.where(used[kind] == 1, 0, used[kind]) for kind in Ticks._fields[2:]}
    with pytest.raises(AssertionError):
        run(ticks, slots._replace(**{buffer: getattr(slots, buffer)._replace(**fewer)}))


# Counts that have no table


@pytest.mark.parametrize(
    ("name", "counts", "parts"),
    [
        ("gpipe", (4, 0, 1), ("parallel.microbatches: 0", "1 and more", "16 say")),
        ("one_f_one_b", (4, -1, 1), ("parallel.microbatches: -1",)),
        ("gpipe", (4, 8, 2), ("parallel.chunks: 2", "gpipe", "allowed: 1", "interleaved")),
        ("one_f_one_b", (4, 8, 2), ("parallel.chunks: 2", "one_f_one_b", "allowed: 1")),
        ("zero_bubble", (4, 8, 0), ("parallel.chunks: 0", "zero_bubble", "allowed: 1")),
        ("zero_bubble", (2, 0, 1), ("parallel.microbatches: 0", "8 say")),
        ("interleaved", (4, 8, 0), ("parallel.chunks: 0", "interleaved", "1 and more")),
        ("interleaved", (4, 10, 2), ("parallel.microbatches: 10", "mesh.pipe 4", "chunks 2", "8, 12", ".chunks=1")),
        ("interleaved", (4, 3, 2), ("parallel.microbatches: 3", "work: 4;")),
    ],
)
def test_wrong_counts_are_named_and_mended(name: str, counts: tuple[int, int, int], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        TABLES[name](*counts)
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message
