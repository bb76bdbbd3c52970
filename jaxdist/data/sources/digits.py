"""Handwritten digits: 1,797 images of 8 x 8 pixels, which scikit-learn holds. Needs it (extra `examples`)."""

from functools import partial

import numpy as np

from jaxdist.config.entries import SourceFacts
from jaxdist.config.schema import DataConfig
from jaxdist.data.source import Source, Yardstick, missing, source_info
from jaxdist.data.sources._arrays import fingerprint_of, majority, samples_of, split_at_random

FACTS = SourceFacts(ids=False, leaves=("image", "label"), val_path="")


def digits(config: DataConfig) -> Source:
    """Samples of `sklearn.datasets.load_digits`, the test set of Alpaydin and Kaynak 1998 (UCI): `image` [8, 8, 1],
    float32 from -1 to 1, and `label`, int32 from 0 to 9. Nothing is downloaded: the package holds them.

    Held out is the `data.held_out`-th part of them, taken at random, always the same: with 0.2, 359 of 1,797.
    `data.path` has no meaning. Raises `UserError` where scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing("scikit-learn", "examples", source="digits") from error
    found = load_digits()
    images = (found.images[..., None] / 8 - 1).astype(np.float32)  # they hold whole numbers from 0 to 16
    arrays = {"image": images, "label": found.target.astype(np.int32)}
    train, held_out = split_at_random(samples_of(arrays, key="data.source"), config.held_out)
    digest, sizes = fingerprint_of({"train": arrays}), (train.size, held_out.size)
    info = source_info(config, "digits", "samples", sizes=sizes, files=(1, 1), sha256=digest)
    sides = (side.read(np.arange(side.size))["label"] for side in (train, held_out))
    yardstick = Yardstick("of held-out digits right", partial(majority, *sides))
    info |= {"path": "sklearn.datasets.load_digits"}
    return Source(train, held_out, 0, info, yardstick=yardstick, labels=10)
