"""Data: sources of token ids and of samples (`sources/`), batches from (seed, step) (`loader.py`, `samples.py`,
`mixture.py`), yardsticks (`ngram.py`)."""

from jaxdist.data.file_array import FileArray, FileChanged, Ids
from jaxdist.data.loader import GlobalBatches, Loader, batch_shapes, prefetch
from jaxdist.data.mixture import BLOCK, leaves_of, load_source, make_eval_loader, make_loader
from jaxdist.data.ngram import bigram_bits, trigram_bits
from jaxdist.data.samples import Samples, Stream
from jaxdist.data.source import Part, Source, Yardstick, kind_of

__all__ = [
    "BLOCK", "FileArray", "FileChanged", "GlobalBatches", "Ids",
    "Loader", "Part", "Samples", "Source", "Stream", "Yardstick", "batch_shapes",
    "bigram_bits", "kind_of", "leaves_of", "load_source", "make_eval_loader", "make_loader", "prefetch", "trigram_bits",
]  # fmt: skip
