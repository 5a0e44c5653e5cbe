"""HART's generation loop in PyTorch: text pass, one pass per map, the residual head behind the last one.

Source: mit-han-lab/hart, hart_transformer_t2i.py, autoregressive_infer_cfg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from toprovar.exporter.codebook import Quantizer, resize_down, tokens_to_map
from toprovar.exporter.hart.residual import STEPS
from toprovar.exporter.hart.rope import image_angles, text_angles
from toprovar.exporter.hart.transformer import Hart, Prompt
from toprovar.exporter.index_sampling import IndexNoise, draw_indices, mask_unlikely, soft_embeddings
from toprovar.runtime.errors import ToprovarError

Observer = Callable[[str, int, Tensor], None]

TOP_K_EARLY, TOP_K_LATE, LATE_SCALE = 600, 300, 7  # published: 600 below scale 7, 300 from there on


@dataclass(frozen=True)
class Sampling:
    """How indices are drawn.

    cfg:      guidance that the last scale would have if it grew to the end; 0 needs no unconditional rows
    top_k:    candidates per scale; None takes the published ones. 0 keeps all.
    smooth:   feeds on means of codes instead of single codes
    residual: adds the residual head's map to the last one
    """

    cfg: float = 4.5
    top_k: Sequence[int] | None = None
    top_p: float = 0.0
    smooth: bool = False
    residual: bool = True

    def candidates(self, scale: int) -> int:
        if self.top_k is None:
            return TOP_K_EARLY if scale < LATE_SCALE else TOP_K_LATE
        return self.top_k[min(scale, len(self.top_k) - 1)]

    def guidance(self, scale: int, scales: int) -> float:
        """t of a scale: grows from 0; the last scale keeps that of the one before, as the reference does."""
        return self.cfg * min(scale, scales - 2) / (scales - 1)


class Noise(Protocol):
    """Everything random of a run, for B images."""

    def indices(self, scale: int, tokens: int, vocabulary: int) -> Tensor:
        """[B, tokens, vocabulary] uniform in [0, 1)."""

    def smoothing(self, scale: int, tokens: int, vocabulary: int) -> Tensor:
        """[B, tokens, vocabulary] uniform in [0, 1), independent of `indices`."""

    def residual_start(self, tokens: int, channels: int) -> Tensor:
        """[B*tokens, channels] standard normal."""

    def residual_steps(self, tokens: int, channels: int, rows: int) -> Tensor:
        """[steps, rows*tokens, channels] standard normal; rows are B, or 2B under guidance."""


class SeededNoise(IndexNoise):
    """Noise from counters, for the residual head too: planes RESIDUAL onwards."""

    RESIDUAL = 2**17

    def _normal(self, plane: int, tokens: int, channels: int) -> Tensor:
        """Box-Muller on neighbouring columns. Returns: [B*tokens, channels] float32."""
        radius, angle = np.split(self.uniform(plane, tokens, 2 * channels).astype(np.float64), 2, axis=-1)
        normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
        return torch.from_numpy(normal.astype(np.float32)).flatten(0, 1)

    def residual_start(self, tokens: int, channels: int) -> Tensor:
        return self._normal(self.RESIDUAL, tokens, channels)

    def residual_steps(self, tokens: int, channels: int, rows: int) -> Tensor:
        # the unconditional half never reaches the picture: it takes the same numbers
        steps = torch.stack([self._normal(self.RESIDUAL + 1 + step, tokens, channels) for step in range(STEPS)])
        return steps.repeat(1, rows // len(self.seeds), 1)


@dataclass
class Generation:
    """latent: [B, d, H, H], what the tokenizer's decoder takes; indices: per scale [B, n*n] int64."""

    latent: Tensor
    indices: list[Tensor] = field(default_factory=list)


def _unobserved(name: str, scale: int, tensor: Tensor) -> None:
    pass


