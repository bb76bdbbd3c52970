"""Options of models, one model a file: a dataclass `Options`. Read before jax is started."""
