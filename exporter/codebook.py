"""From drawn indices to the latent: codebook and the convolutions that smooth each scale's map.

The part of the tokenizer that the loops of VAR and HART need, under the same names in both.
Source: VAR (arXiv 2404.02905), FoundationVision/VAR, models/quant.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toprovar.exporter.families import expect_shapes
from toprovar.exporter.loading import fp32
from toprovar.exporter.weights_file import Thunks
from toprovar.runtime.errors import ToprovarError

RESIDUAL_SHARE = 0.5  # of the convolution in a smoothed map
_CONVOLUTION = re.compile(r"quantize\.quant_resi\.qresi_ls\.(\d{1,3})\.(weight|bias)")


def smoothing_index(scale: int, scales: int, convolutions: int = 4) -> int:
    """Which convolution smooths a scale: the tick nearest to its place in 0..1; ties go as float64 rounds them."""
    if scales == 1:
        return 0
    margin = 1 / 3 / convolutions if convolutions == 4 else 1 / 2 / convolutions
    ticks = np.linspace(margin, 1 - margin, convolutions)
    return int(np.argmin(np.abs(ticks - scale / (scales - 1))))


class Smoothing(nn.Module):
    """The convolutions, 3x3 each."""

    def __init__(self, channels: int, convolutions: int) -> None:
        super().__init__()
        self.qresi_ls = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(convolutions))

    def forward(self, h: Tensor, scale: int, scales: int) -> Tensor:
        """h: [B, d, n, n] -> the same shape."""
        convolution = self.qresi_ls[smoothing_index(scale, scales, len(self.qresi_ls))]
        return h * (1 - RESIDUAL_SHARE) + convolution(h) * RESIDUAL_SHARE


class Quantizer(nn.Module):
    def __init__(self, vocabulary: int, channels: int, convolutions: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, channels)
        self.quant_resi = Smoothing(channels, convolutions)

    @property
    def channels(self) -> int:
        return self.embedding.weight.shape[1]

    def contribution(self, embeddings: Tensor, side: int, last_side: int, scale: int, scales: int) -> Tensor:
        """What a scale adds to the latent. embeddings: [B, side*side, d] -> [B, d, last_side, last_side]."""
        h = tokens_to_map(embeddings, side)
        if side != last_side:
            h = F.interpolate(h, size=(last_side, last_side), mode="bicubic")
        return self.quant_resi(h, scale, scales)


def resize_down(latent: Tensor, side: int) -> Tensor:
    """The latent at the next scale's size: mean over areas. latent: [B, d, H, H] -> [B, d, side, side]."""
    return F.interpolate(latent, size=(side, side), mode="area")


def tokens_to_map(tokens: Tensor, side: int) -> Tensor:
    """[B, side*side, d] -> [B, d, side, side]."""
    return tokens.transpose(1, 2).unflatten(-1, (side, side))


def load_quantizer(tensors: Mapping[str, Any], what: str) -> Quantizer:
    """Codebook and smoothing convolutions of a VQ tokenizer, under `quantize.` or `vae.quantize.` (fp32).

    Raises: ToprovarError for the first tensor that is missing, has another shape or is not finite.
    """
    own = {name.removeprefix("vae."): name for name in tensors if name.removeprefix("vae.").startswith("quantize.")}
    shapes = {name: tuple(tensors[source].shape) for name, source in own.items()}
    codebook = shapes.get("quantize.embedding.weight", ())
    if len(codebook) != 2 or 0 in codebook:
        raise ToprovarError(
            f"{what}: tensor quantize.embedding.weight is missing or no matrix: found shape {list(codebook)}; expected "
            "[codes, channels]",
            "pass the tokenizer that was published with this transformer",
        )
    last = max((int(found[1]) for name in shapes if (found := _CONVOLUTION.fullmatch(name))), default=0)
    with torch.device("meta"):
        quantizer = Quantizer(*codebook, last + 1)
    expected = {f"quantize.{name}": tuple(tensor.shape) for name, tensor in quantizer.state_dict().items()}
    expect_shapes(shapes, expected, what)
    state = {name.removeprefix("quantize."): fp32(tensors, own[name], what) for name in expected}
    quantizer.load_state_dict(state, assign=True)
    return quantizer.eval().requires_grad_(False)


def check_belong_together(vocabulary: int, code_channels: int, quantizer: Quantizer, what: str) -> None:
    """Raises: ToprovarError if the tokenizer has other codes or channels than the transformer draws."""
    found = tuple(quantizer.embedding.weight.shape)
    expected = (vocabulary, code_channels)
    if found != expected:
        raise ToprovarError(
            f"{what}: tokenizer and transformer do not belong together: the codebook has {found[0]} codes of "
            f"{found[1]} channels; the transformer draws {expected[0]} of {expected[1]}",
            "pass the tokenizer that was published with this transformer",
        )


def codebook_weights(quantizer: Quantizer) -> Thunks:
    """What step graphs read of it."""
    weights: Thunks = {"codebook": lambda: quantizer.embedding.weight}
    for k, convolution in enumerate(quantizer.quant_resi.qresi_ls):
        weights[f"smoothing.{k}"] = lambda c=convolution: c.weight  # type: ignore[misc]
        weights[f"smoothing.{k}_bias"] = lambda c=convolution: c.bias  # type: ignore[misc]
    return weights
