"""HART's weights as the graphs want them: matrices [in, out], the packed q/k/v bias in one piece, the attention factor
exponentiated, levels and diffusion times as vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from toprovar.exporter.codebook import Quantizer, codebook_weights
from toprovar.exporter.cosine_attention import attention_weights
from toprovar.exporter.hart.config import STEPS
from toprovar.exporter.hart.residual import diffusion_tables
from toprovar.exporter.hart.transformer import Hart
from toprovar.exporter.weights_file import Thunks


def hart_weights(model: Hart, quantizer: Quantizer, scales: int, steps: int = STEPS) -> Thunks:
    """Names and lazily computed fp32 tensors of everything that the graphs of `scales` scales read.

    steps: reverse steps of the residual head
    """
    weights: Thunks = codebook_weights(quantizer)

    def linear(name: str, layer: nn.Module) -> None:
        assert isinstance(layer, nn.Linear)
        weights[name] = lambda: layer.weight.T
        if layer.bias is not None:
            weights[f"{name}_bias"] = lambda: layer.bias

    def vector(name: str, make: Callable[[], Tensor]) -> None:
        weights[name] = make

    def levels() -> Tensor:
        bias = model.word_embed.bias
        return torch.stack([model.level(0), *(model.level(s) + bias for s in range(1, scales))])

    vector("context_norm", lambda: model.context_norm.weight)
    linear("context_embed", model.context_embed)
    linear("word_embed", model.word_embed)
    vector("lvl_bias", levels)
    linear("head_ada", model.head_nm.ada_lin[1])
    vector("head_norm", lambda: model.head_nm.ln_wo_grad.weight)
    linear("head", model.head)
    vector("decoder_norm", lambda: model.decoder_norm.weight)
    for i, block in enumerate(model.blocks):
        p = f"layers.{i}"
        vector(f"{p}.ada_pack", lambda b=block: b.scale_shift_table[:, None])  # type: ignore[misc]
        vector(f"{p}.norm", lambda b=block: b.ln_wo_grad.weight)  # type: ignore[misc]
        weights.update(attention_weights(block.attn, p))
        linear(f"{p}.gate", block.ffn.gate_proj)
        linear(f"{p}.up", block.ffn.up_proj)
        linear(f"{p}.down", block.ffn.down_proj)
    net = model.diffloss.net
    times = torch.from_numpy(diffusion_tables(steps).times)
    vector("residual.times", lambda: net.time_embed(times.to(net.cond_embed.weight.device)))
    linear("residual.cond", net.cond_embed)
    linear("residual.input", net.input_proj)
    for j, block in enumerate(net.res_blocks):
        p = f"residual.blocks.{j}"
        vector(f"{p}.norm", lambda b=block: b.in_ln.weight)  # type: ignore[misc]
        vector(f"{p}.norm_bias", lambda b=block: b.in_ln.bias)  # type: ignore[misc]
        linear(f"{p}.mlp.0", block.mlp[0])
        linear(f"{p}.mlp.2", block.mlp[2])
        linear(f"{p}.ada", block.adaLN_modulation[1])
    linear("residual.ada", net.final_layer.adaLN_modulation[1])
    linear("residual.output", net.final_layer.linear)
    return weights
