"""VAR's weights as the graphs want them: matrices [in, out], the packed q/k/v bias in one piece, the attention factor
exponentiated, level and position of every token as one row; the AdaLN layers carry the "1 +" of their scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toprovar.exporter.codebook import Quantizer, codebook_weights
from toprovar.exporter.cosine_attention import attention_weights
from toprovar.exporter.schedules import Schedule, token_counts
from toprovar.exporter.var.transformer import Block, Var
from toprovar.exporter.weights_file import Thunks


def var_weights(model: Var, quantizer: Quantizer, schedule: Schedule) -> Thunks:
    """Names and lazily computed fp32 tensors of everything that the prompt graph and the step graphs read."""
    config, width = model.config, model.config.width

    def positions() -> Tensor:
        levels = torch.repeat_interleave(torch.arange(len(schedule)), torch.tensor(token_counts(schedule)))
        rows = model.lvl_embed.weight[levels.to(model.pos_1LC.device)] + model.pos_1LC[0, : len(levels)]
        return torch.cat([rows[:1] + model.pos_start[0], rows[1:] + model.word_embed.bias])

    weights: Thunks = {
        "class_emb": lambda: model.class_emb.weight,
        "positions": positions,
        "word_embed": lambda: model.word_embed.weight.T,
        "head_ada": lambda: _layer(model.head_nm.ada_lin).weight.T,
        "head_ada_bias": lambda: _layer(model.head_nm.ada_lin).bias + _ones(2, 0, width, model.pos_1LC),
        "head": lambda: model.head.weight.T,
        "head_bias": lambda: model.head.bias,
        **codebook_weights(quantizer),
    }
    if config.shared_ada:
        weights["ada_shared"] = lambda: _layer(model.shared_ada_lin).weight.T
        weights["ada_shared_bias"] = lambda: _layer(model.shared_ada_lin).bias
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        p = f"layers.{i}"
        weights.update(attention_weights(block.attn, p))
        if config.shared_ada:
            weights[f"{p}.ada_pack"] = lambda b=block: b.ada_gss[0] + _pack_ones(b, width)  # type: ignore[misc]
        else:
            weights[f"{p}.ada"] = lambda b=block: _layer(b.ada_lin).weight.T  # type: ignore[misc]
            weights[f"{p}.ada_bias"] = lambda b=block: (  # type: ignore[misc]
                _layer(b.ada_lin).bias + _pack_ones(b, width).flatten()
            )
        weights[f"{p}.fc1"] = lambda b=block: b.ffn.fc1.weight.T  # type: ignore[misc]
        weights[f"{p}.fc1_bias"] = lambda b=block: b.ffn.fc1.bias  # type: ignore[misc]
        weights[f"{p}.fc2"] = lambda b=block: b.ffn.fc2.weight.T  # type: ignore[misc]
        weights[f"{p}.fc2_bias"] = lambda b=block: b.ffn.fc2.bias  # type: ignore[misc]
    return weights


def _layer(ada: nn.Module) -> nn.Linear:
    assert isinstance(ada, nn.Sequential)
    layer = ada[1]
    assert isinstance(layer, nn.Linear)
    return layer


def _ones(parts: int, part: int, width: int, like: Tensor) -> Tensor:
    """Zeros [parts * width] with ones in one part."""
    pack = torch.zeros(parts, width, device=like.device)
    pack[part] = 1
    return pack.flatten()


def _pack_ones(block: Block, width: int) -> Tensor:
    """[1, 6, C]: ones at both scales of a pack."""
    like = block.ffn.fc1.weight
    return (_ones(6, 2, width, like) + _ones(6, 3, width, like)).view(1, 6, width)
