"""Options of the model `gpt`, and what they must be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from jaxdist.config.rules.fields import section, setting
from jaxdist.config.rules.transformer import (
    attention_setting,
    check_context,
    check_heads,
    check_parts,
    check_rotary,
    check_sequence,
    check_tensor,
    loss_chunk_setting,
    scan_blocks_setting,
)
from jaxdist.config.schema import Config, ModelConfig
from jaxdist.config.sections.moe import MoEConfig, check_moe


def unused_axes(model: ModelConfig) -> tuple[str, ...]:
    """The mesh axes that no layer uses."""
    return () if model.moe.on else ("expert",)


@dataclass(frozen=True)
class Options(ModelConfig):
    """GPT-2, Llama, and what lies between. What is left at null, but for `loss_chunk`, goes by `style`."""

    style: str = setting("gpt2", "what the keys left at null mean", choices=("gpt2", "llama"))
    layers: int = setting(4, "number of blocks", at_least=1)
    width: int = setting(128, "size of the residual stream", at_least=1)
    heads: int = setting(4, "attention heads; divides width", at_least=1)
    head_width: int | None = setting(None, "width of a head; null: width / heads", at_least=1)
    kv_heads: int | None = setting(None, "key and value heads; divides heads; null: as many as heads", at_least=1)
    vocab: int = setting(256, "number of token ids; 256 for bytes", at_least=1)
    mlp_width: int | None = setting(
        None, "hidden size of the MLP; null: 4 x width (gelu), or 8/3 x width up to a multiple of 64", at_least=1
    )
    moe: MoEConfig = section(MoEConfig, "experts in place of the MLPs")
    positions: str | None = setting(
        None, "position encoding; null: learned (gpt2), rope (llama)", choices=("learned", "rope")
    )
    norm: str | None = setting(
        None, "normalisation; null: layernorm (gpt2), rmsnorm (llama)", choices=("layernorm", "rmsnorm")
    )
    mlp: str | None = setting(None, "kind of MLP; null: gelu (gpt2), swiglu (llama)", choices=("gelu", "swiglu"))
    tied: bool | None = setting(None, "whether embedding and head share weights; null: true (gpt2), false (llama)")
    bias: bool | None = setting(None, "whether linear layers have a bias; null: true (gpt2), false (llama)")
    qkv_bias: bool | None = setting(None, "whether queries, keys and values have a bias; null: as bias says")
    qk_norm: bool = setting(False, "whether each query and key is normalised over its head, before rope")
    window: int | None = setting(
        None, "positions that a position sees, its own and the last ones before it; null: all before it", at_least=1
    )
    dropout: float = setting(0.0, "probability of dropping an activation in training", at_least=0, below=1)
    norm_eps: float = setting(1e-5, "added to the variance in normalisation", above=0)
    rope_theta: float = setting(10000.0, "base of the rotary frequencies (positions: rope)", above=0)
    rope_type: str = setting(
        "default",
        "scaling of the rotary frequencies; linear: all are divided; llama3: those of long wavelengths",
        choices=("default", "linear", "llama3"),
    )
    rope_factor: float = setting(8.0, "divisor of rotary frequencies (rope_type: linear, llama3)", at_least=1)
    rope_low: float = setting(1.0, "wavelengths above rope_positions / rope_low are divided (llama3)", above=0)
    rope_high: float = setting(4.0, "wavelengths below rope_positions / rope_high are kept (llama3)", above=0)
    rope_positions: int = setting(8192, "positions that the model was trained on first (llama3)", at_least=1)
    attention: str = attention_setting()
    scan_blocks: int | None = scan_blocks_setting()
    loss_chunk: int | None = loss_chunk_setting()
    position_losses: int = setting(
        0,
        "evaluations also give the loss of so many equal parts of a text's positions",
        at_least=0,
        at_most=64,
        how=True,
    )

    def resolved(self) -> Self:
        """Every None replaced by what the style implies, but for `loss_chunk`."""
        llama = self.style == "llama"
        bias = not llama if self.bias is None else self.bias
        head = None if self.width % self.heads else self.width // self.heads  # None is refused
        mlp = self.mlp or ("swiglu" if llama else "gelu")
        # 8/3 keeps the parameter count of a 4x GELU network; 64 is the granularity matrix units like.
        wide = 4 * self.width if mlp == "gelu" else -(-8 * self.width // (3 * 64)) * 64
        return replace(
            self,
            head_width=head if self.head_width is None else self.head_width,
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            mlp_width=wide if self.mlp_width is None else self.mlp_width,
            moe=self.moe.resolved(wide if self.mlp_width is None else self.mlp_width),
            positions=self.positions or ("rope" if llama else "learned"),
            norm=self.norm or ("rmsnorm" if llama else "layernorm"),
            mlp=mlp,
            tied=not llama if self.tied is None else self.tied,
            bias=bias,
            qkv_bias=bias if self.qkv_bias is None else self.qkv_bias,
        )

    def idle(self) -> tuple[str, ...]:
        """The other keys of `moe` without experts; the width of an MLP where all blocks have experts."""
        if not self.moe.on:
            return ("moe.*",)
        return () if self.moe.dense else ("mlp_width",)

    @property
    def stacked(self) -> int:
        """The blocks after those that `moe.dense` keeps apart, which belong to the unit of the embedding."""
        return self.layers - (self.moe.dense if self.moe.on else 0)

    def describe(self) -> str:
        """Such as "gpt (llama): 4 blocks, width 128, 4 heads"."""
        moe = f", {self.moe.top_k} of {self.moe.experts} experts" if self.moe.on else ""
        return f"{self.name} ({self.style}): {self.layers} blocks, width {self.width}, {self.heads} heads{moe}"


def check_options(config: Config, mesh: Mapping[str, int]) -> None:
    """Raise `UserError` where the model does not fit itself or a mesh of these sizes."""
    model = config.model.resolved()
    check_heads(model)
    check_rotary(model)
    check_parts(model.position_losses, config.data.seq_len)
    check_tensor(model, mesh["tensor"])
    check_sequence(config, mesh["tensor"])
    check_context(config, model, mesh)
    check_moe(config, model, mesh)
