"""A picture as the indices that VAR would have to draw to make it: for teacher forcing and for editing.

Source: FoundationVision/VAR, models/quant.py (residual loop of the tokenizer's training).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toprovar.exporter.codebook import Quantizer, resize_down
from toprovar.exporter.vq_tokenizer.tokenizer import VqTokenizer
from toprovar.runtime.errors import ToprovarError


@dataclass(frozen=True)
class ImageIndices:
    """indices: per scale [B, n*n] int64, what the loop takes as `forced_indices`
    latent:  [B, d, H, H] sum of all maps, what the decoder takes
    """

    indices: list[Tensor]
    latent: Tensor


def image_indices(
    tokenizer: VqTokenizer, quantizer: Quantizer, pictures: np.ndarray, sides: Sequence[int]
) -> ImageIndices:
    """pictures: uint8 [H, H, 3] or [B, H, H, 3], RGB, of side sides[-1] * stride; sides: of the square token maps.

    Raises: ToprovarError if the size is not that of the last map or the tokenizer holds no encoder.
    """
    batch = pictures[None] if pictures.ndim == 3 else pictures
    if batch.dtype != np.uint8 or batch.ndim != 4 or batch.shape[3] != 3:
        raise ValueError(f"pictures are {batch.dtype}{list(batch.shape)}; expected uint8 [B, H, H, 3]")
    expected = sides[-1] * tokenizer.config.stride
    if batch.shape[1:3] != (expected, expected):
        raise ToprovarError(
            f"a picture of {batch.shape[1]}x{batch.shape[2]} pixels does not fit maps up to side {sides[-1]}: expected "
            f"{expected}x{expected}",
            "resize it",
        )
    image = torch.from_numpy(batch.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        return quantise_residual(tokenizer.encode(image.to(quantizer.embedding.weight.device)), quantizer, sides)


def quantise_residual(latent: Tensor, quantizer: Quantizer, sides: Sequence[int]) -> ImageIndices:
    """At every scale the codes nearest to what the scales before left. latent: [B, d, H, H], H = sides[-1]."""
    codebook, last = quantizer.embedding.weight, sides[-1]
    lengths = codebook.square().sum(1)  # [V]
    residual, summed, indices = latent, torch.zeros_like(latent), []
    for scale, side in enumerate(sides):
        target = residual if side == last else resize_down(residual, side)
        tokens = target.flatten(2).transpose(1, 2)  # [B, n*n, d]
        nearest = (lengths - 2 * tokens @ codebook.T).argmin(-1)  # the token's own length is the same for all codes
        indices.append(nearest)
        part = quantizer.contribution(codebook[nearest], side, last, scale, len(sides))
        residual, summed = residual - part, summed + part
    return ImageIndices(indices, summed)
