"""What `parallel.collective_matmul` and `parallel.batch_split`, which hide communication of layers, need of the other
settings. Nothing here imports jax."""

from jaxdist.errors import UserError


def check_collective_matmul(
    collective_matmul: bool, *, sequence_parallel: bool, fp8: bool, per_op: bool = False
) -> None:
    """Raise `UserError` where `parallel.collective_matmul` lacks what it needs."""
    if collective_matmul and not sequence_parallel:
        raise UserError(
            "parallel.collective_matmul: true cuts up the collectives of parallel.sequence_parallel, which"
            " is false; allowed: false; or parallel.sequence_parallel=true"
        )
    if collective_matmul and fp8:
        raise UserError(
            "parallel.collective_matmul: true multiplies piece by piece, and precision.policy 'fp8' scales"
            " whole tensors; allowed: false; or precision.policy=bf16"
        )
    if collective_matmul and per_op:
        raise UserError(
            "parallel.collective_matmul: true has its own gradients, whose products precision.per_op (O1)"
            " would not cast; allowed: false; or precision.policy=O2"
        )


def check_batch_split(batch_split: int, *, prefetch: int, deterministic: bool) -> None:
    """Raise `UserError` for what does not go with `parallel.batch_split: 2`, if that is asked for."""
    if batch_split not in (1, 2):
        raise UserError(f"parallel.batch_split: {batch_split!r} is out of range; allowed: 1, 2")
    if batch_split > 1 and prefetch:
        raise UserError(
            "parallel.batch_split: 2 runs a block twice in a round, and parallel.prefetch: 1 has room beside one run;"
            " allowed: 1; or parallel.prefetch=0"
        )
    if batch_split > 1 and deterministic:
        raise UserError(
            "parallel.batch_split: 2 sums the gradients of two halves, which parallel.grad_sync.deterministic would"
            " have to round alike in all layouts; allowed: 1; or parallel.grad_sync.deterministic=false"
        )


def check_split_sums(batch_split: int, *, tensor: int, sequence_parallel: bool) -> None:
    """Raise `UserError` for halves whose layers all-reduce over `tensor`: the compiler combines these all-reduces,
    which then wait for both halves."""
    if batch_split > 1 and tensor > 1 and not sequence_parallel:
        raise UserError(
            f"parallel.batch_split: 2 with mesh.tensor {tensor} hides collectives of parallel.sequence_parallel, which"
            " is false; allowed: 1; or parallel.sequence_parallel=true"
        )


def check_conditions(*, pipeline_cond: bool, setting: str = "collective_matmul: true", allowed: str = "false") -> None:
    """Raise `UserError` for a pipeline whose stages take different branches: devices then meet in different rings. XLA
    for CPUs lets all devices take part in a `ppermute`, and was seen to give wrong sums.

    setting: of section parallel, by which layers send with `ppermute`. allowed: in its place.
    """
    if pipeline_cond:
        raise UserError(
            f"parallel.{setting} sends inside a pipeline's stages, and parallel.pipeline_cond"
            f" true puts these in conditions; allowed: {allowed}; or parallel.pipeline_cond=false"
        )
