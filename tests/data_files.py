"""Files of text and of token ids, and loaders, for the tests of `jaxdist.data`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config.schema import DataConfig
from jaxdist.data import Loader
from jaxdist.mesh import BATCH_AXES, make_mesh


def sharding(**sizes: int) -> NamedSharding:
    return NamedSharding(make_mesh(devices=None, **sizes), P(BATCH_AXES))


def config(path: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(**{"path": str(path), "seq_len": 4, **changes})


def numbers(size: int) -> np.ndarray:
    """Ids that are their own positions, so that a window shows where it was cut."""
    return np.arange(size, dtype=np.uint32)


def loader(size: int = 1000, *, seq_len: int = 7, global_batch: int = 8, **options: Any) -> Loader:
    options.setdefault("sharding", sharding(data=1))
    return Loader(numbers(size), seq_len=seq_len, global_batch=global_batch, **options)


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def many_files(number: int) -> dict[str, bytes]:
    return {f"part{i // 10}/{i}.txt": f"<{i}> some text\n".encode() for i in range(number)}


def ids_file(path: Path, values: Any, dtype: str = "uint16") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(values, dtype).tofile(path)
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra parquet) is not installed")
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(arrow.table(columns), path, row_group_size=7)
    return path


def write_records(path: Path, records: list[bytes]) -> Path:
    module = pytest.importorskip(
        "array_record.python.array_record_module", reason="array_record (extra arrayrecord) is not installed"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = module.ArrayRecordWriter(str(path), "group_size:3")
    for record in records:
        writer.write(record)
    writer.close()
    return path
