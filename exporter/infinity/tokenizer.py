"""The bit tokenizer of Infinity: image <-> latent, latent <-> bits per scale.

Convolutions, group norm of 32, swish; no attention. Parameter names are those of the published tokenizers.
An optional RGB shortcut (present iff the file holds `rgb_shortcut.*`) adds the image's 8x8 means to the latent and
gives them back to the picture; the demo tokenizer uses it (MODEL_CARD.md says what it gains).
Source: FoundationVision/Infinity, infinity/models/bsq_vae (decoder, encoder, residual loop).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError

NORM_GROUPS = 32


@dataclass(frozen=True)
class TokenizerConfig:
    """channels: latent channels; widths: per level from the picture to the latent; each level but the first halves."""

    channels: int
    widths: tuple[int, ...]
    res_blocks: int = 2
    rgb_shortcut: bool = False
    encoder: bool = True

    @property
    def stride(self) -> int:
        """Pixels per latent cell along one axis."""
        return 2 ** (len(self.widths) - 1)


def tokenizer_config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> TokenizerConfig:
    """Reads the sizes off canonical names (`decoder.conv_in.conv.weight` and so on).

    Raises: ToprovarError naming the missing key.
    """
    if "decoder.conv_in.conv.weight" not in shapes:
        raise ToprovarError(
            f"not a bit tokenizer: tensor decoder.conv_in.conv.weight is missing ({len(shapes)} tensors present)"
        )

    def count(start: str) -> int:
        return len({n[len(start) :].split(".")[0] for n in shapes if n.startswith(start)})

    def kernel(name: str) -> tuple[int, ...]:
        shape = tuple(shapes.get(name, ()))
        if len(shape) != 4 or 0 in shape:
            raise ToprovarError(
                f"not a bit tokenizer: tensor {name} {f'has shape {list(shape)}' if name in shapes else 'is missing'}; "
                "expected the 4 axes of a convolution",
                "pass the whole checkpoint of the tokenizer",
            )
        return shape

    channels = kernel("decoder.conv_in.conv.weight")[1]
    levels = count("decoder.up.")
    blocks = count("decoder.up.0.block.")
    widths = tuple(kernel(f"decoder.up.{i}.block.0.conv1.conv.weight")[0] for i in range(levels))
    if not widths or any(width % NORM_GROUPS for width in widths):
        raise ToprovarError(
            f"not a bit tokenizer: its levels are {list(widths)} wide; expected multiples of {NORM_GROUPS}",
            "the checkpoint belongs to another model, or was changed",
        )
    return TokenizerConfig(
        channels=channels,
        widths=widths,
        res_blocks=blocks - 1,
        rgb_shortcut="rgb_shortcut.decode.weight" in shapes,
        encoder="encoder.conv_in.conv.weight" in shapes,
    )


class _Conv(nn.Module):
    """A convolution under the inner name `.conv` of published files."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class _Norm(nn.Module):
    """Group norm under the inner name `.norm`; statistics in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(NORM_GROUPS, width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class _ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _Norm(inputs), _Conv(inputs, outputs, 3)
        self.norm2, self.conv2 = _Norm(outputs), _Conv(outputs, outputs, 3)
        if inputs != outputs:
            self.nin_shortcut = _Conv(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class _Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1, self.block_2 = _ResBlock(width, width), _ResBlock(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.block_1(x))


class _Resample(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv = _Conv(width, width, 3, stride)


class _Level(nn.Module):
    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(_ResBlock(inputs if j == 0 else outputs, outputs) for j in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return x


class _Encoder(nn.Module):
    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = _Conv(3, widths[0], 3)
        self.down = nn.ModuleList()
        for i, width in enumerate(widths):
            level = _Level(widths[max(i - 1, 0)], width, config.res_blocks)
            if i < len(widths) - 1:
                level.downsample = _Resample(width, 2)
            self.down.append(level)
        self.mid = _Middle(widths[-1])
        self.norm_out = _Norm(widths[-1])
        self.conv_out = _Conv(widths[-1], config.channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
            if hasattr(level, "downsample"):
                x = level.downsample.conv(F.pad(x, (0, 1, 0, 1)))
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class _Decoder(nn.Module):
    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = _Conv(config.channels, widths[-1], 3)
        self.mid = _Middle(widths[-1])
        self.up = nn.ModuleList()
        for i, width in enumerate(widths):
            level = _Level(widths[min(i + 1, len(widths) - 1)], width, config.res_blocks + 1)
            if i > 0:
                level.upsample = _Resample(width, 1)
            self.up.append(level)
        self.norm_out = _Norm(widths[0])
        self.conv_out = _Conv(widths[0], 3, 3)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
            if hasattr(level, "upsample"):
                x = level.upsample.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.norm_out(x)))


class _RgbShortcut(nn.Module):
    """Colour means go straight through: latent += encode(8x8 mean), picture += bilinear(decode(latent))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.encode = nn.Conv2d(3, channels, 1, bias=False)
        self.decode = nn.Conv2d(channels, 3, 1, bias=False)


