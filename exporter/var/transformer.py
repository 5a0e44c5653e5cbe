"""The class-conditional VAR transformer in PyTorch.

Parameter names are those of published checkpoints, so that a state dict loads as it is; everything is fp32. Keys and
values are time-major [S, R, H, D], as in the runtime.
Source: VAR (arXiv 2404.02905), FoundationVision/VAR, models/var.py and models/basic_var.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toprovar.exporter.cosine_attention import CosineAttention
from toprovar.exporter.infinity.transformer import FeedForward, modulate
from toprovar.exporter.planned.loop import BlockOutput
from toprovar.exporter.var.config import VarConfig


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

    def take(self, rows: Tensor) -> Prompt:
        """Some rows, in the order of `rows` [R'] int64; the caller knows whether unconditional ones are among them."""
        return Prompt(self.condition[rows], [m[rows] for m in self.modulations], self.head[rows], self.guided)


def ada_lin(width: int, parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, parts * width))


class Block(nn.Module):
    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        self.attn = CosineAttention(config.width, config.heads, config.cosine, "mat_qkv")
        self.ffn = FeedForward(config.width, config.ffn_width)
        if config.shared_ada:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, config.width))
        else:
            self.ada_lin = ada_lin(config.width, 6)

    def modulation(self, condition: Tensor, shared: Tensor | None) -> Tensor:
        """[R, 6, C]. condition: [R, C]; shared: [R, 6, C] where one layer serves all blocks."""
        if shared is not None:
            return self.ada_gss[0] + shared
        return self.ada_lin(condition).unflatten(-1, (6, -1))

    def self_attention(
        self, x: Tensor, modulation: Tensor, k_past: Tensor, v_past: Tensor, want_entropy: bool = False
    ) -> BlockOutput:
        """What attention adds to x, [R, L, C]. modulation: [R, 6, C]; k_past, v_past: [S, R, H, D]."""
        gamma1, _, scale1, _, shift1, _ = (part[:, None] for part in modulation.unbind(1))
        out = self.attn(modulate(x, scale1, shift1), k_past, v_past, want_entropy=want_entropy)
        return BlockOutput(out.x * gamma1, out.k, out.v, out.entropy_nats)

    def feed_forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """What the feed-forward layer adds to x."""
        _, gamma2, _, scale2, _, shift2 = (part[:, None] for part in modulation.unbind(1))
        return self.ffn(modulate(x, scale2, shift2)) * gamma2


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

    def logits(self, x: Tensor, prompt: Prompt, rows: int | None = None) -> Tensor:
        """x: [R, L, C] behind the last block -> [R, L, V]."""
        return self.head(modulate(x, *prompt.head[:rows].chunk(2, dim=-1)))
