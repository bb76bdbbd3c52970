"""Data: sources of token ids (`sources/`), batches from (seed, step) (`loader.py`), yardsticks (`ngram.py`)."""

from jaxdist.data.loader import Loader, batch_shapes, prefetch
from jaxdist.data.ngram import bigram_bits, trigram_bits
from jaxdist.data.source import Source

__all__ = ["Loader", "Source", "batch_shapes", "bigram_bits", "prefetch", "trigram_bits"]
