"""`jaxdist.fit` with PyTorch's own DataLoader: shuffled or streamed, with workers, stopped and resumed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist

torch = pytest.importorskip("torch", reason="torch is not installed: its DataLoader is not tried with fit")
data = pytest.importorskip("torch.utils.data")

ROWS, STEPS = 8, 6  # in epochs of 4 batches
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of forks beside threads


def rows() -> Any:
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


class Indexed(data.Dataset):  # type: ignore[misc, name-defined]  # torch has no types where it is absent
    def __init__(self) -> None:
        self.x = rows()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return {"x": self.x[i], "y": self.x[i].sum() > 0}


class Streamed(data.IterableDataset):  # type: ignore[misc, name-defined]
    """Each worker has rows of its own."""

    def __iter__(self) -> Iterator[Any]:
        worker, x = data.get_worker_info(), rows()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for row in x[first::step]:
            yield {"x": row, "y": row.sum() > 0}


def shuffled(**options: Any) -> Any:
    return data.DataLoader(
        Indexed(), batch_size=ROWS, shuffle=True, generator=torch.Generator().manual_seed(1), **options
    )


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "shuffled, 2 workers": lambda: shuffled(num_workers=2),
    "shuffled, 2 workers that stay": lambda: shuffled(num_workers=2, persistent_workers=True),
    "streamed": lambda: data.DataLoader(Streamed(), batch_size=ROWS),
    "streamed, 2 workers": lambda: data.DataLoader(Streamed(), batch_size=ROWS, num_workers=2),
}


def loss(params: Any, batch: Any, keys: Any) -> Any:
    wanted = batch["y"].astype(jnp.float32)
    return ((batch["x"] @ params["w"] - wanted) ** 2).sum(), batch["x"].shape[0]


def losses(given: Any, folder: Path, steps: int = STEPS, loss: Any = loss) -> list[float]:
    told: list[float] = []
    settings = {"observe.console": "plain", "observe.log_every": 1000}
    jaxdist.fit(
        loss,
        optax.adam(0.1),
        given,
        steps=steps,
        params={"w": jnp.zeros(4)},
        mesh=jaxdist.make_mesh(fsdp=2),
        run_dir=folder,
        settings=settings,
        callbacks=[lambda step, metrics: told.append(metrics["loss"])],
    )
    return told


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_is_read_as_by_a_loop_and_resumed(name: str, tmp_path: Path, capfd: Any) -> None:
    make = LOADERS[name]
    epochs, loader = list[Any](), make()
    for _ in range(2):  # each is shuffled anew
        epochs += [{key: leaf.numpy() for key, leaf in batch.items()} for batch in loader]
    plain = losses(epochs, tmp_path / "plain")
    capfd.readouterr()
    assert losses(make(), tmp_path / "whole") == plain
    cut = losses(make(), tmp_path / "cut", steps=3)
    assert cut + losses(make(), tmp_path / "cut") == plain
    assert "exited unexpectedly" not in capfd.readouterr().err  # a worker, whose end nothing else waits for


def test_tensors_of_other_types(tmp_path: Path) -> None:
    """bfloat16, whole numbers of 64 bits, and what has a gradient; as a tuple."""
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    given = [(x.bfloat16(), torch.arange(8), x.clone().requires_grad_())]

    def kinds(params: Any, batch: Any, keys: Any) -> Any:
        half, count, wide = batch
        assert (half.dtype, count.dtype, wide.dtype) == (jnp.bfloat16, jnp.int32, jnp.float32)
        return sum(leaf.astype(jnp.float32).sum() for leaf in batch) * params["w"].sum(), 1.0

    assert np.isfinite(losses(given, tmp_path, 2, kinds)).all()


def test_a_last_batch_that_is_smaller_is_one_line(tmp_path: Path) -> None:
    given = data.DataLoader(Indexed(), batch_size=10)
    with pytest.raises(jaxdist.UserError, match=r"batch 3: x is float32\[2, 4\].*drop_last=True"):
        losses(given, tmp_path)
