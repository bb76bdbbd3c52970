"""The configuration: sections and keys, reading YAML, checks, values that are filled in. Nothing here imports jax."""
