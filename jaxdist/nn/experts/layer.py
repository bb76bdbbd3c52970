"""A mixture of experts in the place of an MLP (Shazeer et al. 2017). Experts are split over the mesh axis `expert`, and
each over `tensor`.

Legend: B batch, s positions on this device, S those that its experts get (all of its `tensor` group's), D width, E
experts, K choices of a token.
"""

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import psum, rank, to_varying, varying_axes
from jaxdist.config.sections.moe import MoEConfig
from jaxdist.errors import UserError
from jaxdist.nn.attention import PackedDocuments
from jaxdist.nn.attention.cache import BlockCache
from jaxdist.nn.block import Block
from jaxdist.nn.context.positions import context_size, devices_along
from jaxdist.nn.experts.balance import expert_figures, with_count, with_loss
from jaxdist.nn.experts.capacity import by_capacity
from jaxdist.nn.experts.dispatch import Dispatch, Experts, RoutedTokens
from jaxdist.nn.experts.dropless import dropless
from jaxdist.nn.experts.router import Router, Routing, balance_losses
from jaxdist.nn.linear import MatmulOptions
from jaxdist.nn.mlp import MLP, check_kind
from jaxdist.nn.sequence_parallel import sum_to_positions, whole_sequence

DISPATCH: dict[str, Dispatch] = {"capacity": by_capacity, "dropless": dropless}


class MoE(nnx.Module):
    """A mixture of experts: x [B, s, D] -> [B, s, D].

    Names for `memory.remat`: as of `MLP`, with "mlp.tokens" for those of all devices of `expert`
    ("dropless"), and "mlp.rows" for tokens where their experts are.

    options: with a number of experts and their hidden size, see `MoEConfig`.
    kind, out_scale: as for `MLP`.
    matmul: of the shared experts; the others multiply in the dtype that they receive, also under fp8.
    """

    figures = staticmethod(expert_figures)

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        options: MoEConfig,
        *,
        kind: str,
        out_scale: float,
        **matmul: Unpack[MatmulOptions],
    ) -> None:
        check_kind(kind)
        if not options.on or options.hidden is None:
            raise UserError(
                f"options: experts={options.experts}, hidden={options.hidden}; allowed: numbers, as"
                " MoEConfig(experts=8, hidden=256)"
            )
        options.check(layers=options.dense + 1)  # how many blocks are dense, the model knows
        made: Any = {"kind": kind, "out_scale": out_scale}
        self.router = Router(rngs, width, options)
        self.experts = Experts(rngs, options.experts, width, options.hidden, **made)
        shared = options.shared * options.hidden
        self.shared = MLP(rngs, width, shared, bias=False, **made, **matmul) if shared else None
        self.options, self.sequence = options, matmul.get("sequence", False)

    def __call__(self, x_BsD: jax.Array, weight_B: jax.Array | None = None, *, drop: bool = True) -> jax.Array:
        """weight_B: what the losses of each sample are multiplied by; None: there are none. drop: false for the way
        "dropless", whatever the option says."""
        with jax.named_scope("router"):
            routing = self.router(x_BsD)  # of this device's positions, also where its experts get those of others
        tokens = RoutedTokens(x_BsD, routing.experts_BsK, routing.gates_BsK)
        if self.sequence:
            tokens = RoutedTokens(*map(whole_sequence, tokens))
        kernel = self.experts.up.kernel[...]
        tokens = tokens._replace(x_BSD=to_varying(tokens.x_BSD, varying_axes(kernel)))  # one psum adds its gradient
        run = DISPATCH[self.options.dispatch if drop else "dropless"]
        with jax.named_scope("experts"):
            y, dropped = run(tokens, self.experts, self.options)
            y = sum_to_positions(y) if self.sequence else psum(y, "tensor")
        y = self._balanced(y, routing, self._per_expert(tokens.experts_BSK, dropped), weight_B)
        y = y if self.shared is None else y + self.shared(x_BsD)
        return checkpoint_name(y, "mlp.out")

    def _per_expert(self, experts: jax.Array, which: jax.Array) -> jax.Array:
        """[E] how often each expert was chosen where `which`."""
        hot = jax.nn.one_hot(experts, self.options.experts, dtype=jnp.float32)
        counts = jnp.where(which[..., None], hot, jnp.zeros_like(hot)).sum((0, 1, 2))
        # With sequence parallelism all devices of `tensor` know of all positions; one of them counts.
        return jnp.where(rank("tensor") == 0, counts, jnp.zeros_like(counts)) if self.sequence else counts

    def _balanced(self, y: jax.Array, routing: Routing, dropped_E: jax.Array, weight_B: jax.Array | None) -> jax.Array:
        """y, with what is counted and the losses of this layer behind it."""
        (_, own, E), K = routing.shares_BsE.shape, self.options.top_k
        chosen_BsE = jax.nn.one_hot(routing.experts_BsK, E, dtype=routing.shares_BsE.dtype).sum(2)
        chosen_E, losses = chosen_BsE.sum((0, 1)), balance_losses(routing, chosen_BsE)
        if self.router.bias is not None:
            y = with_count(y, self.router.bias[...], chosen_E)
        length = own * context_size() * (devices_along("tensor") if self.sequence else 1)
        smallest = jnp.finfo(chosen_E.dtype).tiny
        entropy = -(routing.shares_BsE * jnp.log(jnp.maximum(routing.shares_BsE, smallest))).sum() / math.log(E)
        sums = jnp.stack([*(loss_B.sum() * length for loss_B in losses), entropy]) * K
        statistics = jnp.concatenate([x.astype(chosen_E.dtype) for x in (chosen_E, dropped_E, sums)])
        y = with_count(y, self.router.statistics[...], lax.stop_gradient(statistics))
        for factor, loss_B in zip((self.options.balance_loss, self.options.z_loss), losses, strict=True):
            y = y if weight_B is None or not factor else with_loss(y, loss_B, factor * weight_B)
        return y


class ExpertBlock(Block):
    """A block whose feed-forward half is an `MoE`.

    rows: (documents or None, weight of each sample's balancing losses [B] or None). cache: as in `Block`; with one, no
    token is dropped.
    """

    def __call__(  # type: ignore[override]
        self,
        h_BSD: jax.Array,
        keys_B: jax.Array,
        rows: tuple[PackedDocuments | None, jax.Array | None] = (None, None),
        cache: BlockCache | None = None,
    ) -> jax.Array:
        documents, weight_B = rows
        return self.run(h_BSD, keys_B, documents, cache, lambda mlp, x: mlp(x, weight_B, drop=cache is None))