class BitTokenizer(nn.Module):
    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = _Decoder(config)
        if config.encoder:
            self.encoder = _Encoder(config)
        if config.rgb_shortcut:
            self.rgb_shortcut = _RgbShortcut(config.channels)

    def encode(self, image: Tensor) -> Tensor:
        """image: [B, 3, H, W] in [-1, 1] -> latent [B, d, H/stride, W/stride]."""
        if not self.config.encoder:
            raise ToprovarError("this tokenizer file holds no encoder", "use a file with encoder.* tensors")
        latent = self.encoder(image)
        if self.config.rgb_shortcut:
            latent = latent + self.rgb_shortcut.encode(F.avg_pool2d(image, self.config.stride))
        return latent

    def decode(self, latent: Tensor) -> Tensor:
        """latent: [B, d, h, w] -> image [B, 3, h*stride, w*stride] in [-1, 1]."""
        return self.decode_raw(latent).clamp(-1, 1)

    def decode_raw(self, latent: Tensor) -> Tensor:
        """`decode` before clamping, for training."""
        image = self.decoder(latent)
        if self.config.rgb_shortcut:
            colour = self.rgb_shortcut.decode(latent)
            image = image + F.interpolate(
                colour, scale_factor=float(self.config.stride), mode="bilinear", align_corners=False
            )
        return image


def latent_from_bits(bits: Tensor) -> Tensor:
    """Bits to a unit-length latent vector. bits: [B, h, w, d] of 0/1 -> [B, d, h, w], each entry ±1/sqrt(d)."""
    return ((bits.float() * 2 - 1) * bits.shape[-1] ** -0.5).permute(0, 3, 1, 2)


def unpatch_bits(bits: Tensor) -> Tensor:
    """Token bits to tokenizer bits for 2x2 patches. bits: [B, h, w, 4*d] -> [B, 2h, 2w, d]."""
    return F.pixel_shuffle(bits.permute(0, 3, 1, 2).float(), 2).permute(0, 2, 3, 1).to(bits.dtype)


def tokens_from_latent(latent: Tensor, patch: int) -> Tensor:
    """latent: [B, d, h*patch, w*patch] -> [B, h*w, d*patch*patch], row-major."""
    if patch > 1:
        latent = F.pixel_unshuffle(latent, patch)
    return latent.flatten(2).transpose(1, 2)


def resize_bilinear(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


@dataclass
class ResidualCodes:
    """Bits of an image, scale by scale.

    bits:   per scale [B, h, w, d] uint8 at the latent's own resolution
    inputs: per scale from 1 on, the accumulator resized to that scale, [B, N_k, d*patch^2] (transformer input)
    summed: [B, d, H, W] sum of all up-sampled codes
    """

    bits: list[Tensor]
    inputs: list[Tensor]
    summed: Tensor


def quantise_residual(
    latent: Tensor, schedule: Schedule, flips: Sequence[Tensor | None] | None = None, patch: int = 1
) -> ResidualCodes:
    """Residual bits of a latent over a schedule; the last scale takes the residual as it is.

    latent: [B, d, H, W] fp32; flips: per scale a bool mask like the bits; flipped codes enter the accumulator, and the
    following scales see the error, while `bits` keeps the right answer (bitwise self-correction).
    """
    residual, summed = latent, torch.zeros_like(latent)
    full = (latent.shape[-2], latent.shape[-1])
    all_bits, inputs = [], []
    for k, (height, width) in enumerate(schedule):
        size = (height * patch, width * patch)
        if k > 0:
            inputs.append(tokens_from_latent(resize_bilinear(summed, size), patch))
        last = k == len(schedule) - 1
        target = residual if size == full and last else F.interpolate(residual, size=size, mode="area")
        bits = (target > 0).permute(0, 2, 3, 1)
        all_bits.append(bits.to(torch.uint8))
        drawn = bits if flips is None or flips[k] is None else bits ^ flips[k]
        code = latent_from_bits(drawn)
        if size != full:
            code = resize_bilinear(code, full)
        residual = residual - code
        summed = summed + code
    return ResidualCodes(all_bits, inputs, summed)
