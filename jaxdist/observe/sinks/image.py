"""An image for a sink."""

from typing import NamedTuple


class Image(NamedTuple):
    """A PNG image, and its text alternative."""

    png: bytes
    text: str
