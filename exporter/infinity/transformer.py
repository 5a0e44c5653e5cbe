"""The Infinity transformer in PyTorch: the reference that the exported graphs are held against.

Parameter names are those of published checkpoints, so that a state dict loads as it is. The arithmetic is fp32 wherever
the reference is (norms, q/k normalisation, rotation, head). Keys and values are time-major [S, R, H, D], as in the
runtime. Source: Infinity (arXiv 2412.04431), FoundationVision/Infinity, infinity/models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.infinity.config import InfinityConfig
from toprovar.exporter.infinity.rope import rope_table
from toprovar.exporter.planned.loop import BlockOutput
from toprovar.exporter.schedules import Schedule, token_counts
from toprovar.plugins import entropy_attention
from toprovar.plugins.attention.oracle import attention

MAX_LOG_SCALE = math.log(100.0)
MASKED = -1e4  # additive mask; finite, so that half-precision graphs never meet inf - inf


@dataclass
class Prompt:
    """Everything of a prompt that the steps need; constant over scales. R rows: conditional, then unconditional.

    pooled:     [R, C]        pooled text; first token and head modulation
    modulation: [R, 1, 6, C]  shared AdaLN pack: gamma1, gamma2, scale1, scale2, shift1, shift2
    head:       [R, 1, 2, C]  scale and shift of the head's norm
    cross:      per layer, keys and values of the text, each [R, H, T, D]
    mask:       [R, 1, 1, T]  additive, 0 on text and -1e4 on padding
    """

    pooled: Tensor
    modulation: Tensor
    head: Tensor
    cross: list[tuple[Tensor, Tensor]]
    mask: Tensor

    @property
    def rows(self) -> int:
        return self.pooled.shape[0]

    def take(self, rows: Tensor) -> Prompt:
        """Some rows, in the order of `rows` [R'] int64."""
        return Prompt(
            self.pooled[rows],
            self.modulation[rows],
            self.head[rows],
            [(k[rows], v[rows]) for k, v in self.cross],
            self.mask[rows],
        )


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Layer norm without affine, then the prompt's scale and shift; all in fp32. x: [R, L, C]."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def unit(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=-1, eps=1e-12)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring pairs. x: [R, H, L, D]; cos, sin: [L, D/2], or [R, 1, L, D/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class SelfAttention(nn.Module):
    """Cosine attention: unit q and k, a learned factor per head, softmax scale 1."""

    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        C, H = config.width, config.heads
        self.heads = H
        self.mat_qkv = nn.Linear(C, 3 * C, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(C))
        self.v_bias = nn.Parameter(torch.zeros(C))
        self.register_buffer("zero_k_bias", torch.zeros(C))
        self.scale_mul_1H11 = nn.Parameter(torch.full((1, H, 1, 1), math.log(4.0)))
        self.proj = nn.Linear(C, C)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v. x: [R, L, C] -> each [R, H, L, D]."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.mat_qkv.weight.to(x.dtype), bias.to(x.dtype))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [R, H, L, D]
        q = unit(q) * self.scale_mul_1H11.float().clamp(max=MAX_LOG_SCALE).exp()
        return rotate(q, cos, sin), rotate(unit(k), cos, sin), v


class CrossAttention(nn.Module):
    """Attention of image tokens to the rows of their own prompt."""

    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        C = config.width
        self.heads = config.heads
        self.mat_q = nn.Linear(C, C)
        self.mat_kv = nn.Linear(C, 2 * C, bias=False)
        self.v_bias = nn.Parameter(torch.zeros(C))
        self.register_buffer("zero_k_bias", torch.zeros(C))
        self.proj = nn.Linear(C, C)

    def keys_values(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """text: [R, T, C] -> keys, values, each [R, H, T, D]; once per prompt, not once per scale."""
        k, v = (
            F.linear(text, self.mat_kv.weight.to(text.dtype)).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        return k, v + self.v_bias.view(self.heads, 1, -1)

    def forward(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q = self.mat_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [R, H, L, D]
        o = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask.to(q.dtype))
        return self.proj(o.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width: int, ffn_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, ffn_width)
        self.fc2 = nn.Linear(ffn_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        C = config.width
        self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, C))
        self.sa = SelfAttention(config)
        self.ca = CrossAttention(config)
        self.ca_norm = nn.LayerNorm(C, eps=1e-6)
        self.ffn = FeedForward(config.width, config.ffn_width)

    def forward(
        self,
        x: Tensor,
        prompt: Prompt,
        cross: tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        k_past: Tensor,
        v_past: Tensor,
        want_entropy: bool = False,
    ) -> BlockOutput:
        """One scale's tokens through the block, with the cache of earlier scales.

        x: [R, L, C]; cos, sin: [L, D/2] at the tokens' original positions, or [R, 1, L, D/2] where rows differ;
        k_past, v_past: [S, R, H, D].
        """
        residual, k_new, v_new, entropy = self.self_attention(x, prompt, cos, sin, k_past, v_past, want_entropy)
        x = x + residual
        x = x + self.cross_attention(x, prompt, cross)
        return BlockOutput(x + self.feed_forward(x, prompt), k_new, v_new, entropy)

    def _modulation(self, prompt: Prompt) -> tuple[Tensor, ...]:
        """gamma1, gamma2, scale1, scale2, shift1, shift2, each [R, 1, C]."""
        return (self.ada_gss + prompt.modulation).unbind(2)

    def self_attention(
        self,
        x: Tensor,
        prompt: Prompt,
        cos: Tensor,
        sin: Tensor,
        k_past: Tensor,
        v_past: Tensor,
        want_entropy: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What self-attention adds to x, new keys and values, and the entropy if asked for; arguments of `forward`."""
        gamma1, _, scale1, _, shift1, _ = self._modulation(prompt)
        q, k, v = self.sa.project(modulate(x, scale1, shift1), cos, sin)
        k_new, v_new = k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)  # [L, R, H, D]
        keys = torch.cat([k_past, k_new]).permute(1, 2, 0, 3)
        values = torch.cat([v_past, v_new]).permute(1, 2, 0, 3).to(v.dtype)  # a cache may be wider than autocast's v
        entropy = None
        if want_entropy:
            o, entropy = entropy_attention(q.to(v.dtype), keys.to(v.dtype), values, scale=1.0, head_mean=True)  # [R, L]
        else:
            o = attention(q, keys, values, scale=1.0)
        return self.sa.proj(o.transpose(1, 2).flatten(-2)) * gamma1, k_new, v_new, entropy

    def cross_attention(self, x: Tensor, prompt: Prompt, cross: tuple[Tensor, Tensor]) -> Tensor:
        """What cross-attention adds to x. x: [R, L, C]."""
        return self.ca(self.ca_norm(x), *cross, prompt.mask)

    def feed_forward(self, x: Tensor, prompt: Prompt) -> Tensor:
        """What the feed-forward layer adds to x. x: [R, L, C]."""
        _, gamma2, _, scale2, _, shift2 = self._modulation(prompt)
        return self.ffn(modulate(x, scale2, shift2)) * gamma2

    def after_attention(
        self,
        x: Tensor,
        o: Tensor,
        cross: tuple[Tensor, Tensor],
        mask: Tensor,
        gamma1: Tensor,
        gamma2: Tensor,
        scale2: Tensor,
        shift2: Tensor,
    ) -> Tensor:
        """Everything behind the self-attention, for training. o: [R, H, L, D]."""
        x = x + self.sa.proj(o.transpose(1, 2).flatten(-2)) * gamma1
        x = x + self.ca(self.ca_norm(x), *cross, mask)
        return x + self.ffn(modulate(x, scale2, shift2)) * gamma2


def block_causal(
    block: Block,
    x: Tensor,
    modulation: Tensor,
    cross: tuple[Tensor, Tensor],
    mask: Tensor,
    cos: Tensor,
    sin: Tensor,
    counts: Sequence[int],
) -> Tensor:
    """A block over all scales at once: each scale attends to itself and the scales before it, without a mask tensor.

    x: [B, N_0 + N_1 + ..., C]; modulation and mask as in `Prompt`; counts: tokens per scale. Training compiles it.
    """
    gamma1, gamma2, scale1, scale2, shift1, shift2 = (block.ada_gss + modulation).unbind(2)
    q, k, v = block.sa.project(modulate(x, scale1, shift1), cos, sin)
    q, k = q.to(v.dtype), k.to(v.dtype)
    outputs, start = [], 0
    for count in counts:
        end = start + count
        outputs.append(F.scaled_dot_product_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], scale=1.0))
        start = end
    return block.after_attention(x, torch.cat(outputs, dim=2), cross, mask, gamma1, gamma2, scale2, shift2)


class _PooledText(nn.Module):
    """Pools a prompt's rows to one vector with a learned query (`text_proj_for_sos.ca`)."""

    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        C, heads = config.width, config.pool_heads
        self.mat_q = nn.Parameter(torch.zeros(1, heads, C // heads))
        self.mat_kv = nn.Linear(config.text_width, 2 * C, bias=False)
        self.v_bias = nn.Parameter(torch.zeros(C))
        self.register_buffer("zero_k_bias", torch.zeros(C))
        self.proj = nn.Linear(C, C)

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        """text: [R, T, text width]; mask: [R, 1, 1, T] additive -> [R, C]."""
        heads, width = self.mat_q.shape[1:]
        k, v = self.mat_kv(text).unflatten(-1, (2, heads, width)).permute(2, 0, 3, 1, 4)  # [R, heads, T, width]
        v = v + self.v_bias.view(heads, 1, width)
        scores = (self.mat_q.unsqueeze(2) * width**-0.5) @ k.transpose(-1, -2) + mask  # [R, heads, 1, T]
        return self.proj((scores.softmax(-1) @ v).flatten(1))


class _TextPool(nn.Module):
    """Holds the pooling under its published name, `text_proj_for_sos.ca`."""

    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        self.ca = _PooledText(config)


class _TextNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class _HeadNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))


class _Chunk(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.module = nn.ModuleList(blocks)


class Infinity(nn.Module):
    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        C = config.width
        self.config = config
        self.cfg_uncond = nn.Parameter(torch.zeros(config.text_length, config.text_width))
        self.text_norm = _TextNorm(config.text_width)
        self.text_proj_for_sos = _TextPool(config)
        self.text_proj_for_ca = nn.Sequential(
            nn.Linear(config.text_width, C), nn.GELU(approximate="tanh"), nn.Linear(C, C)
        )
        self.pos_start = nn.Parameter(torch.zeros(1, 1, C))
        self.lvl_embed = nn.Embedding(config.levels, C)
        self.word_embed = nn.Linear(config.bits, C)
        self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(C, 6 * C))
        self.head_nm = _HeadNorm(C)
        self.head = nn.Linear(C, 2 * config.bits)
        blocks = [Block(config) for _ in range(config.depth)]
        if config.chunks == 1:
            self.blocks = nn.ModuleList(blocks)
        else:
            per_chunk = config.depth // config.chunks
            self.block_chunks = nn.ModuleList(
                _Chunk(blocks[i : i + per_chunk]) for i in range(0, config.depth, per_chunk)
            )
        self._layers = blocks  # a plain list: registers nothing, keeps the names above

    @property
    def layers(self) -> list[Block]:
        return self._layers

    def initialize(self, seed: int) -> None:
        """Training initialisation: small normal weights, residual branches scaled with depth."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = 0.02 / math.sqrt(2 * self.config.depth)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2 or name.endswith(("scale_mul_1H11", "ada_gss")):
                    continue
                std = residual_std if name.endswith(("proj.weight", "fc2.weight")) else 0.02
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            for block in self.layers:
                block.ada_gss[:, :, :2].fill_(1.0)  # gamma: residual branches open from the start
            C = self.config.width
            self.shared_ada_lin[1].weight.mul_(0.1)
            self.head_nm.ada_lin[1].weight.mul_(0.1)
            self.text_proj_for_sos.ca.mat_q.copy_(
                torch.randn(self.text_proj_for_sos.ca.mat_q.shape, generator=generator) * C**-0.5
            )

    def prompt(self, text_rows: Tensor, text_mask: Tensor) -> Prompt:
        """What the steps need of the prompts. text_rows: [R, T, text width]; text_mask: [R, T] bool, True on text."""
        mask = torch.where(text_mask[:, None, None, :], 0.0, MASKED)  # [R, 1, 1, T]
        text = self.text_norm(text_rows)
        pooled = self.text_proj_for_sos.ca(text, mask)
        cross_text = self.text_proj_for_ca(text)
        C = self.config.width
        return Prompt(
            pooled=pooled,
            modulation=self.shared_ada_lin(pooled).float().view(-1, 1, 6, C),
            head=self.head_nm.ada_lin(pooled).float().view(-1, 1, 2, C),
            cross=[block.ca.keys_values(cross_text) for block in self.layers],
            mask=mask,
        )

    def first_input(self, prompt: Prompt) -> Tensor:
        """The start token. Returns: [R, 1, C]."""
        return prompt.pooled[:, None] + self.pos_start + self.lvl_embed.weight[0]

    def embed_codes(self, tokens: Tensor, scale: int) -> Tensor:
        """Input of a scale >= 1. tokens: [B, L, bits] resized accumulator -> [B, L, C]."""
        return self.word_embed(tokens) + self.lvl_embed.weight[scale]

    def logits(self, x: Tensor, prompt: Prompt, rows: int | None = None) -> Tensor:
        """Head in fp32. x: [R, L, C] -> [R, L, 2*bits]: adjacent pairs (logit of 0, logit of 1)."""
        scale, shift = prompt.head[:rows].unbind(2)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(modulate(x, scale, shift))

    def teacher_forced_logits(
        self, text_rows: Tensor, text_mask: Tensor, code_inputs: Sequence[Tensor], schedule: Schedule
    ) -> Tensor:
        """One pass over all scales for training and calibration; equals the cached loop up to rounding.

        text_rows:   [B, T, text width], text_mask: [B, T] bool
        code_inputs: for scale 1.. the resized accumulator in token layout, each [B, N_k, bits]
        Returns:     [B, N_0 + N_1 + ..., 2*bits]
        Attention is block-causal and runs scale by scale over the keys that scale may see, so it needs no mask.
        """
        prompt = self.prompt(text_rows, text_mask)
        scales = len(code_inputs) + 1
        counts = token_counts(schedule)[:scales]
        embedded = [self.embed_codes(tokens, k + 1) for k, tokens in enumerate(code_inputs)]
        x = torch.cat([self.first_input(prompt), *embedded], dim=1)
        table = torch.from_numpy(rope_table(self.config.head_width, schedule)).to(x.device)[:, : sum(counts)]
        for block, cross in zip(self.layers, prompt.cross, strict=True):
            x = block_causal(block, x, prompt.modulation, cross, prompt.mask, table[0], table[1], counts)
        return self.logits(x, prompt)
