"""The InfinityStar transformer in PyTorch: the reference that exported graphs are held against.

Parameter names are those of published checkpoints, so that a state dict loads as it is; everything is fp32. Keys and
values are time-major [S, R, G, D], as in the runtime; a pass is given what it may see instead of a growing cache.
Source: FoundationVision/InfinityStar, infinity/models/infinity.py and basic.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.infinitystar.config import InfinityStarConfig
from toprovar.exporter.infinitystar.rope import text_angles
from toprovar.exporter.planned.loop import BlockOutput
from toprovar.plugins import entropy_attention

KeysValues = tuple[Tensor, Tensor]
Context = list[KeysValues]  # per layer


@dataclass
class Prompt:
    """Everything of B prompts that the passes need. R rows: conditional, then unconditional ones under guidance.

    context:  per layer keys and values of the text, each [T, R, G, D]
    visible:  [R, T] bool, what may be attended to
    embedded: the text as the transformer takes it, [R, T, C]
    """

    context: Context
    visible: Tensor
    embedded: Tensor

    @property
    def rows(self) -> int:
        return len(self.embedded)

    def take(self, rows: Tensor) -> Prompt:
        """Some rows, in the order of `rows` [R'] int64."""
        context = [(k[:, rows], v[:, rows]) for k, v in self.context]
        return Prompt(context, self.visible[rows], self.embedded[rows])


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns neighbouring pairs. x: [R, L, heads, D]; angles: [L, D/2], or [R, L, D/2] where rows differ."""
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)


class Attention(nn.Module):
    """Each head of keys and values serves several query heads."""

    def __init__(self, config: InfinityStarConfig) -> None:
        super().__init__()
        D = self.head_width = config.head_width
        self.q_proj = nn.Linear(config.width, config.heads * D, bias=False)
        self.k_proj = nn.Linear(config.width, config.kv_heads * D, bias=False)
        self.v_proj = nn.Linear(config.width, config.kv_heads * D, bias=False)
        self.o_proj = nn.Linear(config.heads * D, config.width, bias=False)
        self.q_norm = RMSNorm(D)
        self.k_norm = RMSNorm(D)

    def forward(
        self, x: Tensor, angles: Tensor, past: list[KeysValues], visible: Tensor | None, want_entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x: [R, L, C]; angles: [L, D/2] or [R, L, D/2]; past: keys and values seen besides the own ones.

        visible: [R, S + L] bool, None for all
        Returns: output [R, L, C], own keys and values [L, R, G, D], entropy [R, L] in nats if asked for.
        """
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles)
        k, v = k.transpose(0, 1), v.transpose(0, 1)  # [L, R, G, D]
        keys = torch.cat([*(keys for keys, _ in past), k]).permute(1, 2, 0, 3)
        values = torch.cat([*(values for _, values in past), v]).permute(1, 2, 0, 3)
        q, scale, entropy = q.transpose(1, 2), self.head_width**-0.5, None
        if want_entropy:
            o, entropy = entropy_attention(q, keys, values, scale=scale, head_mean=True, key_mask=visible)
        else:
            mask = None if visible is None else visible[:, None, None]
            o = F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(-2)), k, v, entropy


class FeedForward(nn.Module):
    def __init__(self, config: InfinityStarConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: InfinityStarConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width)
        self.attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, angles: Tensor, past: list[KeysValues], visible: Tensor | None, want_entropy: bool = False
    ) -> BlockOutput:
        """Arguments of `Attention.forward`."""
        o, k, v, entropy = self.attention(x, angles, past, visible, want_entropy)
        x = x + o
        return BlockOutput(x + self.feed_forward(x), k, v, entropy)

    def attention(
        self, x: Tensor, angles: Tensor, past: list[KeysValues], visible: Tensor | None, want_entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What attention adds to x, and what else `Attention.forward` gives."""
        return self.attn(self.input_layernorm(x), angles, past, visible, want_entropy)

    def feed_forward(self, x: Tensor) -> Tensor:
        """What the feed-forward layer adds to x."""
        return self.mlp(self.post_attention_layernorm(x))


class Chunk(nn.Module):
    """Groups layers as checkpoints name them."""

    def __init__(self, config: InfinityStarConfig, layers: int) -> None:
        super().__init__()
        self.module = nn.ModuleList(Block(config) for _ in range(layers))


class InfinityStar(nn.Module):
    def __init__(self, config: InfinityStarConfig) -> None:
        super().__init__()
        self.config = config
        C = config.width
        self.cfg_uncond = nn.Parameter(torch.zeros(config.text_length, config.text_width))
        self.text_proj = nn.Linear(config.text_width, C)
        self.word_embed = nn.Linear(config.detail_bits, C)
        if config.chunks == 1:
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        else:
            layers = config.depth // config.chunks
            self.block_chunks = nn.ModuleList(Chunk(config, layers) for _ in range(config.chunks))
        self.norm_hidden_sates = RMSNorm(C)  # spelt as in checkpoints
        self.head = nn.Linear(C, 2 * config.detail_bits)
        self.semantic_head2 = nn.Linear(C, 2 * config.semantic_bits)

    @property
    def layers(self) -> list[Block]:
        if self.config.chunks == 1:
            return list(self.blocks)
        return [block for chunk in self.block_chunks for block in chunk.module]

    def text_rows(self, texts: list[Tensor], negatives: list[Tensor] | None, guided: bool) -> tuple[Tensor, Tensor]:
        """Rows of B prompts and what of them may be seen. Returns: [R, T, C] and [R, T] bool.

        texts:     per image [T_b, text width]
        negatives: likewise; None takes as many learned rows as the prompt has
        The reference pads the two rows of an image to the longer one; such padding is zero and is attended to.
        """
        if guided:
            texts = texts + (negatives or [self.cfg_uncond[: len(text)] for text in texts])
        images = len(texts) // 2 if guided else len(texts)
        lengths = torch.tensor([len(text) for text in texts])
        seen = lengths.view(-1, images).amax(0).repeat(len(texts) // images)  # [R]
        x = self.word_embed.weight.new_zeros(len(texts), int(lengths.max()), self.config.width)
        for row, text in enumerate(texts):
            x[row, : len(text)] = self.text_proj(text)
        return x, (torch.arange(x.shape[1]) < seen[:, None]).to(x.device)

    def prompt(
        self,
        texts: list[Tensor],
        negatives: list[Tensor] | None = None,
        guided: bool = True,
        observe: Callable[[str, str, Tensor], None] = lambda name, where, tensor: None,
    ) -> Prompt:
        """Keys and values of B prompts: text tokens see each other in both directions.

        observe: called with ("block0", "text", output [R, T, C]) of every layer
        """
        rows, visible = self.text_rows(texts, negatives, guided)
        angles = torch.from_numpy(text_angles(rows.shape[1], self.config.head_width)).to(rows.device)
        x, context = rows, []
        for layer, block in enumerate(self.layers):
            out = block(x, angles, [], None if visible.all() else visible)
            x = out.x
            context.append((out.k, out.v))
            observe(f"block{layer}", "text", x)
        return Prompt(context, visible, rows)

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Input of a pass. codes: [B, d, t, h, w] -> [B, t*h*w, C]."""
        return self.word_embed(codes.flatten(2).transpose(1, 2))

    def logits(self, x: Tensor, is_semantic: bool) -> Tensor:
        """x: [R, L, C] behind the last block -> [R, L, 2*bits], pairs of zero and one."""
        head = self.semantic_head2 if is_semantic else self.head
        return head(self.norm_hidden_sates(x))
