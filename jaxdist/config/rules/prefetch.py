"""`parallel.prefetch`: what does not go with it. Imports no jax."""

from jaxdist.errors import UserError


def check_prefetch(prefetch: int, *, reshard_after_forward: bool, deterministic: bool) -> None:
    """Raise `UserError` for what does not go with `parallel.prefetch: 1`, if that is asked for."""
    if prefetch not in (0, 1):
        raise UserError(f"parallel.prefetch: {prefetch} is out of range; allowed: 0, 1")
    if prefetch and not reshard_after_forward:
        raise UserError(
            "parallel.prefetch: 1 gathers blocks again for the backward pass; set"
            " parallel.reshard_after_forward to true, or prefetch to 0"
        )
    if prefetch and deterministic:
        raise UserError(
            "parallel.prefetch: 1 changes the order of work; set it to 0 with parallel.grad_sync.deterministic"
        )
