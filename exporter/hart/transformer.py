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

    def forward(
        self, x: Tensor, modulation: Tensor, angles: Tensor, k_past: Tensor, v_past: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: [R, L, C]; modulation: [R, 1, C]; angles: [R, L, D]. Returns: x, all keys, all values [S + L, R, H, D]."""
        pack = self.scale_shift_table + modulation  # [R, 6, C]
        gamma1, gamma2, scale1, scale2, shift1, shift2 = (part[:, None] for part in pack.unbind(1))
        y = self.ln_wo_grad(x) * (1 + scale1) + shift1
        o, keys, values = self.attn(y, k_past, v_past, lambda heads: rotate(heads, angles))
        x = x + o * gamma1
        return x + self.ffn(self.ln_wo_grad(x) * (1 + scale2) + shift2) * gamma2, keys, values


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

    def prompt(self, text: Tensor, mask: Tensor, positions: Tensor, guided: bool = True) -> Prompt:
        """What the steps need of B prompts.

        text:      [B, T, text width] float32; padding takes part in attention
        mask:      [B, T] bool, True on the prompt's own tokens, of which at least one; they alone make the modulation
        positions: [B, T] int64
        guided:    appends B unconditional rows: no text, all at position 0, the first token as the prompt
        """
        if guided:
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

    def empty_cache(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer keys and values [0, R, H, D]."""
        empty = self.word_embed.weight.new_zeros(0, rows, self.config.heads, self.config.head_width)
        return [(empty, empty) for _ in self.blocks]

    def logits(self, x: Tensor, prompt: Prompt) -> Tensor:
        """x: [R, L, C] behind the last block -> [R, L, V]."""
        scale, shift = prompt.head.chunk(2, dim=-1)
        return self.head(self.head_nm.ln_wo_grad(x) * (1 + scale) + shift)

    def residual_condition(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """What the residual head is told. x: [R, L, C]; embeddings: [R, L, d] of the drawn indices -> [R, L, C]."""
        return self.decoder_norm(x + self.word_embed(embeddings))