@torch.inference_mode()
def generate(
    model: Hart,
    quantizer: Quantizer,
    prompt: Prompt,
    sides: Sequence[int],
    sampling: Sampling,
    noise: Noise | None = None,
    forced_indices: Sequence[Tensor] | None = None,
    forced_maps: Mapping[int, Tensor] | None = None,
    observe: Observer = _unobserved,
) -> Generation:
    """Draws the latents of a batch of prompts.

    prompt:         2B rows with unconditional ones, else B
    sides:          of the square token maps; the first is 1, drawn by the last text token
    noise:          may be None where indices are forced and neither smoothing nor the residual head runs
    forced_indices: indices to use instead of drawn ones, per scale [B, n*n]; fewer than `sides` stop early
    forced_maps:    {scale: [B, d, n, n]} inputs of scales to use instead of the resized latent
    observe:        called with (name, scale, tensor) for intermediate values, names as in the parity files
    Raises:         ToprovarError if the sides or the noise do not fit.
    """
    if len(sides) < 2 or sides[0] != 1:
        raise ToprovarError(
            f"HART draws its first map from one text token and further ones behind it: found sides {list(sides)}; "
            "expected at least two, the first of them 1"
        )
    guided, B = prompt.guided, prompt.images
    if sampling.cfg != 0 and not guided:
        raise ToprovarError(
            f"guidance {sampling.cfg} needs unconditional rows; the prompt has none", "make the prompt with guided=True"
        )
    scales, codebook = len(sides), quantizer.embedding.weight
    latent = codebook.new_zeros(B, quantizer.channels, sides[-1], sides[-1])
    out = Generation(latent)
    cache = model.empty_cache(prompt.rows)

    def needed_noise() -> Noise:
        if noise is None:
            raise ToprovarError("this run draws something and was given no noise", "pass noise, or force the indices")
        return noise

    for scale in range(len(forced_indices) if forced_indices is not None else scales):
        side, t, last = sides[scale], sampling.guidance(scale, scales), scale == scales - 1
        if scale == 0:
            x = prompt.embedded + model.level(0)
            angles = text_angles(prompt.positions, model.config.head_width)
        else:
            resized = (forced_maps or {}).get(scale, resize_down(latent, side))
            observe("next", scale, resized)
            x = model.embed_codes(resized, scale).repeat(prompt.rows // B, 1, 1)
            angles = image_angles(side, sides[-1], prompt.last_position, model.config.head_width)
        observe("in", scale, x)
        for layer, block in enumerate(model.blocks):
            x, keys, values = block(x, prompt.modulation, angles, *cache[layer])
            cache[layer] = keys, values
            observe(f"block{layer}", scale, x)
            observe(f"k{layer}", scale, keys)
            observe(f"v{layer}", scale, values)
        raw = model.logits(x, prompt)
        observe("raw", scale, raw)
        logits = raw[:, -1:] if scale == 0 else raw
        if guided:
            logits = (1 + t) * logits[:B] - t * logits[B:]  # [B, n*n, V]
        observe("logits", scale, logits)
        masked = mask_unlikely(logits, sampling.candidates(scale), sampling.top_p)
        if forced_indices is not None:
            indices = forced_indices[scale]
        else:
            indices = draw_indices(masked, needed_noise().indices(scale, *masked.shape[1:]))
        out.indices.append(indices)
        embeddings = tokens = codebook[indices]  # [B, n*n, d]
        if sampling.smooth:
            plane = needed_noise().smoothing(scale, *masked.shape[1:])
            tokens = soft_embeddings(masked, plane, codebook, scale / (scales - 1))
        if last and sampling.residual:
            z = model.residual_condition(x, embeddings.repeat(prompt.rows // B, 1, 1)).flatten(0, 1)  # [R*n*n, C]
            start = needed_noise().residual_start(side * side, quantizer.channels)
            steps = needed_noise().residual_steps(side * side, quantizer.channels, prompt.rows)
            residual = model.diffloss(z, t if guided else None, start, steps)
            observe("diff/z", scale, z)
            observe("diff/out", scale, residual)
            residual = residual[: len(start)].unflatten(0, (B, -1))  # [B, n*n, d]
            latent = latent + tokens_to_map(tokens + residual, side)
        elif last:
            latent = latent + tokens_to_map(tokens, side)
        else:
            latent = latent + quantizer.contribution(tokens, side, sides[-1], scale, scales)
    out.latent = latent
    return out
