"""Checkpoints: every layout into every other bit for bit, the newest kept, what is refused, kills and full disks."""

import itertools
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import child
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jobs import wait_until
from levels import levels

from jaxdist.checkpoint import Checkpoints, SaveFailed, manager
from jaxdist.config.schema import ModelConfig
from jaxdist.config.sections.optimizer import OptimizerConfig
from jaxdist.errors import UserError
from jaxdist.init import init_state, state_target
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt import gpt
from jaxdist.optim.ema import with_ema
from jaxdist.optim.make import make_optimizer
from jaxdist.precision.loss_scale import fresh_guard
from jaxdist.state import TrainState

pytestmark = pytest.mark.xdist_group("checkpoint")  # runs and commands are shared by the tests of this file

META = {"model": {"width": 16}, "data": {"sha256": "ab" * 32}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"strategy": "ddp"},
    "ddp": {"strategy": "ddp", "data": 4, "tensor": 2},
    "zero3": {"strategy": "zero3", "data": 2, "fsdp": 2, "tensor": 2},
    "zero3-wide": {"strategy": "zero3", "fsdp": 8},
}


def parts(*, width: int = 16, optimizer: str = "adamw", dtype: Any = jnp.float32) -> tuple[Any, Any]:
    config = ModelConfig(layers=2, width=width, heads=2, vocab=64).resolved()
    return gpt(config, max_length=8, param_dtype=dtype), make_optimizer(OptimizerConfig(name=optimizer), steps=9)


def target(layout: str, **options: Any) -> TrainState:
    sizes = dict(LAYOUTS[layout])
    strategy = sizes.pop("strategy")
    return state_target(*parts(**options), make_mesh(**sizes), strategy=strategy)


def state_of(layout: str) -> TrainState:
    """A state with no two leaves alike: moments and counts are not zero."""
    sizes = dict(LAYOUTS[layout])
    strategy = sizes.pop("strategy")
    state = init_state(*parts(), make_mesh(**sizes), strategy=strategy, seed=1)
    leaves, tree = jax.tree.flatten(state)
    random = np.random.default_rng(0)

    def fill(leaf: jax.Array) -> jax.Array:
        whole = leaf.dtype == jnp.int32
        values = random.integers(1, 99, leaf.shape) if whole else random.standard_normal(leaf.shape)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.unflatten(tree, [fill(leaf) for leaf in leaves])


