"""The HART transformer in PyTorch: the reference that exported graphs are held against.

Parameter names are those of published checkpoints, so that a state dict loads as it is; everything is fp32. Text tokens
are scale 0 of the sequence, padding included. Keys and values are time-major [S, R, H, D], as in the runtime.
Source: HART (arXiv 2410.10812), mit-han-lab/hart, hart/modules/networks/basic_hart.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.cosine_attention import CosineAttention
from toprovar.exporter.hart.config import HartConfig
from toprovar.exporter.hart.residual import ResidualHead, SinusoidEmbedding
from toprovar.exporter.hart.rope import rotate
from toprovar.exporter.planned.loop import BlockOutput


@dataclass
class Prompt:
    """Everything of a prompt that the steps need. R rows: conditional, then unconditional ones under guidance.

    embedded:   [R, T, C] text tokens as the transformer takes them, without the level embedding
    modulation: [R, 1, C] mean over the prompt's own tokens
    head:       [R, 1, 2C] scale and shift of the head's norm
    positions:  [R, T] int64 positions of the text tokens
    guided:     the second half of the rows is unconditional
    """

    embedded: Tensor
    modulation: Tensor
    head: Tensor
    positions: Tensor
    guided: bool

    @property
    def images(self) -> int:
        return self.rows // 2 if self.guided else self.rows

    @property
    def rows(self) -> int:
        return self.embedded.shape[0]

    def take(self, rows: Tensor) -> Prompt:
        """Some rows, in the order of `rows` [R'] int64; the caller knows whether unconditional ones are among them."""
        return Prompt(self.embedded[rows], self.modulation[rows], self.head[rows], self.positions[rows], self.guided)

    @property
    def last_position(self) -> Tensor:
        """[R] where image positions start."""
        return self.positions[:, -1]


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class FeedForward(nn.Module):
    def __init__(self, config: HartConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One norm weight serves both halves of the block."""

    def __init__(self, config: HartConfig) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(6, config.width))
        self.ln_wo_grad = RMSNorm(config.width)
        self.attn = CosineAttention(config.width, config.heads, config.cosine, "qkv_proj")
        self.ffn = FeedForward(config)

    def _modulation(self, modulation: Tensor) -> tuple[Tensor, ...]:
        """gamma1, gamma2, scale1, scale2, shift1, shift2, each [R, 1, C]. modulation: [R, 1, C]."""
        return tuple(part[:, None] for part in (self.scale_shift_table + modulation).unbind(1))

    def self_attention(
        self,
        x: Tensor,
        modulation: Tensor,
        angles: Tensor,
        k_past: Tensor,
        v_past: Tensor,
        want_entropy: bool = False,
    ) -> BlockOutput:
        """What attention adds to x, [R, L, C]. angles: [R, L, D]; k_past, v_past: [S, R, H, D]."""
        gamma1, _, scale1, _, shift1, _ = self._modulation(modulation)
        y = self.ln_wo_grad(x) * (1 + scale1) + shift1
        out = self.attn(y, k_past, v_past, lambda heads: rotate(heads, angles), want_entropy)
        return BlockOutput(out.x * gamma1, out.k, out.v, out.entropy_nats)

    def feed_forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """What the feed-forward layer adds to x."""
        _, gamma2, _, scale2, _, shift2 = self._modulation(modulation)
        return self.ffn(self.ln_wo_grad(x) * (1 + scale2) + shift2) * gamma2


class HeadNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_wo_grad = RMSNorm(width)
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))


class Hart(nn.Module):
    def __init__(self, config: HartConfig) -> None:
        super().__init__()
        self.config = config
        C = config.width
        self.context_norm = RMSNorm(config.text_width)
        self.context_embed = nn.Linear(config.text_width, C)
        self.word_embed = nn.Linear(config.code_channels, C)
        self.lvl_embed = SinusoidEmbedding(config.level_width, C)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.head_nm = HeadNorm(C)
        self.head = nn.Linear(C, config.vocabulary)
        self.decoder_norm = RMSNorm(C)
        self.diffloss = ResidualHead(config)

    def prompt(
        self, text: Tensor, mask: Tensor, positions: Tensor, guided: bool = True, images: int | None = None
    ) -> Prompt:
        """What the steps need of B prompts.

        text:      [B, T, text width] float32; padding takes part in attention
        mask:      [B, T] bool, True on the prompt's own tokens, of which at least one; they alone make the modulation
        positions: [B, T] int64
        guided:    appends B unconditional rows: no text, all at position 0, the first token as the prompt; unless there
                   are rows of a negative prompt already, 2B for so many `images`
        """
        if guided and images in (None, len(text)):
            first = torch.zeros_like(mask)
            first[:, 0] = True
            text = torch.cat([text, torch.zeros_like(text)])
            mask = torch.cat([mask, first])
            positions = torch.cat([positions, torch.zeros_like(positions)])
        embedded = self.context_embed(self.context_norm(text))  # [R, T, C]
        weights = mask[..., None].float()
        mean = (embedded * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        return Prompt(embedded, mean, self.head_nm.ada_lin(embedded.amax(1, keepdim=True)), positions, guided)

    def level(self, scale: int) -> Tensor:
        """[C] what is added to every token of a scale."""
        return self.lvl_embed(torch.tensor([scale], device=self.word_embed.weight.device))[0]

    def embed_codes(self, codes: Tensor, scale: int) -> Tensor:
        """Input of an image scale. codes: [B, d, n, n] accumulated map at the scale's size -> [B, n*n, C]."""
        return self.word_embed(codes.flatten(2).transpose(1, 2)) + self.level(scale)

    def logits(self, x: Tensor, prompt: Prompt, rows: int | None = None) -> Tensor:
        """x: [R, L, C] behind the last block -> [R, L, V]."""
        scale, shift = prompt.head[:rows].chunk(2, dim=-1)
        return self.head(self.head_nm.ln_wo_grad(x) * (1 + scale) + shift)

    def residual_condition(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """What the residual head is told. x: [R, L, C]; embeddings: [R, L, d] of the drawn indices -> [R, L, C]."""
        return self.decoder_norm(x + self.word_embed(embeddings))
