"""Does a model train the same in a layout as on one device; and if not, why: `jaxdist.verify`."""

from jaxdist.plan.verify.check import verify_training as verify

__all__ = ["verify"]
