"""What the pixels of images are."""

import jax
import jax.numpy as jnp

from jaxdist.errors import UserError


def are_bytes(image: jax.Array) -> bool:
    """Whether pixels go from 0 to 255, so that a model has to scale them; False for floats. Raises `UserError` for
    integers that need not end at 255."""
    if not jnp.issubdtype(image.dtype, jnp.integer):
        return False
    if image.dtype != jnp.uint8:
        raise UserError(
            f"image: its pixels are {image.dtype}; allowed: uint8, from 0 to 255, or floats, which are taken as they"
            " are; give image.astype(np.uint8) if they end at 255, or floats such as image / 32767.5 - 1"
        )
    return True
