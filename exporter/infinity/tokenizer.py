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

from toprovar.exporter.autoencoder import AutoencoderShape, Decoder, Encoder, autoencoder_from_shapes
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError


@dataclass(frozen=True)
class TokenizerConfig:
    """channels: latent channels; widths: per level from the picture to the latent; each level but the first halves."""

    channels: int
    widths: tuple[int, ...]
    res_blocks: int = 2
    rgb_shortcut: bool = False
    encoder: bool = True

    @property
    def shape(self) -> AutoencoderShape:
        return AutoencoderShape(self.channels, self.widths, self.res_blocks)

    @property
    def stride(self) -> int:
        """Pixels per latent cell along one axis."""
        return self.shape.stride


def tokenizer_config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> TokenizerConfig:
    """Reads the sizes off canonical names (`decoder.conv_in.conv.weight` and so on).

    Raises: ToprovarError naming the missing key, or an attention layer, which no bit tokenizer has.
    """
    shape = autoencoder_from_shapes(shapes, "a bit tokenizer")
    for name in shapes:
        if name.startswith("decoder.") and "attn" in name:
            raise ToprovarError(
                f"not a bit tokenizer: found tensor {name}; expected a decoder without attention",
                "the checkpoint belongs to another kind of tokenizer",
            )
    return TokenizerConfig(
        channels=shape.channels,
        widths=shape.widths,
        res_blocks=shape.res_blocks,
        rgb_shortcut="rgb_shortcut.decode.weight" in shapes,
        encoder="encoder.conv_in.conv.weight" in shapes,
    )


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
        self.decoder = Decoder(config.shape)
        if config.encoder:
            self.encoder = Encoder(config.shape)
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
