"""Keys that all transformers have, and what their sizes must be: of the model itself, and of what `tensor` and
`context` split."""

import math
from collections.abc import Mapping
from typing import Any

from jaxdist.config.rules.fields import setting
from jaxdist.config.rules.pipeline import divisors, multiples_around, near
from jaxdist.errors import UserError

CONTEXT_FORMS = ("all_to_all", "gather", "ring")  # of attention over the mesh axis `context`: jaxdist.nn.context.forms


def attention_setting() -> Any:
    """The key `attention`."""
    return setting(
        "auto",
        "kernel of attention; auto: cudnn on GPUs where it can compute this, else xla; docs/compiler.md",
        choices=("auto", "xla", "cudnn"),
        how=True,
    )


def scan_blocks_setting() -> Any:
    """The key `scan_blocks`."""
    return setting(
        None,
        "blocks of one round of the loop over blocks; 0: no loop, which compiles longer and copies less; null: 0 on"
        " one GPU for up to 32 blocks, if nothing that is set excludes it, else 1: docs/compiler.md",
        at_least=0,
        how=True,
    )


def loss_chunk_setting() -> Any:
    """The key `loss_chunk`."""
    return setting(
        None,
        "tokens whose logits exist at a time; 0: all; null: all, unless they are more than 256 MiB",
        at_least=0,
        how=True,
    )


def check_heads(model: Any) -> None:
    """Raise `UserError` for heads that do not divide the width."""
    kv_heads = getattr(model, "kv_heads", model.heads)
    head_width = getattr(model, "head_width", None)
    if model.width % model.heads and head_width is None:
        raise UserError(
            f"model.heads: {model.heads} does not divide model.width {model.width}; head counts that work:"
            f" {near(divisors(model.width), model.heads)}"
            + ("; or give model.head_width" if hasattr(model, "head_width") else "")
        )
    if model.heads % kv_heads:
        raise UserError(
            f"model.kv_heads: {kv_heads} does not divide model.heads {model.heads}; allowed:"
            f" {near(divisors(model.heads), kv_heads)}"
        )


def check_rotary(model: Any) -> None:
    """Raise `UserError` for what rotary positions (`model.positions`) cannot be."""
    if model.positions != "rope":
        if model.rope_type != "default":
            raise UserError(
                f"model.rope_type: {model.rope_type!r}, but model.positions is {model.positions}; allowed: default;"
                " or model.positions=rope"
            )
        return
    if model.head_width % 2 and model.head_width * model.heads != model.width:
        raise UserError(
            f"model.head_width: {model.head_width} is odd, and rope rotates pairs; allowed: even; or"
            " model.positions=learned"
        )
    if model.head_width % 2:
        works = [n for n in divisors(model.width) if model.width // n % 2 == 0]
        raise UserError(
            f"model.heads: {model.heads} of model.width {model.width} makes heads of odd width"
            f" {model.width // model.heads}, and rope rotates pairs; head counts that work:"
            f" {near(works, model.heads)}; or model.positions=learned"
        )
    if model.rope_type == "llama3" and model.rope_low >= model.rope_high:
        raise UserError(
            f"model.rope_low: {model.rope_low:g}; allowed: below model.rope_high, {model.rope_high:g}, with"
            " model.rope_type=llama3"
        )


def check_parts(parts: int, length: int) -> None:
    """Raise `UserError` for more parts of a text (`model.position_losses`) than positions: one would be empty."""
    if parts > length:
        raise UserError(
            f"model.position_losses: {parts} parts of a text of {length} positions; allowed: 0 to {length}; or"
            " longer texts (data.seq_len)"
        )


def check_tensor(model: Any, tensor: int) -> None:
    """Raise `UserError` for an axis `tensor` that does not divide what is split over it."""
    sizes_of = {key: getattr(model, key, None) for key in ("heads", "kv_heads", "vocab", "mlp_width")}
    split = {key: size for key, size in sizes_of.items() if size is not None}  # images have no vocabulary
    sizes = near(divisors(math.gcd(*split.values())), tensor)
    for key, value in split.items():
        if value % tensor:
            if "heads" in key:
                works = [n for n in divisors(model.width if key == "heads" else model.heads) if n % tensor == 0]
            else:
                works = multiples_around(value, tensor)
            raise UserError(
                f"mesh.tensor: {tensor} does not divide model.{key} {value}; tensor sizes that work:"
                f" {sizes}; model.{key} that work with {tensor}: {near(works, value)}"
            )


def check_sequence(config: Any, tensor: int) -> None:
    """Raise `UserError` for `parallel.sequence_parallel` where `tensor` does not divide the positions."""
    length = config.data.seq_len
    if config.parallel.sequence_parallel and length % tensor:
        works = multiples_around(length, tensor)
        raise UserError(
            f"data.seq_len: {length} is not divisible by mesh.tensor {tensor}, over which"
            f" parallel.sequence_parallel splits it; lengths that work: {near(works, length)}; or"
            " parallel.sequence_parallel=false"
        )


def context_form(config: Any, model: Any, sizes: Mapping[str, int]) -> str | None:
    """How attention goes over the mesh axis `context`, as `parallel.context` says; None where the axis is off.

    auto: all_to_all, which sends least, where its devices can share the key/value heads. Else ring.
    """
    if sizes["context"] == 1:
        return None
    if (asked := config.parallel.context) != "auto":
        return str(asked)
    return "all_to_all" if shares_heads(model, sizes) else "ring"


def shares_heads(model: Any, sizes: Mapping[str, int]) -> bool:
    """Whether the devices of `tensor` and `context` can share a model's key/value heads evenly."""
    return bool((model.kv_heads or model.heads) % (sizes["tensor"] * sizes["context"]) == 0)


def check_context(config: Any, model: Any, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` for what does not go with the mesh axis `context`, if it is on."""
    count, tensor, length = sizes["context"], sizes["tensor"], config.data.seq_len
    if (form := context_form(config, model, sizes)) is None:
        return
    parts = 2 * count * (tensor if config.parallel.sequence_parallel else 1)
    if length % parts:
        raise UserError(
            f"data.seq_len: {length} is not divisible by {parts}, two chunks for each of mesh.context {count}"
            + (f" and mesh.tensor {tensor}" if parts > 2 * count else "")
            + f"; lengths that work: {near(multiples_around(length, parts), length)}; or mesh.context=1"
        )
    if form == "all_to_all" and not shares_heads(model, sizes):
        heads = model.kv_heads or model.heads
        raise UserError(
            f"parallel.context: 'all_to_all' shares model.kv_heads {heads} among mesh.tensor {tensor} x mesh.context"
            f" {count} devices, which do not divide them; allowed: ring, gather; or context sizes that work:"
            f" {near(divisors(heads // tensor), count)}"
        )
    local, distill = config.parallel.local, config.distill
    for key, value, on in (
        ("parallel.local.every", local.every, local.on),
        ("distill.mixing", distill.mixing, distill.on),
    ):
        if on:
            raise UserError(f"{key}: {value} does not go with mesh.context {count} yet; allowed: 0; or mesh.context=1")
