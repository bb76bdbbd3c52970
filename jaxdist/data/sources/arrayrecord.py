"""ArrayRecord files: a record is a text as bytes, or token ids. Needs array_record (extra `arrayrecord`)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.records import documents_source
from jaxdist.data.source import Source, missing
from jaxdist.errors import UserError

FACTS = SourceFacts(reads_files=True)

SUFFIXES = (".arrayrecord", ".array_record")
_AT_A_TIME = 4096  # records


def arrayrecord(config: DataConfig) -> Source:
    """Records of `data.path`, a file or a folder of `.arrayrecord` (or `.array_record`) files, are documents. See
    `jaxdist.data.records` for the rest.

    A record is text, 256 ids, unless `data.token_dtype` says that it is ids, one after the other, little-endian. Raises
    `UserError`: not installed, missing, damaged, not a whole number of ids.
    """
    return documents_source(config, "arrayrecord", SUFFIXES, partial(records_of, dtype=config.token_dtype))


def records_of(file: Path, *, dtype: str | None) -> Iterator[np.ndarray]:
    """The documents of a file."""
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise missing("array_record", "arrayrecord", source="arrayrecord") from error
    kind = np.dtype(dtype or "uint8").newbyteorder("<")
    try:
        reader = ArrayRecordReader(str(file))
        try:
            count = reader.num_records()
            for start in range(0, count, _AT_A_TIME):
                for i, record in enumerate(reader.read(start, min(start + _AT_A_TIME, count)), start=start):
                    if len(record) % kind.itemsize:
                        raise UserError(
                            f"data.token_dtype: {dtype!r}, but record {i} of {str(file)!r} has"
                            f" {len(record)} bytes; give the type that was written, or null for"
                            " text"
                        )
                    ids = np.frombuffer(record, kind)
                    yield ids if dtype is None else ids.astype(np.int64)
        finally:
            reader.close()
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"data.path: {str(file)!r} is no ArrayRecord file, or damaged ({str(error)[:200]}); copy it again"
        ) from error
