"""Data: sources of token ids (`sources/`), batches from (seed, step) (`loader.py`,
`mixture.py`), yardsticks (`ngram.py`)."""

from jaxdist.data.loader import Loader, batch_shapes, prefetch
from jaxdist.data.mixture import BLOCK, MixedLoader, load_source, make_loader
from jaxdist.data.ngram import bigram_bits, trigram_bits
from jaxdist.data.source import Part, Source

__all__ = [
    "BLOCK", "Loader", "MixedLoader", "Part", "Source", "batch_shapes", "bigram_bits", "load_source", "make_loader",
    "prefetch", "trigram_bits",
]  # fmt: skip
