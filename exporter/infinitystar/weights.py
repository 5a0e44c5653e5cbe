"""InfinityStar's weights as the graphs want them: matrices [in, out], q, k and v in one piece, and q and k permuted
inside each head with their norms, so that rotation pairs lie half-split (neither products nor norms notice)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from toprovar.exporter.infinitystar.rope import map_angles, text_angles
from toprovar.exporter.infinitystar.schedule import VideoSchedule
from toprovar.exporter.infinitystar.transformer import Block, InfinityStar

Thunks = dict[str, Callable[[], Tensor]]


def _half_split(rows: Tensor, head_width: int) -> Tensor:
    """Neighbouring pairs to half-split inside each head. rows: [heads*D, ...]."""
    grouped = rows.unflatten(0, (-1, head_width // 2, 2))
    return grouped.transpose(1, 2).flatten(0, 2)


def _packed_qkv(block: Block, head_width: int) -> Tensor:
    attention = block.attn
    q, k = (_half_split(layer.weight, head_width) for layer in (attention.q_proj, attention.k_proj))
    return torch.cat([q, k, attention.v_proj.weight]).T


def layer_weights(block: Block, head_width: int, prefix: str) -> Thunks:
    """Names and lazily computed tensors of one layer."""
    return {
        f"{prefix}.attention_norm": lambda: block.input_layernorm.weight,
        f"{prefix}.qkv": lambda: _packed_qkv(block, head_width),
        f"{prefix}.q_norm": lambda: _half_split(block.attn.q_norm.weight, head_width),
        f"{prefix}.k_norm": lambda: _half_split(block.attn.k_norm.weight, head_width),
        f"{prefix}.proj": lambda: block.attn.o_proj.weight.T,
        f"{prefix}.ffn_norm": lambda: block.post_attention_layernorm.weight,
        f"{prefix}.gate": lambda: block.mlp.gate_proj.weight.T,
        f"{prefix}.up": lambda: block.mlp.up_proj.weight.T,
        f"{prefix}.down": lambda: block.mlp.down_proj.weight.T,
    }


def map_rows(schedule: VideoSchedule) -> list[tuple[int, int]]:
    """Per map of the schedule its rows of the tables `rope_cos` and `rope_sin`."""
    ends = np.cumsum([frames * height * width for frames, height, width in schedule.entries])
    return [(int(end) - frames * h * w, int(end)) for end, (frames, h, w) in zip(ends, schedule.entries, strict=True)]


def star_weights(model: InfinityStar, schedule: VideoSchedule) -> Thunks:
    """Everything that the prompt graph and the step graphs read.

    rope_cos, rope_sin: [tokens of all maps, 3*D/8], frame, row and column; the axis of passes is made in the graphs
    """
    config = model.config

    def maps(function: Callable[[Tensor], Tensor]) -> Tensor:
        firsts = {step.entry: step for step in reversed(schedule.passes())}
        angles = [map_angles(firsts[entry], schedule.last, config.head_width) for entry in sorted(firsts)]
        return function(torch.from_numpy(np.concatenate(angles)[:, config.head_width // 8 :]))

    def text(function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(torch.from_numpy(text_angles(config.text_length, config.head_width)))

    weights: Thunks = {
        "cfg_uncond": lambda: model.cfg_uncond,
        "text_proj": lambda: model.text_proj.weight.T,
        "text_proj_bias": lambda: model.text_proj.bias,
        "word_embed": lambda: model.word_embed.weight.T,
        "word_embed_bias": lambda: model.word_embed.bias,
        "final_norm": lambda: model.norm_hidden_sates.weight,
        "head": lambda: model.head.weight.T,
        "head_bias": lambda: model.head.bias,
        "semantic_head": lambda: model.semantic_head2.weight.T,
        "semantic_head_bias": lambda: model.semantic_head2.bias,
        "rope_cos": lambda: maps(torch.cos),
        "rope_sin": lambda: maps(torch.sin),
        "rope_text_cos": lambda: text(torch.cos),
        "rope_text_sin": lambda: text(torch.sin),
    }
    for layer, block in enumerate(model.layers):
        weights.update(layer_weights(block, config.head_width, f"layers.{layer}"))
    return weights
