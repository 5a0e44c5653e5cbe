"""InfinityStar as ONNX graphs: the prompt's graph, and the pieces of a block; step.py writes the passes.

Shapes are static but for the length of the text. Activations are time-major [n, R, C], so that keys and values are
outputs in the layout in which later passes read them. The arithmetic is that of transformer.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import DTYPE_NAMES, GraphBuilder
from toprovar.exporter.infinitystar.config import InfinityStarConfig
from toprovar.exporter.planned.step import StepOptions
from toprovar.exporter.weights_file import WeightsLayout
from toprovar.runtime.errors import ToprovarError

MASKED = np.float32(-1e4)  # finite, so that half-precision graphs never meet inf - inf


def rms_norm(g: GraphBuilder, x: ir.Value, weight: str) -> ir.Value:
    """x over its root mean square, eps 1e-6, times a weight; fp32. x: [..., n]."""
    x = g.f32(x)
    square = g.ReduceMean(g.Mul(x, x), [-1], keepdims=1)
    return g.Mul(g.Div(x, g.Sqrt(g.Add(square, np.float32(1e-6)))), g.weight(weight))


def rotated(g: GraphBuilder, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Turns the pairs (x_i, x_(i + D/2)), in the compute type. x: [n, R, heads, D]; cos, sin: [n, 1 or R, 1, D/2]."""
    first, second = g.Split(x, axis=3, num_outputs=2, outputs=2)
    turned = g.Sub(g.Mul(first, cos), g.Mul(second, sin)), g.Add(g.Mul(first, sin), g.Mul(second, cos))
    return g.narrow(g.Concat(*turned, axis=3))


def attention_operands(
    g: GraphBuilder, config: InfinityStarConfig, layer: int, x: ir.Value, rows: int, cos: ir.Value, sin: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Queries [n, R, H, D], keys and values [n, R, G, D] of a layer's input [n, R, C]."""
    p, H, G, D = f"layers.{layer}", config.heads, config.kv_heads, config.head_width
    qkv = g.linear(rms_norm(g, x, f"{p}.attention_norm"), f"{p}.qkv")
    q, k, v = g.split(g.reshape(qkv, (-1, rows, H + 2 * G, D)), 2, [H, G, G])
    q, k = (rotated(g, rms_norm(g, t, f"{p}.{name}"), cos, sin) for t, name in ((q, "q_norm"), (k, "k_norm")))
    return q, k, v


def folded(g: GraphBuilder, config: InfinityStarConfig, q: ir.Value, rows: int) -> ir.Value:
    """Queries that share keys as further tokens, so that attention needs no copies of keys. [n, R, H, D] ->
    [n*H/G, R, G, D]."""
    G, D = config.kv_heads, config.head_width
    apart = g.Transpose(g.reshape(q, (-1, rows, G, config.heads // G, D)), perm=[0, 3, 1, 2, 4])
    return g.reshape(apart, (-1, rows, G, D))


def unfolded(g: GraphBuilder, config: InfinityStarConfig, o: ir.Value, rows: int) -> ir.Value:
    """[n*H/G, R, G, D] -> [n, R, H*D]."""
    G, D = config.kv_heads, config.head_width
    together = g.Transpose(g.reshape(o, (-1, config.heads // G, rows, G, D)), perm=[0, 2, 3, 1, 4])
    return g.reshape(together, (-1, rows, config.heads * D))


def feed_forward(g: GraphBuilder, layer: int, x: ir.Value) -> ir.Value:
    """x with what the feed-forward layer adds to it. x: [n, R, C] fp32."""
    p = f"layers.{layer}"
    y = rms_norm(g, x, f"{p}.ffn_norm")
    gate = g.linear(y, f"{p}.gate")
    inner = g.Mul(g.Mul(gate, g.Sigmoid(gate)), g.linear(y, f"{p}.up"))
    return g.Add(x, g.f32(g.linear(inner, f"{p}.down")))


def prompt_graph(config: InfinityStarConfig, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
    """Text rows to keys and values of the text; once per prompt, one image.

    Inputs:  text_rows [R, T, text width] (conditional row first), text_valid [R, T] float32, 1 on text, 0 on padding.
             The shorter row of the two is padded with zeros that are attended to, as the reference does.
    Outputs: text_k_##, text_v_## [T, R, G, D]; of them the first tokens count, as many as the longer row has
    Raises:  ToprovarError if T is more than the model has positions for.
    """
    g = GraphBuilder("prompt", layout, options.compute)
    R, T, D, dtype = options.rows, options.text_tokens, config.head_width, DTYPE_NAMES[g.compute]
    if config.text_length < T:
        raise ToprovarError(
            f"{T} text tokens asked for; the model takes {config.text_length}",
            f"pass --text-tokens {config.text_length}, or fewer",
        )
    rows = g.Transpose(g.input("text_rows", (R, T, config.text_width)), perm=[1, 0, 2])
    valid = g.input("text_valid", (R, T))
    own = g.reshape(g.Transpose(valid, perm=[1, 0]), (T, R, 1))
    x = g.Mul(g.f32(g.linear(rows, "text_proj", "text_proj_bias")), own)  # [T, R, C]
    if "in" in options.watched:
        g.output(x, "watch_in", (T, R, config.width))
    longer = g.ReduceMax(valid, [0], keepdims=1)
    mask = g.Expand(g.Mul(g.Sub(np.float32(1), longer), MASKED), [R, T])
    cos, sin = (g.reshape(g.weight(f"rope_text_{part}", (0, T)), (T, 1, 1, D // 2)) for part in ("cos", "sin"))
    for layer in range(config.depth):
        q, k, v = attention_operands(g, config, layer, x, R, cos, sin)
        g.output(k, f"text_k_{layer:02d}", (T, R, config.kv_heads, D), dtype)
        g.output(v, f"text_v_{layer:02d}", (T, R, config.kv_heads, D), dtype)
        if layer < config.depth - 1:  # behind the last layer only keys and values count
            o = g.custom("MaskedAttention", [folded(g, config, q, R), k, v, mask], scale=D**-0.5)
            x = g.Add(x, g.f32(g.linear(unfolded(g, config, o, R), f"layers.{layer}.proj")))
            x = feed_forward(g, layer, x)
        if f"block{layer}" in options.watched and layer < config.depth - 1:
            g.output(x, f"watch_block{layer}", (T, R, config.width))
    return g
