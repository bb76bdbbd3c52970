"""Does a model train the same in a layout as on one device; and if not, why: `jaxdist.verify`."""
