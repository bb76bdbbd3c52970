"""Reading messages out of programs that are not collectives of ours, pictures of rounds, and the tables of
docs/collectives.md, which are counted."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist import collectives, registry
from jaxdist.collectives import get_algorithm, psum, to_varying
from jaxdist.errors import UserError
from jaxdist.plan.report.draw_rounds import arrows, data_of, draw_rounds, lanes, share
from jaxdist.plan.traced.rounds import Message, Round, busiest_rank_bytes, counted, has_swap, received, rounds_of, sent

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "collectives.md"
PICTURES = ROOT / "docs" / "pictures"
NAMES = [name for name in registry.names("jaxdist.collectives.algorithms") if name not in ("native", "auto")]
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter")
X = jax.ShapeDtypeStruct((3,), jnp.float32)
RIGHT, LEFT = [(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]
AROUND = child.QUICK | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def move(x: jax.Array, pairs: list[tuple[int, int]] = RIGHT) -> jax.Array:
    return lax.ppermute(x, "data", pairs)


def read(function: Callable[..., Any], *shapes: Any, ports: int = 1, **mesh: int) -> list[Round]:
    return rounds_of(function, *(shapes or (X,)), mesh=mesh or {"data": 3}, ports=ports)


def test_rounds_follow_what_depends_on_what() -> None:
    assert len(read(lambda x: move(move(x)))) == 2
    assert read(lambda x: x) == []
    one = read(lambda x: move(x))[0]
    assert one == (Message(0, 1, 12, 0), Message(1, 2, 12, 0), Message(2, 0, 12, 0))
    # Independent, and the ranks are free: one round. As soon as a rank would send twice, two.
    assert len(read(lambda x: move(x, [(0, 1)]) + move(x, [(1, 2)]))) == 1
    assert len(read(lambda x: move(x, [(0, 1)]) + move(x, [(0, 2)]))) == 2
    assert len(read(lambda x: move(x, [(1, 0)]) + move(x, [(2, 0)]))) == 2
    assert len(read(lambda x: move(x, [(0, 1)]) + move(x, [(0, 2)]), ports=2)) == 1
    assert len(read(lambda x: move(x) + move(x, LEFT), ports=2)) == 1
    # A third that depends on the first is not kept waiting by the second, on which it does not depend.
    rounds = read(lambda x: (move(move(x, [(0, 1)]), [(1, 2)]), move(move(x, [(2, 0)]), [(2, 0)])))
    assert [len(messages) for messages in rounds] == [2, 2]


def test_loops_are_unrolled() -> None:
    def ring(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda _, x: jax.jit(move)(x), x)

    def two_chains(x: jax.Array) -> Any:
        """The carry passes two values on, each by itself; rows and results are not carried."""

        def body(carry: Any, row: jax.Array) -> Any:
            a, b = carry
            return (move(a, [(0, 1)]), move(b, [(1, 2)])), move(row, [(2, 0)])

        return lax.scan(body, (x, x), jnp.stack([x, x]))

    assert len(read(ring)) == 5
    assert [message.call for messages in read(ring) for message in messages[:1]] == [0, 1, 2, 3, 4]
    assert [len(messages) for messages in read(two_chains)] == [3, 3]
    assert len(read(jax.checkpoint(ring))) == 5
    assert len(read(lambda x: lax.scan(lambda c, _: (ring(c), None), x, None, length=3)[0])) == 15


def test_branches_must_communicate_alike() -> None:
    def alike(x: jax.Array) -> jax.Array:
        return lax.cond(x[0] > 0, lambda x: move(2 * x), lambda x: move(3 * x), x)

    def unlike(x: jax.Array) -> jax.Array:
        return lax.cond(x[0] > 0, lambda x: move(x), lambda x: move(x, LEFT), x)

    assert len(read(alike)) == 1
    assert len(read(lambda x: alike(move(x)))) == 2
    with pytest.raises(UserError, match="cond: its branches"):
        read(unlike)


def test_what_cannot_be_known_is_refused() -> None:
    def until(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x[0] < 5, move, x)

    with pytest.raises(UserError, match="while: its number"):
        read(until)
    for native in (lambda x: psum(x, "data"), lambda x: collectives.all_gather(x, "data")):
        with pytest.raises(UserError, match="choose an algorithm other than native"):
            read(native)
    assert read(lambda x: lax.while_loop(lambda x: x[0] < 5, lambda x: x + 1, x)) == []


def test_ranks_count_over_all_axes_in_mesh_order() -> None:
    def along(axis: Any, *pairs: tuple[int, int]) -> list[tuple[int, int]]:
        rounds = read(lambda x: lax.ppermute(x, axis, pairs), data=2, fsdp=3, tensor=2)
        return sorted((message.source, message.target) for message in rounds[0])

    numbers = np.arange(12).reshape(2, 3, 2)
    assert along("tensor", (0, 1)) == sorted(zip(numbers[:, :, 0].ravel(), numbers[:, :, 1].ravel(), strict=True))
    assert along("fsdp", (2, 0)) == sorted(zip(numbers[:, 2].ravel(), numbers[:, 0].ravel(), strict=True))
    pairs = numbers.transpose(1, 0, 2).reshape(3, 4)
    assert along(("data", "tensor"), (1, 2)) == sorted(zip(pairs[:, 1], pairs[:, 2], strict=True))
    assert along(("data", "fsdp", "tensor"), (3, 7)) == [(3, 7)]


def test_bytes_are_those_that_travel() -> None:
    def total(dtype: Any, **options: Any) -> int:
        shape = jax.ShapeDtypeStruct((300,), dtype)
        rounds = read(lambda x: collectives.all_reduce(x, "data", algorithm="ring", **options), shape)
        return sum(sent(rounds, 3))

    assert total(jnp.float32) == 4 * 3 * 400
    assert total(jnp.bfloat16) == total(jnp.float32, wire_dtype="bfloat16") == 2 * 3 * 400
    assert total(jnp.float32, wire_dtype="int8") == 3 * 4 * 260
    assert total(jnp.bool_, op="max") == 3 * 400


def test_gradients_communicate_too() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (collectives.all_reduce(x, "data", algorithm="ring") ** 2).sum()

    assert len(read(jax.grad(loss))) == 8  # forward and backward


def test_several_arguments_and_results() -> None:
    rounds = read(lambda x, y: {"a": move(x), "b": move(y), "c": to_varying(y, ("data",))}, X, X)
    assert [len(messages) for messages in rounds] == [3, 3]


def test_sums() -> None:
    first = Message(0, 1, 8, 0), Message(1, 0, 8, 0)
    rounds = [first, (Message(0, 2, 4, 1), Message(0, 3, 4, 2), Message(2, 0, 1, 3))]
    assert sent(rounds, 4) == [16, 8, 1, 0]
    assert received(rounds, 4) == [9, 8, 4, 4]
    assert [has_swap(messages) for messages in rounds] == [True, False]  # 0 -> 2 and 2 -> 0 are two ppermutes
    assert [busiest_rank_bytes(messages) for messages in rounds] == [8, 8]
    assert counted(rounds, 4) == (2, 16, 25, 16, True, 0, 0)
    assert counted(rounds, 4, inner=2) == (2, 16, 25, 16, False, 1, 8)


def test_shares() -> None:
    assert [share(nbytes, 12) for nbytes in (0, 12, 24, 3, 18, 8)] == ["0", "N", "2 N", "N/4", "3/2 N", "2/3 N"]


@pytest.mark.parametrize("name", NAMES)
def test_every_message_is_an_arrow_and_arrows_do_not_overlap(name: str) -> None:
    for messages in read(lambda x: collectives.all_reduce(x, "data", algorithm=name), X, data=6):
        found = arrows(messages)
        assert sum(1 + both for *_, both in found) == len(messages)
        rows = lanes(found)
        assert sorted(arrow for row in rows for arrow in row) == sorted(found)
        for row in rows:
            ends = sorted(tuple(sorted(arrow[:2])) for arrow in row)
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


def test_a_picture_holds_its_messages_and_is_the_same_twice() -> None:
    rounds = read(lambda x: collectives.all_reduce(x, "data", algorithm="tree"), X, data=5)
    pictures = [draw_rounds(rounds, 5, whole=12, title="a < b", inner=None) for _ in range(2)]
    assert pictures[0] == pictures[1]
    want = [[[m.source, m.target, m.nbytes] for m in messages] for messages in rounds]
    assert data_of(pictures[0]) == {"N": 12, "rounds": want}
    assert "<title>a &lt; b</title>" in pictures[0]


@pytest.mark.slow
def test_the_pictures_are_those_of_the_code(tmp_path: Path) -> None:
    """Their messages, not their pixels: matplotlib may draw differently."""
    script = ROOT / "scripts" / "docs" / "draw_collectives.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, env={**os.environ, **AROUND}
    )
    assert done.returncode == 0, done.stderr
    others = "bench_", "pipeline_", "parameter_server"
    drawn, kept = (
        {path.name: path for path in folder.glob("*_*.svg") if not path.name.startswith(others)}
        for folder in (tmp_path, PICTURES)
    )
    assert drawn.keys() == kept.keys() >= {f"all_reduce_{name}.svg" for name in NAMES}
    for name, path in kept.items():
        text = path.read_text(encoding="utf-8")
        again = drawn[name].read_text(encoding="utf-8")
        assert data_of(text) == data_of(again), f"{name}: run scripts/docs/draw_collectives.py"
        assert len(text) < 60_000
        assert f"(pictures/{name})" in PAGE.read_text(encoding="utf-8")


# The page: its programs run, its tables are what the code says.


def page_tables() -> list[list[list[str]]]:
    """Cells of every table of the page, without the line under the head."""
    tables, rows = [], []
    for line in [*PAGE.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            tables.append([rows[0], *rows[2:]])
            rows = []
    return tables


def figures(name: str) -> list[list[str]]:
    """The rows of one algorithm's table."""
    rows = []
    for n in (4, 8):
        for nbytes, text in ((16 << 20, "16 MiB"), (4 << 10, "4 KiB")):
            mesh = {"data": 2, "fsdp": n // 2} if name == "two_level" else {"data": n}
            shape = jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32)
            rounds = read(
                lambda x, mesh=mesh: collectives.all_reduce(x, tuple(mesh), algorithm=name),
                shape,
                ports=2 if name == "bidirectional_ring" else 1,
                **mesh,
            )
            cost = counted(rounds, n)
            rows.append([str(n), text, str(cost.rounds), *(f"{v:,}" for v in (cost.busiest, cost.serial, cost.total))])
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_counted_figures(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(f"\n### {name}\n") :].split("\n#", 2)[1]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert table[2:] == figures(name), "\n".join(f"| {' | '.join(row)} |" for row in figures(name))


def test_the_page_says_who_has_which_operation() -> None:
    table = next(table for table in page_tables() if table[0][0] == "algorithm")
    assert table[0][1:] == [f"`{operation}`" for operation in OPERATIONS]
    names = registry.names("jaxdist.collectives.algorithms")
    assert {row[0] for row in table[1:]} == {f"`{name}`" for name in names}
    for name, *cells in table[1:]:
        has = [getattr(get_algorithm(name.strip("`")), operation) is not None for operation in OPERATIONS]
        assert cells == ["yes" if there else "" for there in has], name


def test_the_page_names_public_functions() -> None:
    table = next(table for table in page_tables() if "PyTorch" in table[0][1])
    named = [name for row in table[1:] for name in re.findall(r"`(\w+)\(", row[0])]
    assert {*OPERATIONS, "send_recv"} <= set(named) <= {*collectives.__all__}


@pytest.mark.slow
def test_the_programs_on_the_page_run() -> None:
    """All of them one after the other, as one program; the first is the example file."""
    example = (ROOT / "docs" / "examples" / "collectives.py").read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    blocks, shown = ([text for language, text in fences if language == kind] for kind in ("python", ""))
    assert blocks[0] == example
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    environment = {**os.environ, **AROUND}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(shown)