def assert_same(got: TrainState, want: TrainState) -> None:
    def check(a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, got, want)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of step 3 from two layouts, from the second as large arrays are saved: in parts."""
    folders = {}
    for layout, smallest in (("one", manager.MIN_PART), ("zero3", 1)):
        folders[layout] = tmp_path_factory.mktemp("saved") / layout
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager, "MIN_PART", smallest)
            with Checkpoints(folders[layout], keep=1) as checkpoints:
                checkpoints.save(3, state_of(layout), META)
    return folders


@pytest.mark.parametrize(("source", "into"), levels(itertools.product(("one", "zero3"), LAYOUTS), everyday=5))
def test_any_layout_into_any_other(saved: dict[str, Path], source: str, into: str) -> None:
    with Checkpoints(saved[source], keep=1) as checkpoints:
        assert checkpoints.latest() == 3
        assert checkpoints.meta(3) == META
        asked = target(into)
        restored = checkpoints.restore(3, asked)
    assert_same(restored, state_of("one"))
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(asked), strict=True):
        assert leaf.sharding == wanted.sharding
    if into != "one":
        sharded = [leaf for leaf in jax.tree.leaves(restored) if leaf.addressable_shards[0].data.size < leaf.size]
        assert len(sharded) > 8


@pytest.mark.parametrize(
    ("options", "leaf"),
    [
        ({"width": 32}, r"params\.\S+ is float32\[.*16.*\], this configuration makes it float32\[.*32.*\]"),
        ({"optimizer": "sgd"}, r"opt_state\.\S+ is only in (the checkpoint|this configuration)"),
        ({"dtype": jnp.bfloat16}, r"params\.\S+ is float32\[.*\], this configuration makes it bfloat16\["),
    ],
)
def test_other_model_optimizer_or_dtype_is_refused(saved: dict[str, Path], options: dict[str, Any], leaf: str) -> None:
    raises = pytest.raises(UserError, match="^checkpoint of step 3: " + leaf)
    with Checkpoints(saved["zero3"], keep=1) as checkpoints, raises as error:
        checkpoints.restore(3, target("one", **options))
    assert "\n" not in str(error.value)


def test_a_moving_average_on_one_side_only(tmp_path: Path) -> None:
    mesh, optimizer = make_mesh(data=2), optax.sgd(0.1)
    plain, average = (init_state({"w": jnp.ones(4)}, tx, mesh) for tx in (optimizer, with_ema(optimizer, 0.9)))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, plain, META)
        checkpoints.save(2, average, META)
        with pytest.raises(
            UserError, match=r"opt_state.ema.w is only in this configuration; train.ema .*: leave it out$"
        ):
            checkpoints.restore(1, average)
        with pytest.raises(
            UserError, match=r"opt_state.ema.w is only in the checkpoint; train.ema must .*, such as 0.999"
        ):
            checkpoints.restore(2, plain)


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Checkpoints, TrainState]]:
    state = init_state({"w": jnp.ones(4)}, optax.sgd(0.1), make_mesh(data=2))
    with Checkpoints(tmp_path_factory.mktemp("one"), keep=3) as checkpoints:
        note = {"loss": jnp.float32(0.5), "seen": {"rows": (np.int64(3), np.ones(())[()])}}
        checkpoints.save(4, state, note)
        yield checkpoints, state


def test_scalars_in_the_record_become_numbers(one_saved: tuple[Checkpoints, TrainState]) -> None:
    """Asked for while the save is under way, too."""
    assert one_saved[0].meta(4) == {"loss": 0.5, "seen": {"rows": [3, 1.0]}}


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (
            lambda c, s: c.save(4, s, {}),
            "^step: 4 is not after step 4, which is saved; allowed: 5 or more; give a later",
        ),
        (lambda c, s: c.save(3, s, {}), "^step: 3 is not after step 4"),
        (lambda c, s: c.save("5", s, {}), "^step: '5'; allowed: an integer >= 0; give int"),
        (lambda c, s: c.save(5, s, [1]), "^meta: is a list; allowed: a dict; give {}"),
        (
            lambda c, s: c.save(5, s, {"a": [object()]}),
            r"^meta.a\[0\]: is a object; allowed: texts, numbers, .*leave it out",
        ),
        (lambda c, s: c.save(5, s, {"a": np.ones(3)}), r"^meta.a: is a ndarray; .*; give its .tolist\(\)$"),
        (lambda c, s: c.restore(5, s), "^step: 5 has no checkpoint in .*; allowed: 4; give one of these$"),
        (lambda c, s: c.meta(5), "^step: 5 has no checkpoint in .*; allowed: 4; give one of these$"),
        (lambda c, s: c.restore("4", s), "^step: '4'; allowed: an integer >= 0; give int"),
        (lambda c, s: c.meta("4"), "^step: '4'; allowed: an integer >= 0; give int"),
        (lambda c, s: c.save(5, s.params, {}), "^state: is a dict; allowed: a TrainState, as .*; give the whole"),
        (lambda c, s: c.restore(4, s.params), "^target: is a dict; allowed: a TrainState, as "),
        (lambda c, s: Checkpoints(4, keep=1), "^folder: '4': .*; give a path that this system takes$"),
    ],
)
def test_what_cannot_be_saved_or_restored_is_said_at_the_call(
    one_saved: tuple[Checkpoints, TrainState], act: Any, line: str
) -> None:
    with pytest.raises(UserError, match=line):
        act(*one_saved)


def test_a_folder_may_be_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ is expanded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (str(tmp_path / "a"), "~/b"):
        Checkpoints(folder, keep=1).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_nothing_is_saved_there(tmp_path: Path, one_saved: tuple[Checkpoints, TrainState]) -> None:
    with (
        Checkpoints(tmp_path, keep=1) as empty,
        pytest.raises(UserError, match=r"^step: 5 .*: none, as nothing is saved"),
    ):
        empty.restore(5, one_saved[1])


@pytest.mark.parametrize(("smallest", "length"), [(manager.MIN_PART, 24), (8, 48)])
def test_copies_share_the_writing_of_large_arrays_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smallest: int, length: int
) -> None:
    """JAX compiles a program for each part. length: its own in each case, so that none is compiled already."""
    monkeypatch.setattr(manager, "MIN_PART", smallest)
    whole = NamedSharding(make_mesh(data=8), P())
    state = jax.device_put(TrainState(jnp.int32(3), {"w": np.arange(length, dtype=np.float32)}, ()), whole)
    compiled: list[str] = []

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            checkpoints.save(3, state, META)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        checkpoints.wait()
        restored = checkpoints.restore(3, state)
    np.testing.assert_array_equal(restored.params["w"], state.params["w"])
    assert len(compiled) == (2 if smallest > length else 2 + 8), "the check that all is finite, the copy, and slices"


@pytest.mark.slow
def test_newest_are_kept(tmp_path: Path) -> None:
    state = state_of("one")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (2, 4, 6, 8):
            checkpoints.save(step, state._replace(step=jnp.int32(step)), META)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "8"]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 8
        assert int(checkpoints.restore(8, target("one")).step) == 8


@pytest.mark.slow
def test_buffers_may_be_donated_at_once(tmp_path: Path) -> None:
    """`save` returns before the files are written; the next step overwrites the buffers by then."""
    before = state_of("zero3")
    overwrite = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, before, META)
        overwrite(before)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert_same(checkpoints.restore(1, target("zero3")), state_of("zero3"))


def test_a_state_saved_before_there_was_a_guard(tmp_path: Path) -> None:
    state = TrainState(jnp.int32(3), {"w": jnp.ones(8)}, (), guard=fresh_guard()._replace(skipped=jnp.int32(2)))
    asked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state._replace(guard=()), META)
        checkpoints.save(2, state, META)
        old, new = (checkpoints.restore(step, asked) for step in (1, 2))
    assert (int(old.step), int(old.guard.skipped), int(new.guard.skipped)) == (3, 0, 2)
    assert jax.tree.structure(old) == jax.tree.structure(new) == jax.tree.structure(state)


def test_what_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for bad in (
            TrainState(jnp.int32(1), {"w": jnp.full(8, jnp.nan)}, ()),
            TrainState(jnp.int32(1), {"w": jnp.ones(8)}, {"mu": jnp.full(8, jnp.inf)}),
        ):
            with pytest.raises(FloatingPointError, match="the state after step 1 is not finite"):
                checkpoints.save(1, bad, META)
        assert checkpoints.latest() is None


SAVE_FOR_EVER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from jaxdist.checkpoint import Checkpoints, SaveFailed
from jaxdist.state import TrainState
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
for step in range(1, 10_000):
    params = {f"w{i}": jnp.full((128, 128), step, jnp.float32) for i in range(40)}
    checkpoints.save(step, TrainState(jnp.int32(step), params, ()), {"step": step})
"""


