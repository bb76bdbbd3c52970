"""Options of sources, one source a file: a dataclass `Options`. Read before jax is started."""
