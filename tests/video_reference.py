"""InfinityStar's video tokenizer once more, in plain float64 NumPy: whole videos, no chunks, one frame at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any


def random_video_tokenizer(
    channels: int = 2,
    widths: tuple[int, ...] = (16, 16, 16, 8, 4),
    times: tuple[int | None, ...] = (None, 1, 2, 2),
    blocks: int = 2,
    seed: int = 0,
) -> dict[str, Array]:
    """Weights of decoder and encoder, exact in fp16.

    times: per decoder stage, how many frames one becomes; None where the size does not change
    """
    rng = np.random.default_rng(seed)
    w: dict[str, Array] = {}
    d = 4 * channels

    def conv(name: str, inputs: int, outputs: int, size: int = 3) -> None:
        scale = 1 / math.sqrt(size**3 * inputs)
        w[f"{name}.conv.weight"] = rng.standard_normal((outputs, inputs, size, size, size)) * scale
        w[f"{name}.conv.bias"] = rng.standard_normal(outputs) * 0.1

    def gamma(name: str, width: int) -> None:
        w[f"{name}.gamma"] = 1 + rng.standard_normal((width, 1, 1, 1)) * 0.2

    def conditioned(name: str, width: int) -> None:
        gamma(f"{name}.norm_layer", width)
        conv(f"{name}.conv_y", channels, width, 1)
        w[f"{name}.conv_y.conv.bias"] += 1
        conv(f"{name}.conv_b", channels, width, 1)

    def res(name: str, width: int, norm: Any) -> None:
        for j in (1, 2):
            norm(f"{name}.norm{j}", width)
            conv(f"{name}.conv{j}", width, width)

    conv("decoder.conv_in", channels, widths[0])
    for j in range(2):
        res(f"decoder.mid_block.resnets.{j}", widths[0], conditioned)
        res(f"encoder.mid_block.resnets.{j}", widths[0], gamma)
    for i, time in enumerate(times):
        for j in range(blocks + 1):
            res(f"decoder.up_blocks.{i}.resnets.{j}", widths[i], conditioned)
        if time is not None:
            gamma(f"decoder.up_blocks.{i}.upsamplers.0.conv.norm", widths[i])
            conv(f"decoder.up_blocks.{i}.upsamplers.0.conv.conv", widths[i], 4 * time * widths[i + 1])
    conditioned("decoder.norm_out", widths[-1])
    conv("decoder.conv_out", widths[-1], 3)
    conv("encoder.conv_in", 3, widths[-1])
    back = widths[::-1]
    for i, time in enumerate(reversed(times)):
        # the stage without change of size runs last, on the widest maps
        for j in range(blocks):
            res(f"encoder.down_blocks.{i}.resnets.{j}", back[i], gamma)
        if time is not None:
            gamma(f"encoder.down_blocks.{i}.downsamplers.0.conv.norm", back[i])
            conv(f"encoder.down_blocks.{i}.downsamplers.0.conv.conv", back[i], back[i + 1] // 4)
    gamma("encoder.norm_out", widths[0])
    conv("encoder.conv_out", widths[0], 2 * channels)
    for name in ("proj_up", "proj_down"):
        w[f"{name}.weight"] = rng.standard_normal((d, d)) / math.sqrt(d)
        w[f"{name}.bias"] = rng.standard_normal(d) * 0.1
    w["scale_learnable_parameters"] = np.array([0.75, 1.0, 1.0, 1.0])
    return {name: array.astype(np.float16) for name, array in w.items()}


def swish(x: Array) -> Array:
    return x / (1 + np.exp(-x))


class ReferenceVideoTokenizer:
    """Arrays are [C, T, h, w], one video."""

    def __init__(self, weights: dict[str, Array], times: tuple[int | None, ...] = (None, 1, 2, 2)) -> None:
        self.w = {name: array.astype(np.float64) for name, array in weights.items()}
        self.times = times

    def conv(self, x: Array, name: str) -> Array:
        weight, bias = self.w[f"{name}.conv.weight"], self.w[f"{name}.conv.bias"]
        size = weight.shape[-1]
        x = np.concatenate([x[:, :1]] * (size - 1) + [x], axis=1)
        x = np.pad(x, ((0, 0), (0, 0), (size // 2, size // 2), (size // 2, size // 2)))
        T, h, w = x.shape[1] - size + 1, x.shape[2] - size + 1, x.shape[3] - size + 1
        out = np.zeros((len(weight), T, h, w)) + bias[:, None, None, None]
        for a in range(size):
            for b in range(size):
                for c in range(size):
                    out += np.einsum("oi,ithw->othw", weight[:, :, a, b, c], x[:, a : a + T, b : b + h, c : c + w])
        return out

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).sum(0)) * math.sqrt(len(x)) * self.w[f"{name}.gamma"]

    def conditioned(self, x: Array, name: str, z: Array) -> Array:
        """The condition is brought to the size of x by nearest neighbours, the first frame apart from the others."""
        T, h, w = x.shape[1:]
        big = np.zeros((len(z), T, h, w))
        for t in range(T):
            source = 0 if t == 0 else 1 + (t - 1) * (z.shape[1] - 1) // (T - 1)
            for y in range(h):
                for v in range(w):
                    big[:, t, y, v] = z[:, source, y * z.shape[2] // h, v * z.shape[3] // w]
        normed = self.norm(x, f"{name}.norm_layer")
        return normed * self.conv(big, f"{name}.conv_y") + self.conv(big, f"{name}.conv_b")

    def res(self, x: Array, name: str, z: Array | None) -> Array:
        y = x
        for j in (1, 2):
            y = self.norm(y, f"{name}.norm{j}") if z is None else self.conditioned(y, f"{name}.norm{j}", z)
            y = self.conv(swish(y), f"{name}.conv{j}")
        return x + y

    def grow(self, x: Array, name: str, time: int) -> Array:
        y = self.conv(swish(self.norm(x, f"{name}.norm")), f"{name}.conv")
        C, (T, h, w) = len(y) // (4 * time), y.shape[1:]
        out = np.zeros((C, T * time, 2 * h, 2 * w))
        for p in range(time):
            for a in range(2):
                for b in range(2):
                    for c in range(C):
                        channel = ((p * 2 + a) * 2 + b) * C + c
                        out[c, p::time, a::2, b::2] = y[channel] + x[channel % len(x)]
        if time > 1:
            out = np.concatenate([out[:, :time].mean(1, keepdims=True), out[:, time:]], axis=1)
        return out

    def shrink(self, x: Array, name: str, time: int) -> Array:
        def fold(x: Array) -> Array:
            x = np.concatenate([x[:, :, a::2, b::2] for a in range(2) for b in range(2)])
            rest = [x[:, 1 + i : 1 + i + time].mean(1, keepdims=True) for i in range(0, x.shape[1] - 1, time)]
            return np.concatenate([x[:, :1], *rest], axis=1)

        y = fold(self.conv(swish(self.norm(x, f"{name}.norm")), f"{name}.conv"))
        folded = fold(x)
        return y + sum(folded[i : i + len(y)] for i in range(0, len(folded), len(y))) / (len(folded) // len(y))

    def decode(self, codes: Array) -> Array:
        """codes: [d, F, h, w] -> [3, T, H, W], not clamped."""
        d, F, h, w = codes.shape
        codes = codes / self.w["scale_learnable_parameters"][0]
        codes = (
            np.einsum("oi,ithw->othw", self.w["proj_up.weight"], codes) + self.w["proj_up.bias"][:, None, None, None]
        )
        z = np.zeros((d // 4, F, 2 * h, 2 * w))
        for k in range(d):
            z[k // 4, :, k // 2 % 2 :: 2, k % 2 :: 2] = codes[k]
        x = self.conv(z, "decoder.conv_in")
        for j in range(2):
            x = self.res(x, f"decoder.mid_block.resnets.{j}", z)
        for i, time in enumerate(self.times):
            j = 0
            while f"decoder.up_blocks.{i}.resnets.{j}.conv1.conv.bias" in self.w:
                x = self.res(x, f"decoder.up_blocks.{i}.resnets.{j}", z)
                j += 1
            if time is not None:
                x = self.grow(x, f"decoder.up_blocks.{i}.upsamplers.0.conv", time)
        return self.conv(swish(self.conditioned(x, "decoder.norm_out", z)), "decoder.conv_out")

    def encode(self, video: Array) -> tuple[Array, Array]:
        """video: [3, T, H, W] -> mean and log variance [d, F, h, w] before the projection."""
        x = self.conv(video, "encoder.conv_in")
        for i, time in enumerate(reversed(self.times)):
            j = 0
            while f"encoder.down_blocks.{i}.resnets.{j}.conv1.conv.bias" in self.w:
                x = self.res(x, f"encoder.down_blocks.{i}.resnets.{j}", None)
                j += 1
            if time is not None:
                x = self.shrink(x, f"encoder.down_blocks.{i}.downsamplers.0.conv", time)
        for j in range(2):
            x = self.res(x, f"encoder.mid_block.resnets.{j}", None)
        x = self.conv(swish(self.norm(x, "encoder.norm_out")), "encoder.conv_out")
        fine = np.stack([x[k // 4, :, k // 2 % 2 :: 2, k % 2 :: 2] for k in range(4 * len(x))])
        return fine[: len(fine) // 2], fine[len(fine) // 2 :]

    def codes(self, mean: Array) -> Array:
        projected = np.einsum("oi,ithw->othw", self.w["proj_down.weight"], mean)
        return (projected + self.w["proj_down.bias"][:, None, None, None]) * self.w["scale_learnable_parameters"][0]
