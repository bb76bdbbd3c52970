"""A mixture of experts in the place of an MLP (Shazeer et al. 2017; GShard, Lepikhin et al. 2020; Switch, Fedus et al.
2021). Experts are split over the mesh axis `expert`, and each over `tensor`.

Two ways bring tokens to their experts:
- "capacity": an expert has C places for a group of g neighbouring positions of one sample; first choices come first,
  then earlier positions, and the rest is dropped. A group lies on one device in every layout, so that the same tokens
  are dropped in all of them. Two all-to-alls over `expert`.
- "dropless": tokens are all-gathered over `expert`, every device computes those of its experts, and a reduce-scatter
  adds up the results.

Legend: B batch, s positions on this device, D width, E experts, e those of this device, F hidden width of an expert, K
choices of a token, N groups of g positions, C places.
"""

import math
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import (
    active_axes,
    all_gather,
    all_to_all,
    psum,
    rank,
    reduce_scatter,
    to_varying,
    varying_axes,
)
from jaxdist.errors import UserError
from jaxdist.nn.attention import PackedDocuments
from jaxdist.nn.attention.cache import BlockCache
from jaxdist.nn.block import Block
from jaxdist.nn.context.positions import context_size
from jaxdist.nn.experts.balance import counted, expert_figures, with_loss
from jaxdist.nn.experts.grouped import block_rows, grouped_product
from jaxdist.nn.experts.permute import collect, dispatch, sources
from jaxdist.nn.experts.router import Router, Routing, balance_losses
from jaxdist.nn.linear import MatmulOptions
from jaxdist.nn.mlp import MLP, activation
from jaxdist.nn.param import normal
from jaxdist.nn.sequence_parallel import sum_to_positions, whole_sequence


class MoEOptions(TypedDict):
    """The options of `MoE`; scores, normalised, scaling, bias_rate: see `Router`.

    experts: their number. top_k: how many of them a token goes to. hidden: the width F inside an expert.
    shared: the number of experts, of the same width, that every token goes to.
    dispatch: "capacity" or "dropless". factor: the places of an expert over what it gets if all get the same.
    group: neighbouring positions that share these places.
    balance_loss, z_loss: coefficients of the losses of `balance_losses`, for a loss that is a mean over tokens.
    """

    experts: int
    top_k: int
    hidden: int
    shared: int
    dispatch: str
    factor: float
    group: int
    scores: str
    normalised: bool
    scaling: float
    bias_rate: float | None
    balance_loss: float
    z_loss: float


class Experts(nnx.Module):
    """The parameters of the experts. kind: as for `MLP`; they have no biases."""

    def __init__(self, rngs: nnx.Rngs, experts: int, width: int, hidden: int, *, kind: str, out_scale: float) -> None:
        inner = (2, hidden) if kind == "swiglu" else (hidden,)
        split = (*(None,) * (len(inner) - 1), "tensor")
        self.up = Kernel(rngs, (experts, width, *inner), width**-0.5, ("expert", None, *split))
        self.down = Kernel(rngs, (experts, hidden, width), out_scale * hidden**-0.5, ("expert", "tensor", None))
        self.kind = kind


