"""What a save leaves to the training beside it: its buffers, and the processor."""

import contextlib
import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import make_mesh
from jaxdist.checkpoint import Checkpoints
from jaxdist.checkpoint.background import own_copy, step_back, writers_step_back
from jaxdist.checkpoint.reader import open_steps
from jaxdist.mesh import HOST
from jaxdist.model import BlockOrder
from jaxdist.state import TrainState


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("memory", [None, HOST])
def test_a_copy_shares_no_buffer(memory):
    """Copies, shards and host memory included; the layout stays."""
    mesh = make_mesh(data=2, fsdp=2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    sharding = sharding if memory is None else sharding.with_memory_kind(memory)
    leaf = jax.device_put(jnp.arange(1024.0), sharding)
    copy = own_copy({"leaf": leaf})["leaf"]
    assert not set(pointers(leaf)) & set(pointers(copy))
    assert copy.sharding == leaf.sharding
    np.testing.assert_array_equal(np.asarray(copy), np.asarray(leaf))


def placed(case: str) -> jax.Array:
    """A leaf that does not lie as most of a state does, which is on the first four devices."""
    devices = jax.devices()
    if case == "uncommitted step":
        return jnp.int32(3)
    if case == "single device":
        return jax.device_put(jnp.arange(8.0), devices[5])
    chosen = devices[:2] if case == "fewer devices" else devices[3::-1]
    return jax.device_put(jnp.arange(8.0), NamedSharding(Mesh(np.array(chosen), "x"), PartitionSpec("x")))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("case", ["uncommitted step", "single device", "fewer devices", "other order"])
def test_leaves_on_other_devices(case: str, inside: bool, tmp_path: Path):
    """inside: a `jax.set_mesh` of the mesh that most leaves are on."""
    mesh, leaf = Mesh(np.array(jax.devices()[:4]), "x"), placed(case)
    weights = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        for before, copy in zip((weights, leaf), own_copy([weights, leaf]), strict=True):
            assert not set(pointers(before)) & set(pointers(copy))
            assert copy.sharding == before.sharding
            np.testing.assert_array_equal(np.asarray(copy), np.asarray(before))
        state = TrainState(jnp.int32(3), {"w": weights}, (), model_state={"leaf": leaf})
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            checkpoints.save(3, state, {})
            checkpoints.wait()
        np.testing.assert_array_equal(open_steps(tmp_path)[0].model_state()["leaf"], np.asarray(leaf))


@pytest.mark.parametrize("order", [None, [1, 0]])
def test_a_step_works_in_the_buffers_of_the_state_that_is_being_saved(order: list[int] | None, tmp_path: Path):
    """Were they the save's own, the step would leave them and fill others. Also those that are no blocks, beside blocks
    that are saved in another order."""
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    weights = step(jnp.zeros(1 << 20))
    carried = () if order is None else BlockOrder(tuple(order), 1)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        before = pointers(weights)
        checkpoints.save(1, TrainState(jnp.int32(1), {"w": weights}, (), model_state=carried), {})
        weights = jax.block_until_ready(step(weights))
        assert pointers(weights) == before
        like = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # noqa: E731
        target = jax.tree.map(like, TrainState(jnp.int32(1), {"w": weights}, ()))
        checkpoints.wait()
        assert np.asarray(checkpoints.restore(1, target).params["w"]).max() == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_writers_get_less_of_a_busy_processor_and_others_as_much_as_before():
    """Also those that come while it looks. A second look does not push them further."""
    named, go = threading.Event(), threading.Event()
    seen: dict[str, int] = {}

    def nice(thread: int | None) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread or 0)

    def stand_in() -> None:
        Path("/proc/thread-self/comm").write_text("ts_pool_worker")  # as tensorstore calls its threads
        named.set()
        go.wait(20)

    def hasher() -> None:
        step_back()
        seen["hasher"] = nice(threading.get_native_id())

    own = nice(os.getpid())
    watch = writers_step_back()
    writer, other = threading.Thread(target=stand_in), threading.Thread(target=hasher)
    writer.start()
    other.start()
    assert named.wait(20)
    watch.join(20)
    seen["writer"] = nice(writer.native_id)
    writers_step_back().join(20)
    seen["writer, again"] = nice(writer.native_id)
    go.set()
    writer.join(20)
    other.join(20)
    assert seen == {"hasher": min(19, own + 10), "writer": min(19, own + 15), "writer, again": min(19, own + 15)}
    assert nice(os.getpid()) == own