def test_kill_while_saving(tmp_path: Path) -> None:
    """kill -9 in the middle of a save: what was there before is whole, and the half is cleared away."""
    environ = child.environment() | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], env=environ, stderr=subprocess.PIPE, text=True
    )

    def names() -> list[str]:
        return [path.name for path in tmp_path.iterdir()]

    try:
        saving = lambda: "2" in names() and any("tmp" in name for name in names())  # noqa: E731
        wait_until(saving, "a save", 60, over=lambda: process.poll() is not None, logs=lambda: str(names()))
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    whole = sorted(int(name) for name in names() if name.isdigit())
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        step = checkpoints.latest()
        assert step == whole[-1]
        asked = TrainState(jnp.int32(0), {f"w{i}": jnp.zeros((128, 128), jnp.float32) for i in range(40)}, ())
        asked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), asked)
        restored = checkpoints.restore(step, asked)
        assert checkpoints.meta(step) == {"step": step}
    assert int(restored.step) == step
    assert all((np.asarray(leaf) == step).all() for leaf in restored.params.values())
    assert all(name.isdigit() for name in names()), "the half-written folder is gone"


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may grow beyond 4 kB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Writes still under way when orbax gives up report to an event loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seen_by", ["the next save", "close"])
def test_failed_save_is_not_silent(seen_by: str, tmp_path: Path) -> None:
    state = TrainState(jnp.int32(1), {"w": jax.random.normal(jax.random.key(0), (300, 300))}, ())
    asked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, META)
    with pytest.raises(SaveFailed, match=r"^checkpoint of step 2 was not saved: File too large$"), checkpoints:
        checkpoints.wait()
        with small_disk():
            checkpoints.save(2, state, META)
            if seen_by == "the next save":
                checkpoints.save(3, state, META)
            checkpoints.close()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 1
        assert_same(checkpoints.restore(1, asked), state)
        checkpoints.save(2, state, META)  # there is room again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"checkpoints' is a file"):
        Checkpoints(tmp_path / "checkpoints", keep=1)


def test_the_loss_of_a_save_is_one_number(tmp_path: Path) -> None:
    """A scalar of jax or NumPy is; what is none is refused before anything is written. So is the package's own key."""
    state = lambda step: TrainState(jnp.int32(step), {"w": jnp.ones(8)}, ())  # noqa: E731
    given = [jnp.float32(3), np.float32(1), np.array(2.0), 4, None]
    with Checkpoints(tmp_path, keep=1, keep_best=1) as checkpoints:
        for step, loss in enumerate(given):
            checkpoints.save(step, state(step), {}, loss=loss)
        for bad in ("1", np.ones(2), [1.0], True):
            with pytest.raises(UserError, match=r"^loss: .*; allowed: one number, such as float\(loss\); or None"):
                checkpoints.save(9, state(9), {}, loss=bad)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="^meta: has the key 'jaxdist', which is this package's own"):
            checkpoints.save(9, state(9), {"jaxdist": 5})
    names = {each.name for each in tmp_path.iterdir()}
    assert {"1", "4"} <= names and not {"0", "2", "9"} & names
