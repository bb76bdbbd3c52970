"""A column of Parquet files: texts as bytes, or lists of token ids. Needs pyarrow (extra `parquet`)."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.records import documents_source
from jaxdist.data.source import Source, missing
from jaxdist.errors import UserError

FACTS = SourceFacts(reads_files=True)

SUFFIXES = (".parquet",)
COLUMNS = ("text", "content", "tokens", "input_ids")  # looked for, in this order, where none is named


def parquet(config: DataConfig) -> Source:
    """Records of `data.path`, a file or a folder of `.parquet` files, are documents: those of the column `data.column`,
    or else of the first there is of text, content, tokens, input_ids. See `jaxdist.data.records` for the rest.

    Texts (string or binary) are bytes, 256 ids; lists of integers are tokens. Raises `UserError`: not installed,
    missing, damaged, no such column, one of another type, a null in it.
    """
    return documents_source(config, "parquet", SUFFIXES, partial(column_of, column=config.column))


def column_of(file: Path, *, column: str | None) -> Iterator[np.ndarray]:
    """The documents of a file, a part of the file in memory at a time."""
    try:
        import pyarrow as arrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise missing("pyarrow", "parquet", source="parquet") from error
    try:
        with ParquetFile(file) as opened:
            schema = opened.schema_arrow
            name = column or next((each for each in COLUMNS if each in schema.names), "")
            if name not in schema.names:
                said = f"{column!r}, but {str(file)!r} has no such column"
                said = said if column else f"null, and {str(file)!r} has none of {', '.join(COLUMNS)}"
                raise UserError(f"data.column: {said}; allowed: {', '.join(schema.names)}")
            for batch in opened.iter_batches(columns=[name]):
                yield from _documents(arrow, batch.column(0), f"column {name!r} of {str(file)!r}")
    except arrow.ArrowInvalid as error:
        raise UserError(
            f"data.path: {str(file)!r} is no Parquet file, or damaged ({str(error)[:200]}); copy it again"
        ) from error


def _documents(arrow: Any, values: Any, where: str) -> Iterator[np.ndarray]:
    kind = values.type.value_type if arrow.types.is_dictionary(values.type) else values.type
    texts = str(kind).removeprefix("large_").removesuffix("_view") in ("string", "binary")
    wide = values.cast(arrow.large_binary()) if texts else values
    if wide.null_count:  # those of a dictionary, too
        raise UserError(f"data.path: {where} has nulls; write empty texts or lists in their place, or leave them out")
    if texts:
        ends = np.frombuffer(wide.buffers()[1], np.int64)[wide.offset : wide.offset + len(wide) + 1]
        content = np.frombuffer(wide.buffers()[2] or b"", np.uint8)
        # Copies: a slice would keep the whole part of the file.
        yield from (content[start:stop].copy() for start, stop in pairwise(ends))
        return
    lists = (arrow.types.is_list, arrow.types.is_large_list, arrow.types.is_fixed_size_list)
    if kind is not values.type or not any(test(kind) for test in lists) or not arrow.types.is_integer(kind.value_type):
        raise UserError(f"data.column: {where} is of type {kind}; allowed: string, binary, lists of integers")
    flat = values.flatten()
    if flat.null_count:
        raise UserError(f"data.path: {where} has nulls among its tokens; leave these rows out")
    ids = flat.to_numpy(zero_copy_only=False).astype(np.int64)
    yield from np.split(ids, np.cumsum(values.value_lengths().to_numpy(zero_copy_only=False))[:-1])
