"""Drawing codebook indices with noise as an input, so that every runtime draws the same ones.

Source: VAR (arXiv 2404.02905), models/helpers.py: the order of top-k and top-p, and how ties are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toprovar.runtime.noise import SMOOTHING_PLANE, stream_noise

SMALLEST_NOISE = 2.0**-25  # noise has 24 bits; zero would turn into an infinite Gumbel number


def mask_unlikely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Minus infinity where an index may not be drawn. logits: [..., V]; 0 switches either rule off.

    top-k keeps all that equal the k-th largest; top-p then removes, from the least likely, those whose cumulative
    probability stays within 1 - top_p, never the largest.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if top_p > 0:
        ascending, order = logits.sort(dim=-1)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        removed[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -math.inf)
    return logits


def gumbel(noise: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) as Gumbel ones."""
    return -torch.log(-torch.log(noise.clamp(min=SMALLEST_NOISE)))


def draw_indices(masked_logits: Tensor, noise: Tensor) -> Tensor:
    """Samples by the largest of logit + Gumbel. Both [B, L, V] -> [B, L] int64."""
    return (masked_logits + gumbel(noise)).argmax(dim=-1)


def smooth_temperature(place: float) -> float:
    """Of the smooth variant, at a scale's place in 0..1."""
    return max(0.27 * (1 - 0.95 * place), 0.005)


def soft_embeddings(masked_logits: Tensor, noise: Tensor, codebook: Tensor, place: float) -> Tensor:
    """The smooth variant's token: a mean of codes, ever closer to a single one.

    masked_logits, noise: [B, L, V]; codebook: [V, d]; place: of the scale, in 0..1. Returns: [B, L, d].
    """
    weights = ((masked_logits * (1 + place) + gumbel(noise)) / smooth_temperature(place)).softmax(dim=-1)
    return weights @ codebook


class IndexNoise:
    """Noise from counters: a value depends on seed, image and its own place alone.

    The noise planes of a run: scale s draws indices from plane s, smoothing from plane SMOOTHING_PLANE + s.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = list(seeds)

    def uniform(self, plane: int, tokens: int, columns: int) -> np.ndarray:
        """[B, tokens, columns] in [0, 1)."""
        return np.stack([stream_noise(seed, plane, tokens, columns) for seed in self.seeds])

    def indices(self, scale: int, tokens: int, vocabulary: int) -> Tensor:
        return torch.from_numpy(self.uniform(scale, tokens, vocabulary))

    def smoothing(self, scale: int, tokens: int, vocabulary: int) -> Tensor:
        return torch.from_numpy(self.uniform(SMOOTHING_PLANE + scale, tokens, vocabulary))
