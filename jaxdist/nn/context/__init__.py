"""Context parallelism: the devices of the mesh axis `context` have other positions of the same samples."""
