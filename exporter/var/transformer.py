"""The class-conditional VAR transformer in PyTorch.

Parameter names are those of published checkpoints, so that a state dict loads as it is; everything is fp32. Keys and
values are time-major [S, R, H, D], as in the runtime.
Source: VAR (arXiv 2404.02905), FoundationVision/VAR, models/var.py and models/basic_var.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.var.config import VarConfig

MAX_LOG_SCALE = math.log(100.0)


@dataclass
class Prompt:
    """Everything of a batch of classes that the steps need. R rows: conditional, then null ones under guidance.

    condition:   [R, C] class embeddings, the first token
    modulations: per layer [R, 6, C]: gamma1, gamma2, scale1, scale2, shift1, shift2
    head:        [R, 1, 2C] scale and shift of the head's norm
    guided:      the second half of the rows has the null class
    """

    condition: Tensor
    modulations: list[Tensor]
    head: Tensor
    guided: bool

    @property
    def rows(self) -> int:
        return self.condition.shape[0]

    @property
    def images(self) -> int:
        return self.rows // 2 if self.guided else self.rows


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Layer norm without affine, then scale and shift. x: [R, L, C]; scale, shift: [R, 1, C]."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def ada_lin(width: int, parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, parts * width))


class SelfAttention(nn.Module):
    """Cosine attention with a learned factor per head; positions are in the input."""

    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        C, H = config.width, config.heads
        self.heads = H
        self.mat_qkv = nn.Linear(C, 3 * C, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(C))
        self.v_bias = nn.Parameter(torch.zeros(C))
        self.register_buffer("zero_k_bias", torch.zeros(C))
        self.plain_scale = 0.25 / math.sqrt(config.head_width)
        self.cosine = config.cosine
        if config.cosine:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, H, 1, 1), math.log(4.0)))
        self.proj = nn.Linear(C, C)

    def forward(self, x: Tensor, k_past: Tensor, v_past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [R, L, C]; k_past, v_past: [S, R, H, D]. Returns: output, all keys, all values."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.mat_qkv.weight, bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [R, H, L, D]
        if self.cosine:
            factor = self.scale_mul_1H11.clamp(max=MAX_LOG_SCALE).exp()
            q, k = F.normalize(q, dim=-1, eps=1e-12) * factor, F.normalize(k, dim=-1, eps=1e-12)
        keys = torch.cat([k_past, k.permute(2, 0, 1, 3)])  # [S + L, R, H, D]
        values = torch.cat([v_past, v.permute(2, 0, 1, 3)])
        o = F.scaled_dot_product_attention(
            q, keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3), scale=1.0 if self.cosine else self.plain_scale
        )
        return self.proj(o.transpose(1, 2).flatten(-2)), keys, values


class FeedForward(nn.Module):
    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.ffn_width)
        self.fc2 = nn.Linear(config.ffn_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        self.attn = SelfAttention(config)
        self.ffn = FeedForward(config)
        if config.shared_ada:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, config.width))
        else:
            self.ada_lin = ada_lin(config.width, 6)

    def modulation(self, condition: Tensor, shared: Tensor | None) -> Tensor:
        """[R, 6, C]. condition: [R, C]; shared: [R, 6, C] where one layer serves all blocks."""
        if shared is not None:
            return self.ada_gss[0] + shared
        return self.ada_lin(condition).unflatten(-1, (6, -1))

    def forward(self, x: Tensor, modulation: Tensor, k_past: Tensor, v_past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [R, L, C]; modulation: [R, 6, C]. Returns: x, all keys, all values [S + L, R, H, D]."""
        gamma1, gamma2, scale1, scale2, shift1, shift2 = (part[:, None] for part in modulation.unbind(1))
        o, keys, values = self.attn(modulate(x, scale1, shift1), k_past, v_past)
        x = x + o * gamma1
        return x + self.ffn(modulate(x, scale2, shift2)) * gamma2, keys, values


class HeadNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ada_lin = ada_lin(width, 2)


class Var(nn.Module):
    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        self.config = config
        C = config.width
        self.pos_start = nn.Parameter(torch.zeros(1, 1, C))
        self.pos_1LC = nn.Parameter(torch.zeros(1, config.tokens, C))
        self.lvl_embed = nn.Embedding(config.levels, C)
        self.class_emb = nn.Embedding(config.classes + 1, C)
        self.word_embed = nn.Linear(config.code_channels, C)
        if config.shared_ada:
            self.shared_ada_lin = ada_lin(C, 6)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.head_nm = HeadNorm(C)
        self.head = nn.Linear(C, config.vocabulary)

    def prompt(self, labels: Tensor, guided: bool = True) -> Prompt:
        """What the steps need of B classes. labels: [B] int64; guided: appends B rows of the null class."""
        if guided:
            labels = torch.cat([labels, torch.full_like(labels, self.config.classes)])
        condition = self.class_emb(labels)
        shared = self.shared_ada_lin(condition).unflatten(-1, (6, -1)) if self.config.shared_ada else None
        modulations = [block.modulation(condition, shared) for block in self.blocks]
        return Prompt(condition, modulations, self.head_nm.ada_lin(condition)[:, None], guided)

    def positions(self, scale: int, first: int, count: int) -> Tensor:
        """[count, C] level and position of a scale's tokens. first: tokens of the scales before."""
        return self.lvl_embed.weight[scale] + self.pos_1LC[0, first : first + count]

    def first_token(self, prompt: Prompt) -> Tensor:
        """Input of scale 0, [R, 1, C]."""
        return prompt.condition[:, None] + self.pos_start + self.positions(0, 0, 1)

    def embed_codes(self, codes: Tensor, scale: int, first: int) -> Tensor:
        """Input of a later scale. codes: [B, d, n, n] accumulated map at the scale's size -> [B, n*n, C]."""
        tokens = codes.flatten(2).transpose(1, 2)
        return self.word_embed(tokens) + self.positions(scale, first, tokens.shape[1])

    def empty_cache(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer keys and values [0, R, H, D]."""
        empty = self.word_embed.weight.new_zeros(0, rows, self.config.heads, self.config.head_width)
        return [(empty, empty) for _ in self.blocks]

    def logits(self, x: Tensor, prompt: Prompt) -> Tensor:
        """x: [R, L, C] behind the last block -> [R, L, V]."""
        return self.head(modulate(x, *prompt.head.chunk(2, dim=-1)))
