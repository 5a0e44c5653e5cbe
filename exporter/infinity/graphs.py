"""Infinity as ONNX graphs: the prompt's graph and the decoder's; step.py writes the steps.

The arithmetic is that of transformer.py and tokenizer.py; inputs and outputs are described in docs/bundle.md.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from toprovar.exporter.autoencoder_graph import decoded
from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.infinity.config import InfinityConfig
from toprovar.exporter.infinity.tokenizer import TokenizerConfig
from toprovar.exporter.planned.step import StepOptions
from toprovar.exporter.resize_matrices import resize_pair
from toprovar.exporter.weights_file import WeightsLayout

DTYPE_NAME = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}


def prompt_graph(config: InfinityConfig, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
    """Text rows to what the steps need; once per prompt.

    Inputs:  text_rows [R, T, text width] (conditional rows first), text_valid [R, T] float32, 1 on text, 0 on padding
    Outputs: pooled_text, modulation, head_modulation, text_mask, cross_k_##, cross_v_## as `step_graph` takes them
    """
    g = GraphBuilder("prompt", layout, options.compute)
    R, T, C = options.rows * options.images, options.text_tokens, config.width
    H, D, heads = config.heads, config.head_width, config.pool_heads
    rows = g.input("text_rows", (R, T, config.text_width))
    valid = g.input("text_valid", (R, T))
    mask = g.Mul(g.Sub(np.float32(1), valid), np.float32(-1e4))  # [R, T]
    square = g.ReduceMean(g.Mul(rows, rows), [-1], keepdims=1)
    text = g.Mul(g.Div(rows, g.Sqrt(g.Add(square, np.float32(1e-6)))), g.weight("text_norm"))
    k = g.reshape(g.MatMul(text, g.weight("pool_k")), (R, T, heads, -1))
    v = g.reshape(g.Add(g.MatMul(text, g.weight("pool_v")), g.weight("pool_v_bias")), (R, T, heads, -1))
    q = g.reshape(g.weight("pool_q"), (1, heads, 1, -1))
    scores = g.Add(g.MatMul(q, g.Transpose(k, perm=[0, 2, 3, 1])), g.reshape(mask, (R, 1, 1, T)))  # [R, heads, 1, T]
    mixed = g.MatMul(g.Softmax(scores, axis=-1), g.Transpose(v, perm=[0, 2, 1, 3]))  # [R, heads, 1, C/heads]
    pooled = g.Add(g.MatMul(g.reshape(mixed, (R, C)), g.weight("pool_proj")), g.weight("pool_proj_bias"))
    silu = g.Mul(pooled, g.Sigmoid(pooled))
    pack = g.Add(g.MatMul(silu, g.weight("ada_shared")), g.weight("ada_shared_bias"))
    head = g.Add(g.MatMul(silu, g.weight("head_ada")), g.weight("head_ada_bias"))
    g.output(pooled, "pooled_text", (R, C))
    g.output(g.Transpose(g.reshape(pack, (R, 6, C)), perm=[1, 0, 2]), "modulation", (6, R, C))
    g.output(g.Transpose(g.reshape(head, (R, 2, C)), perm=[1, 0, 2]), "head_modulation", (2, R, C))
    g.output(mask, "text_mask", (R, T))
    hidden = g.Gelu(g.linear(text, "cross_text.0", "cross_text.0_bias"), approximate="tanh")
    cross = g.linear(hidden, "cross_text.2", "cross_text.2_bias")  # [R, T, C]
    for layer in range(config.depth):
        p = f"layers.{layer}"
        keys = g.reshape(g.linear(cross, f"{p}.cross_k"), (R, T, H, D))
        values = g.reshape(g.linear(cross, f"{p}.cross_v", f"{p}.cross_v_bias"), (R, T, H, D))
        dtype = DTYPE_NAME[g.compute]
        g.output(g.Transpose(keys, perm=[1, 0, 2, 3]), f"cross_k_{layer:02d}", (T, R, H, D), dtype)
        g.output(g.Transpose(values, perm=[1, 0, 2, 3]), f"cross_v_{layer:02d}", (T, R, H, D), dtype)
    return g


def decoder_graph(
    config: TokenizerConfig,
    size: tuple[int, int],
    layout: WeightsLayout,
    images: int = 1,
    resized: tuple[int, int] | None = None,
) -> GraphBuilder:
    """Codes to picture, fp32. Input: codes [B, d, h, w]; output: image [B, 3, h*stride, w*stride] in [-1, 1].

    resized: codes are first brought to this map, for a small picture.
    """
    g = GraphBuilder("decoder", layout)
    z = g.input("codes", (images, config.channels, *size))
    if resized is not None:
        z, size = g.resize(z, *resize_pair("bilinear", size, resized)), resized
    x = decoded(g, z, config.shape, size, images)
    height, width = size[0] * config.stride, size[1] * config.stride
    if config.rgb_shortcut:
        colour = g.Conv(z, g.weight("rgb_shortcut.decode.weight"), kernel_shape=[1, 1])
        x = g.Add(x, g.resize(colour, *resize_pair("bilinear", size, (height, width))))
    g.output(g.Clip(x, np.float32(-1), np.float32(1)), "image", (images, 3, height, width))
    return g
