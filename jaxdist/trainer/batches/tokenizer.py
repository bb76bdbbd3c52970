"""The tokenizer of a run's data, for samples of text."""

from pathlib import Path

from jaxdist.config.schema import Config
from jaxdist.data.manifest import entry_of
from jaxdist.data.source import Source
from jaxdist.data.text.source import tokenizer_of
from jaxdist.data.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer


def tokenizer_of_data(config: Config, source: Source) -> Tokenizer | None:
    """The tokenizer that made the ids of this data; None where that is not known.

    It is the one of `data.tokenizer`; or that of bytes; or the file that a manifest names, if it lies beside the data.
    """
    if not source.vocab:
        return None
    if hasattr(config.data, "tokenizer"):
        return tokenizer_of(config.data)
    if source.info["unit"] == "bytes":
        return byte_tokenizer()
    path = Path(config.data.path).expanduser()
    entry = entry_of(path / "train.bin" if path.is_dir() else path)
    file = None if entry is None else entry.manifest.with_name(Path(entry.tokenizer).name)
    return load_tokenizer(file, key="data.path") if file is not None and file.is_file() else None
