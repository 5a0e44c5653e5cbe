"""The VQ tokenizer once more, in plain float64 NumPy, on top of the bit tokenizer's reference."""

from __future__ import annotations

import math

import numpy as np
from infinity_reference import Array, ReferenceTokenizer, convolve, random_tokenizer, softmax


def random_vq_tokenizer(channels: int, widths: tuple[int, ...], seed: int = 0, kernel: int = 3) -> dict[str, Array]:
    """Weights of decoder and encoder with attention in the middle and at the top level, exact in fp16."""
    w = {name: array.astype(np.float64) for name, array in random_tokenizer(channels, widths, seed).items()}
    rng = np.random.default_rng(seed + 100)
    top, width = len(widths) - 1, widths[-1]

    def conv(name: str, inputs: int, outputs: int, size: int, gain: float = 1.0) -> None:
        w[f"{name}.weight"] = rng.standard_normal((outputs, inputs, size, size)) * gain / (size * math.sqrt(inputs))
        w[f"{name}.bias"] = rng.standard_normal(outputs) * 0.1

    sites = [f"{side}.mid.attn_1" for side in ("decoder", "encoder")]
    sites += [f"decoder.up.{top}.attn.{j}" for j in range(3)] + [f"encoder.down.{top}.attn.{j}" for j in range(2)]
    for site in sites:
        w[f"{site}.norm.norm.weight"] = 1 + rng.standard_normal(width) * 0.1
        w[f"{site}.norm.norm.bias"] = rng.standard_normal(width) * 0.1
        conv(f"{site}.qkv.conv", width, 3 * width, 1, gain=2.0)  # scores far from equal
        conv(f"{site}.proj_out.conv", width, width, 1)
    conv("post_quant_conv", channels, channels, kernel)
    conv("quant_conv", channels, channels, kernel)
    return {name: array.astype(np.float16) for name, array in w.items()}


class ReferenceVqTokenizer(ReferenceTokenizer):
    def attend(self, x: Array, name: str) -> Array:
        groups = x.reshape(x.shape[0], 32, -1)
        centred = groups - groups.mean(-1, keepdims=True)
        y = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).reshape(x.shape)
        y = y * self.w[f"{name}.norm.norm.weight"][:, None, None] + self.w[f"{name}.norm.norm.bias"][:, None, None]
        qkv = self.conv(y, f"{name}.qkv")
        width, out = x.shape[1], np.zeros_like(y)
        for b in range(x.shape[0]):
            q, k, v = qkv[b].reshape(3, width, -1)
            out[b] = (v @ softmax(q.T @ k / math.sqrt(width)).T).reshape(x.shape[1:])
        return x + self.conv(out, f"{name}.proj_out")

    def middle(self, x: Array, side: str) -> Array:
        x = self.attend(self.res(x, f"{side}.mid.block_1"), f"{side}.mid.attn_1")
        return self.res(x, f"{side}.mid.block_2")

    def level(self, x: Array, name: str, blocks: int) -> Array:
        for j in range(blocks):
            x = self.res(x, f"{name}.block.{j}")
            if f"{name}.attn.{j}.qkv.conv.weight" in self.w:
                x = self.attend(x, f"{name}.attn.{j}")
        return x

    def decode(self, z: Array) -> Array:
        """Not clamped."""
        z = convolve(z, self.w["post_quant_conv.weight"], self.w["post_quant_conv.bias"])
        x = self.middle(self.conv(z, "decoder.conv_in"), "decoder")
        for level in reversed(range(len(self.widths))):
            x = self.level(x, f"decoder.up.{level}", self.res_blocks + 1)
            if level:
                x = self.conv(x.repeat(2, axis=2).repeat(2, axis=3), f"decoder.up.{level}.upsample.conv")
        return self.conv(self.norm_swish(x, "decoder.norm_out"), "decoder.conv_out")

    def encode(self, image: Array) -> Array:
        x = self.conv(image, "encoder.conv_in")
        for level in range(len(self.widths)):
            x = self.level(x, f"encoder.down.{level}", self.res_blocks)
            if level < len(self.widths) - 1:
                x = self.conv(x, f"encoder.down.{level}.downsample.conv", stride=2)
        x = self.conv(self.norm_swish(self.middle(x, "encoder"), "encoder.norm_out"), "encoder.conv_out")
        return convolve(x, self.w["quant_conv.weight"], self.w["quant_conv.bias"])