class Kernel(nnx.Module):
    """A kernel for each expert, [E, input, *outputs]."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, ...], std: float, spec: tuple[str | None, ...]) -> None:
        self.kernel = normal(rngs, shape, std, spec)


class MoE(nnx.Module):
    """A mixture of experts: x [B, s, D] -> [B, s, D].

    Names for `memory.remat`: as of `MLP`, with "mlp.rows" for the tokens where their experts are.

    kind, out_scale: as for `MLP`. matmul: of the shared experts; the others multiply in the dtype that they receive,
    also under fp8. options: see `MoEOptions`.

    Raises `UserError` for a group that does not divide the positions of a device.
    """

    figures = staticmethod(expert_figures)

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        options: MoEOptions,
        *,
        kind: str,
        out_scale: float,
        **matmul: Unpack[MatmulOptions],
    ) -> None:
        experts, hidden, shared = options["experts"], options["hidden"], options["shared"]
        routing: Any = {key: options[key] for key in ("scores", "normalised", "scaling", "bias_rate")}  # type: ignore[literal-required]
        self.router = Router(rngs, width, experts, options["top_k"], **routing)
        self.experts = Experts(rngs, experts, width, hidden, kind=kind, out_scale=out_scale)
        one: Any = {"kind": kind, "bias": False, "out_scale": out_scale, **matmul}
        self.shared = MLP(rngs, width, shared * hidden, **one) if shared else None
        self.options, self.sequence = options, matmul.get("sequence", False)

    def __call__(self, x_BsD: jax.Array, weight_B: jax.Array | None = None, *, drop: bool = True) -> jax.Array:
        """weight_B: what the losses of each sample are multiplied by; None: there are none. drop: false for the way
        "dropless", whatever the option says."""
        with jax.named_scope("router"):
            routing = self.router(x_BsD)  # of this device's positions, also where the experts then get all of them
        x_BSD, experts, gates = x_BsD, routing.experts_BsK, routing.gates_BsK
        if self.sequence:
            x_BSD, experts, gates = (whole_sequence(x) for x in (x_BSD, experts, gates))
        x_BSD = to_varying(x_BSD, varying_axes(self.experts.up.kernel[...]))  # one psum adds up its gradient
        run = self._capacity if drop and self.options["dispatch"] == "capacity" else self._dropless
        y, dropped_E = run(x_BSD, experts, gates)
        y = sum_to_positions(y) if self.sequence else psum(y, "tensor")
        y = self._balanced(y, routing, dropped_E, weight_B)
        y = y if self.shared is None else y + self.shared(x_BsD)
        return checkpoint_name(y, "mlp.out")

    def _balanced(self, y: jax.Array, routing: Routing, dropped_E: jax.Array, weight_B: jax.Array | None) -> jax.Array:
        """y, with what is counted and the losses of this layer behind it."""
        (_, own, experts), choices = routing.shares_BsE.shape, self.options["top_k"]
        chosen_BsE = jax.nn.one_hot(routing.experts_BsK, experts, dtype=routing.shares_BsE.dtype).sum(2)
        chosen_E = chosen_BsE.sum((0, 1))
        balance_B, z_B = balance_losses(routing, chosen_BsE)
        logs = jnp.log(jnp.maximum(routing.shares_BsE, jnp.finfo(routing.shares_BsE.dtype).tiny))
        entropy = -(routing.shares_BsE * logs).sum() / math.log(experts)
        if self.router.bias is not None:
            y = counted(y, self.router.bias[...], chosen_E - chosen_BsE.shape[0] * own * choices / experts)
        tokens = own * (context_size() if self.sequence is False else context_size() * lax.axis_size("tensor"))
        sums = jnp.stack([balance_B.sum() * tokens, z_B.sum() * tokens, entropy]) * choices
        statistics = jnp.concatenate([x.astype(chosen_E.dtype) for x in (chosen_E, dropped_E, sums)])
        y = counted(y, self.router.statistics[...], lax.stop_gradient(statistics))
        for name, loss_B in (("balance_loss", balance_B), ("z_loss", z_B)):
            if weight_B is not None and self.options[name]:
                y = with_loss(y, loss_B, self.options[name] * weight_B)
        return y

    def _compute(self, rows: jax.Array, multiply: Any) -> jax.Array:
        """The experts' MLPs. multiply: (rows, kernels [e, I, O]) -> rows."""
        up = self.experts.up.kernel[...]
        rows = checkpoint_name(rows, "mlp.rows")
        hidden = multiply(rows, up.reshape(*up.shape[:2], -1)).reshape(*rows.shape[:-1], *up.shape[2:])
        active = activation(checkpoint_name(hidden, "mlp.hidden"), self.experts.kind)
        return multiply(checkpoint_name(active, "mlp.activation"), self.experts.down.kernel[...])

    def _capacity(self, x: jax.Array, experts: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(a part of the result over `tensor`, the number of dropped choices of each expert)."""
        (B, S, D), K, E, g = x.shape, self.options["top_k"], self.options["experts"], self.options["group"]
        piece = S // 2 if context_size() > 1 else S
        if piece % g:
            raise UserError(
                f"experts: {piece} neighbouring positions on a device are not divisible by group={g}; allowed: a"
                f" divisor of {piece}, or dispatch='dropless'"
            )
        N, C = B * S // g, places(g, K, E, self.options["factor"])
        chosen_NgK = experts.reshape(N, g, K)
        place_NgK = _places_in_turn(chosen_NgK, E)
        dropped_E = _of_one_device(jnp.zeros(E, jnp.float32), chosen_NgK, place_NgK >= C, self.sequence)
        slot_NR = jnp.where(place_NgK < C, chosen_NgK * C + place_NgK, E * C).reshape(N, g * K)
        source_NM = sources(slot_NR, E * C)
        rows = dispatch(x.reshape(N, g, D), slot_NR, source_NM)
        rows = all_to_all(rows.reshape(N, E, C, D), "expert", split_dim=1, concat_dim=0)
        rows = self._compute(rows, lambda a, b: jnp.einsum("NeCI,eIO->NeCO", a, b))
        rows = all_to_all(rows, "expert", split_dim=0, concat_dim=1)
        each = collect(rows.reshape(N, E * C, D), slot_NR, source_NM)
        return _combined(each, gates).reshape(B, S, D), dropped_E

    def _dropless(self, x: jax.Array, experts: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `_capacity`; nothing is dropped."""
        (B, S, D), E, local = x.shape, self.options["experts"], self.experts.up.kernel.shape[0]
        tokens, chosen, gates = (each.reshape(B * S, -1) for each in (x, experts, gates))
        if active_axes("expert"):
            tokens, chosen, gates = (all_gather(each, "expert", dim=0) for each in (tokens, chosen, gates))
        mine = chosen.reshape(-1) - rank("expert") * local
        mine = jnp.where((mine >= 0) & (mine < local), mine, local)  # `local` is another device's
        size = block_rows(len(mine), local)
        blocks = -(-len(mine) // size) + local  # each expert's last block may have room
        slot, owner = _blocks_by_expert(mine, local, size, blocks)
        source = sources(slot[None], blocks * size)
        rows = dispatch(tokens[None], slot[None], source)
        rows = self._compute(rows[0], lambda a, b: grouped_product(a, b, owner))
        y = _combined(collect(rows[None], slot[None], source), gates)[0]
        if active_axes("expert"):
            y = reduce_scatter(y, "expert", dim=0)
        return y.reshape(B, S, D), to_varying(jnp.zeros(E, jnp.float32), varying_axes(experts))


def places(group: int, top_k: int, experts: int, factor: float) -> int:
    """The number of places that an expert has for the tokens of a group: at least one."""
    return max(1, math.ceil(group * top_k / experts * factor))


def _places_in_turn(chosen_NgK: jax.Array, experts: int) -> jax.Array:
    """[N, g, K] how many choices of the same expert come before each: all first choices before all second ones."""
    N, g, K = chosen_NgK.shape
    in_turn = chosen_NgK.transpose(0, 2, 1).reshape(N, K * g)
    hot = jax.nn.one_hot(in_turn, experts, dtype=jnp.int32)
    before = jnp.cumsum(hot, axis=1, dtype=jnp.int32) - hot
    place = jnp.take_along_axis(before, in_turn[..., None], axis=2)[..., 0]
    return place.reshape(N, K, g).transpose(0, 2, 1)


def _of_one_device(zeros_E: jax.Array, chosen: jax.Array, which: jax.Array, sequence: bool) -> jax.Array:
    """[E] how often each expert is in `chosen` where `which`. sequence: all devices of `tensor` know of all positions;
    then one of them counts."""
    counts = to_varying(zeros_E, varying_axes(which)).at[chosen.ravel()].add(which.ravel().astype(zeros_E.dtype))
    return jnp.where(rank("tensor") == 0, counts, jnp.zeros_like(counts)) if sequence else counts


def _blocks_by_expert(mine: jax.Array, local: int, size: int, blocks: int) -> tuple[jax.Array, jax.Array]:
    """(the place of each choice among blocks of rows that are sorted by expert, or `blocks * size` for a choice of
    another device; the owner of each block, `local` for none). mine: the expert of each choice, `local` for none."""
    order = jnp.argsort(mine, stable=True).astype(jnp.int32)
    counts = to_varying(jnp.zeros(local + 1, jnp.int32), varying_axes(mine)).at[mine].add(1)
    full = -(-counts // size)  # blocks of each expert
    ends, numbers = jnp.cumsum(full, dtype=jnp.int32), jnp.arange(len(mine), dtype=jnp.int32)
    shift = (ends - full) * size - (jnp.cumsum(counts, dtype=jnp.int32) - counts)
    place = jnp.where(mine[order] < local, numbers + shift[mine[order]], blocks * size)
    slot = jnp.zeros_like(place).at[order].set(place)
    owner = jnp.searchsorted(ends[:local], jnp.arange(blocks, dtype=jnp.int32), side="right", method="compare_all")
    return slot, owner.astype(jnp.int32)


def _combined(each: jax.Array, gates: jax.Array) -> jax.Array:
    """[N, g, D] the sum of each token's results times its gates. each: [N, g K, D]."""
    N, choices, D = each.shape
    gates = gates.reshape(N, -1, gates.shape[-1])
    results = each.reshape(N, choices // gates.shape[-1], gates.shape[-1], D).astype(gates.dtype)
    return jnp.einsum("NgKD,NgK->NgD", results, to_varying(gates, varying_axes(results))).astype(each.dtype)


class ExpertBlock(Block):
    """A block whose feed-forward half is a mixture of experts.

    rows: (documents or None, weight of each sample's balancing losses [B] or None). cache: as in `Block`; while text is
    generated, no token is dropped.
    """

    def __call__(
        self,
        h_BSD: jax.Array,
        keys_B: jax.Array,
        rows: tuple[PackedDocuments | None, jax.Array | None] = (None, None),
        cache: BlockCache | None = None,
    ) -> jax.Array:
        documents, weight_B = rows
        return self.run(h_BSD, keys_B, documents, cache, lambda mlp, x: mlp(x, weight_B, drop=cache is None))
