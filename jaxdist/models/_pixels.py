"""What the pixels of images are."""

import jax
import jax.numpy as jnp

from jaxdist.errors import UserError


def are_bytes(image: jax.Array) -> bool:
    """Whether pixels are integers, which go from 0 to 255 and which a model has to scale; False for floats. Raises
    `UserError` for 16 bits, which images have that end elsewhere."""
    if image.dtype in (jnp.uint16, jnp.int16):
        raise UserError(
            f"image: its pixels are {image.dtype}; allowed: uint8 or other integers from 0 to 255, or floats, which are"
            " taken as they are; give image.astype(np.uint8) if they end at 255, or floats such as image / 32767.5 - 1"
        )
    return bool(jnp.issubdtype(image.dtype, jnp.integer))
