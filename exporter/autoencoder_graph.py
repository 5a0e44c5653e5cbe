"""The shared decoder (autoencoder.py) as ONNX nodes, and its tensors as these nodes want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from toprovar.exporter.autoencoder import NORM_EPSILON, NORM_GROUPS, AutoencoderShape

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from toprovar.exporter.graph_builder import GraphBuilder


def decoder_tensors(state: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """The decoder's tensors under their own names; the 1-D norms as [C, 1, 1]. state: of the whole tokenizer."""
    tensors: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in state.items():
        if name.startswith("decoder."):
            is_norm = ".norm" in name
            tensors[name] = lambda t=tensor, n=is_norm: t.view(-1, 1, 1) if n else t  # type: ignore[misc]
    return tensors


def decoded(g: GraphBuilder, z: ir.Value, shape: AutoencoderShape, size: tuple[int, int], images: int) -> ir.Value:
    """z: [B, d, h, w], the map `size` -> [B, 3, h*stride, w*stride] fp32, not clamped."""
    height, width = size

    def conv(x: ir.Value, name: str, kernel: int = 3) -> ir.Value:
        pad = kernel // 2
        return g.Conv(
            x,
            g.weight(f"{name}.conv.weight"),
            g.weight(f"{name}.conv.bias"),
            kernel_shape=[kernel, kernel],
            pads=[pad] * 4,
        )

    def norm(x: ir.Value, name: str, channels: int) -> ir.Value:
        ones, zeros = np.ones(NORM_GROUPS, np.float32), np.zeros(NORM_GROUPS, np.float32)
        y = g.InstanceNormalization(g.reshape(x, (images, NORM_GROUPS, -1)), ones, zeros, epsilon=NORM_EPSILON)
        y = g.reshape(y, (images, channels, height, width))
        return g.Add(g.Mul(y, g.weight(f"{name}.norm.weight")), g.weight(f"{name}.norm.bias"))

    def norm_swish(x: ir.Value, name: str, channels: int) -> ir.Value:
        y = norm(x, name, channels)
        return g.Mul(y, g.Sigmoid(y))

    def res_block(x: ir.Value, name: str, inputs: int, outputs: int) -> ir.Value:
        y = conv(norm_swish(x, f"{name}.norm1", inputs), f"{name}.conv1")
        y = conv(norm_swish(y, f"{name}.norm2", outputs), f"{name}.conv2")
        return g.Add(y, x if inputs == outputs else conv(x, f"{name}.nin_shortcut", 1))

    def attention(x: ir.Value, name: str, channels: int) -> ir.Value:
        qkv = conv(norm(x, f"{name}.norm", channels), f"{name}.qkv", 1)
        q, k, v = g.split(g.reshape(qkv, (images, 3 * channels, height * width)), 1, [channels] * 3)
        q = g.Mul(g.Transpose(q, perm=[0, 2, 1]), np.float32(channels**-0.5))
        chance = g.Softmax(g.MatMul(q, k), axis=-1)  # [B, h*w, h*w]
        seen = g.MatMul(v, g.Transpose(chance, perm=[0, 2, 1]))  # [B, C, h*w]
        return g.Add(x, conv(g.reshape(seen, (images, channels, height, width)), f"{name}.proj_out", 1))

    current = shape.widths[-1]
    x = res_block(conv(z, "decoder.conv_in"), "decoder.mid.block_1", current, current)
    if shape.middle_attention:
        x = attention(x, "decoder.mid.attn_1", current)
    x = res_block(x, "decoder.mid.block_2", current, current)
    for level in reversed(range(len(shape.widths))):
        for j in range(shape.res_blocks + 1):
            x = res_block(x, f"decoder.up.{level}.block.{j}", current, shape.widths[level])
            current = shape.widths[level]
            if level in shape.attention_levels:
                x = attention(x, f"decoder.up.{level}.attn.{j}", current)
        if level > 0:
            x = g.reshape(x, (images, current, height, 1, width, 1))
            x = g.Expand(x, [images, current, height, 2, width, 2])
            height, width = 2 * height, 2 * width
            x = conv(g.reshape(x, (images, current, height, width)), f"decoder.up.{level}.upsample.conv")
    return conv(norm_swish(x, "decoder.norm_out", current), "decoder.conv_out")
