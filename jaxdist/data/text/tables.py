"""Rows of tables as examples: Parquet files, and folders that `save_to_disk` of Hugging Face's datasets writes.

Files are read by pyarrow (extra `parquet`), and nothing that they hold is run. Such a folder has a list of Arrow files
in state.json; one of several splits has a folder for each, and dataset_dict.json.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxdist.config.json_reader import parse_json, read_json_file
from jaxdist.data.records import record_files
from jaxdist.data.source import missing, readable
from jaxdist.data.text.examples import Example, example_of
from jaxdist.errors import UserError

COLUMNS = ("messages", "tools", "prompt", "completion", "text")
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def table_files(path: Path, *, key: str) -> list[Path]:
    """The files of a saved dataset, of its split `train` where it has several; or those of a folder of .parquet files.

    Raises `UserError`.
    """
    if (path / _SPLITS).is_file():
        splits = _listed(path / _SPLITS, "splits", str, key)
        if "train" not in splits:
            raise UserError(
                f"{key}: {str(path)!r} has no split train; give the folder of one: {', '.join(splits)[:200]}"
            )
        path = path / "train"
    if not (path / _STATE).is_file():
        return record_files(path, (".parquet",), key=key)
    names = [each.get("filename") for each in _listed(path / _STATE, "_data_files", dict, key)]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise UserError(f"{key}: {str(path / _STATE)!r} names {name!r}, which is no file beside it; copy it again")
    return [path / name for name in names]


def _listed(file: Path, name: str, kind: type, key: str) -> list[Any]:
    """The list under a name in a JSON file, of values of one kind."""
    try:
        found = read_json_file(file, any_number=True)
    except (ValueError, OSError) as error:
        raise UserError(f"{key}: {str(file)!r} cannot be read ({str(error)[:200]}); copy it again") from error
    values = found.get(name) if isinstance(found, dict) else None
    if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
        raise UserError(f"{key}: {str(file)!r} has no list under {name!r}; copy it again")
    return values


def table_examples(files: Iterable[Path], *, key: str) -> Iterator[Example]:
    """The examples in the rows of files, a part of a file in memory at a time. Raises `UserError`."""
    try:
        import pyarrow as arrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise missing("pyarrow", "parquet", source="huggingface") from error

    def of_arrow(file: Any) -> Iterator[Any]:
        with ipc.open_stream(file) as stream:
            wanted = [name for name in stream.schema.names if name in COLUMNS]
            for batch in stream:
                yield batch.select(wanted)

    def of_parquet(file: Any) -> Iterator[Any]:
        with parquet.ParquetFile(file) as opened:
            yield from opened.iter_batches(columns=[name for name in opened.schema_arrow.names if name in COLUMNS])

    for path in files:
        batches = of_parquet if path.suffix == ".parquet" else of_arrow
        with readable(key, path), path.open("rb") as file:
            try:
                yield from _rows(batches, file, path, key)
            except (arrow.ArrowException, UnicodeError, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # of the disk: pyarrow's own have no number
                said = " ".join(str(error).split())[:200]
                raise UserError(f"{key}: {str(path)!r} is no table, or damaged ({said}); copy it again") from error


def _rows(batches: Callable[[Any], Iterator[Any]], file: Any, path: Path, key: str) -> Iterator[Example]:
    number = 0
    for batch in batches(file):
        batch.validate(full=True)  # offsets that lead elsewhere would end the process
        for row in batch.to_pylist():
            number += 1
            where = f"{path}, row {number}"
            try:
                record = parse_json(json.dumps(row), any_number=True)
            except (TypeError, ValueError) as error:  # bytes, days, and what lines of JSON may not hold either
                raise UserError(f"{key}: {where}: is no example ({str(error)[:200]}); leave it out") from error
            yield example_of(record, where, key=key)
