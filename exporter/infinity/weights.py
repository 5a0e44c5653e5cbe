"""The weights as the graphs want them: what constant folding would do, done once.

Matrices are stored [in, out]; the packed q/k/v projection has its bias in one piece and its q and k rows permuted
inside each head, so that rotation pairs lie half-split (q.k and the norms do not notice a common permutation); the
learned attention factor is exponentiated; the AdaLN packs carry the "1 +" of their scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toprovar.exporter.autoencoder_graph import decoder_tensors
from toprovar.exporter.infinity.rope import rope_table
from toprovar.exporter.infinity.tokenizer import BitTokenizer
from toprovar.exporter.infinity.transformer import MAX_LOG_SCALE, Block, Infinity
from toprovar.exporter.schedules import Schedule
from toprovar.exporter.weights_file import Thunks


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """Neighbouring pairs to half-split inside each head. rows: [H*D, ...]."""
    grouped = rows.unflatten(0, (heads, -1, 2))  # [H, D/2, 2, ...]
    return grouped.transpose(1, 2).flatten(0, 2)


def _packed_qkv(block: Block, heads: int) -> Tensor:
    q, k, v = block.sa.mat_qkv.weight.chunk(3)
    return torch.cat([_half_split(q, heads), _half_split(k, heads), v]).T


def _packed_bias(block: Block, heads: int) -> Tensor:
    q = _half_split(block.sa.q_bias, heads)
    return torch.cat([q, torch.zeros_like(q), block.sa.v_bias])


def _pack_with_one(block: Block) -> Tensor:
    """[6, 1, C]; gamma1, gamma2, 1 + scale1, 1 + scale2, shift1, shift2."""
    one = torch.zeros_like(block.ada_gss).index_fill_(2, torch.tensor([2, 3], device=block.ada_gss.device), 1.0)
    return (block.ada_gss + one).flatten(0, 1).transpose(0, 1)


def layer_weights(block: Block, heads: int, prefix: str) -> Thunks:
    """Names and lazily computed tensors of one layer, for the step graphs."""
    return {
        f"{prefix}.ada_pack": lambda: _pack_with_one(block),
        f"{prefix}.qkv": lambda: _packed_qkv(block, heads),
        f"{prefix}.qkv_bias": lambda: _packed_bias(block, heads),
        f"{prefix}.scale_mul": lambda: block.sa.scale_mul_1H11.float().clamp(max=MAX_LOG_SCALE).exp().view(heads, 1),
        f"{prefix}.proj": lambda: block.sa.proj.weight.T,
        f"{prefix}.proj_bias": lambda: block.sa.proj.bias,
        f"{prefix}.cross_norm": lambda: block.ca_norm.weight,
        f"{prefix}.cross_norm_bias": lambda: block.ca_norm.bias,
        f"{prefix}.cross_q": lambda: block.ca.mat_q.weight.T,
        f"{prefix}.cross_q_bias": lambda: block.ca.mat_q.bias,
        f"{prefix}.cross_k": lambda: block.ca.mat_kv.weight.chunk(2)[0].T,
        f"{prefix}.cross_v": lambda: block.ca.mat_kv.weight.chunk(2)[1].T,
        f"{prefix}.cross_v_bias": lambda: block.ca.v_bias,
        f"{prefix}.cross_proj": lambda: block.ca.proj.weight.T,
        f"{prefix}.cross_proj_bias": lambda: block.ca.proj.bias,
        f"{prefix}.fc1": lambda: block.ffn.fc1.weight.T,
        f"{prefix}.fc1_bias": lambda: block.ffn.fc1.bias,
        f"{prefix}.fc2": lambda: block.ffn.fc2.weight.T,
        f"{prefix}.fc2_bias": lambda: block.ffn.fc2.bias,
    }


def transformer_weights(model: Infinity, schedule: Schedule) -> Thunks:
    """Everything the prompt graph and the step graphs read."""
    config = model.config
    pool = model.text_proj_for_sos.ca

    def rope(part: int) -> Tensor:
        return torch.from_numpy(rope_table(config.head_width, schedule)[part])

    def level_bias() -> Tensor:
        levels = model.lvl_embed.weight[: len(schedule)] + model.word_embed.bias
        return torch.cat([model.lvl_embed.weight[:1] + model.pos_start[0], levels[1:]])

    weights: Thunks = {
        "cfg_uncond": lambda: model.cfg_uncond,
        "text_norm": lambda: model.text_norm.weight,
        "pool_q": lambda: pool.mat_q[0] * pool.mat_q.shape[-1] ** -0.5,
        "pool_k": lambda: pool.mat_kv.weight.chunk(2)[0].T,
        "pool_v": lambda: pool.mat_kv.weight.chunk(2)[1].T,
        "pool_v_bias": lambda: pool.v_bias,
        "pool_proj": lambda: pool.proj.weight.T,
        "pool_proj_bias": lambda: pool.proj.bias,
        "cross_text.0": lambda: model.text_proj_for_ca[0].weight.T,
        "cross_text.0_bias": lambda: model.text_proj_for_ca[0].bias,
        "cross_text.2": lambda: model.text_proj_for_ca[2].weight.T,
        "cross_text.2_bias": lambda: model.text_proj_for_ca[2].bias,
        "ada_shared": lambda: model.shared_ada_lin[1].weight.T,
        "ada_shared_bias": lambda: model.shared_ada_lin[1].bias,
        "head_ada": lambda: model.head_nm.ada_lin[1].weight.T,
        "head_ada_bias": lambda: model.head_nm.ada_lin[1].bias,
        "head": lambda: model.head.weight.T,
        "head_bias": lambda: model.head.bias,
        "word_embed": lambda: model.word_embed.weight.T,
        "lvl_bias": level_bias,
        "rope_cos": lambda: rope(0),
        "rope_sin": lambda: rope(1),
    }
    for layer, block in enumerate(model.layers):
        weights.update(layer_weights(block, config.heads, f"layers.{layer}"))
    return weights


def decoder_weights(tokenizer: BitTokenizer) -> Thunks:
    """The decoder's tensors under their own names; the 1-D norms as [C, 1, 1]."""
    weights = decoder_tensors(tokenizer.state_dict())
    if tokenizer.config.rgb_shortcut:
        weights["rgb_shortcut.decode.weight"] = lambda: tokenizer.rgb_shortcut.decode.weight
    return weights
