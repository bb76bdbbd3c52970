"""The block of an encoder, whose positions all see each other. What `bert` and `vit` share."""

from flax import nnx

from jaxdist.config.schema import ModelConfig
from jaxdist.nn import MLP, Attention, Block, LayerNorm
from jaxdist.nn.linear import MatmulOptions


def encoder_block(config: ModelConfig, rngs: nnx.Rngs, matmul: MatmulOptions, *, post_norm: bool) -> Block:
    """A block of the sizes that a resolved `config` says. post_norm: see `Block`."""
    out_scale = (2 * config.layers) ** -0.5
    attention = Attention(
        rngs,
        config.width,
        config.heads,
        config.heads,
        bias=True,
        dropout=config.dropout,
        out_scale=out_scale,
        kernel=config.attention.replace("auto", "xla"),
        causal=False,
        **matmul,
    )
    mlp = MLP(rngs, config.width, config.mlp_width, kind="gelu_erf", bias=True, out_scale=out_scale, **matmul)
    norm1, norm2 = (LayerNorm(config.width, eps=config.norm_eps) for _ in range(2))
    sequence = matmul.get("sequence", False)
    return Block(norm1, attention, norm2, mlp, dropout=config.dropout, post_norm=post_norm, sequence=sequence)
