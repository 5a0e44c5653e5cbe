"""A picture as the bits that Infinity would have to draw to make it: for teacher forcing and for editing.

fitted = fitted_picture(Image.open("dog.jpg"), schedule, tokenizer, model.config.patch)
known = image_bits(tokenizer, fitted, schedule, model.config.patch)
generate(model, prompt, schedule, guidance, forced_bits=known.bits)    # the loop ends with known.codes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from toprovar.exporter.infinity.tokenizer import BitTokenizer, quantise_residual
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError


@dataclass(frozen=True)
class ImageBits:
    """bits:  per scale [B, h*w, bits of a token] uint8, what `generate` takes as `forced_bits`
    codes: [B, d, H, W] sum of the up-sampled codes of all scales, what the decoder takes
    """

    bits: list[Tensor]
    codes: Tensor


def image_bits(tokenizer: BitTokenizer, pictures: np.ndarray, schedule: Schedule, patch: int = 1) -> ImageBits:
    """The residual bits of pictures, scale by scale.

    pictures: uint8 [H, W, 3] or [B, H, W, 3], RGB, of the schedule's size
    patch:    cells of a token's side, `InfinityConfig.patch`
    Raises:   ToprovarError if the size is not that of the schedule or the tokenizer holds no encoder.
    """
    batch = pictures[None] if pictures.ndim == 3 else pictures
    if batch.dtype != np.uint8 or batch.ndim != 4 or batch.shape[3] != 3:
        raise ValueError(f"pictures are {batch.dtype}{list(batch.shape)}; expected uint8 [B, H, W, 3]")
    expected = picture_size(schedule, tokenizer, patch)
    if batch.shape[1:3] != expected:
        raise ToprovarError(
            f"a picture of {batch.shape[1]}x{batch.shape[2]} pixels (height x width) does not fit the schedule, whose "
            f"last map is {schedule[-1][0]}x{schedule[-1][1]}: expected {expected[0]}x{expected[1]}",
            "resize it, as fitted_picture does",
        )
    image = torch.from_numpy(batch.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    device = next(tokenizer.parameters()).device
    with torch.inference_mode():
        codes = quantise_residual(tokenizer.encode(image.to(device)).float(), schedule, patch=patch)
    return ImageBits([token_bits(bits, patch) for bits in codes.bits], codes.summed)


def picture_size(schedule: Schedule, tokenizer: BitTokenizer, patch: int = 1) -> tuple[int, int]:
    """Height and width in pixels of the pictures that a schedule makes."""
    pixels = tokenizer.config.stride * patch
    return schedule[-1][0] * pixels, schedule[-1][1] * pixels


def token_bits(bits: Tensor, patch: int) -> Tensor:
    """Bits of cells to bits of tokens, row by row. bits: [B, h*patch, w*patch, d] -> [B, h*w, d*patch^2]."""
    if patch == 1:
        return bits.flatten(1, 2)
    grid = F.pixel_unshuffle(bits.permute(0, 3, 1, 2).float(), patch)  # [B, d*patch^2, h, w]
    return grid.flatten(2).transpose(1, 2).to(bits.dtype)


def fitted_picture(picture: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """A picture of any size as [H, W, 3] uint8 of height and width `size`: resized to cover it, the middle cut out."""
    height, width = size
    aspect = picture.width / picture.height
    if aspect <= width / height:
        resized = width, max(int(width / aspect), height)
    else:
        resized = max(int(height * aspect), width), height
    array = np.asarray(picture.convert("RGB").resize(resized, Image.Resampling.LANCZOS))
    top, left = (resized[1] - height) // 2, (resized[0] - width) // 2
    return array[top : top + height, left : left + width]
