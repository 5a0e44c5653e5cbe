"""VAR's generation loop in PyTorch: one pass per map.

Source: FoundationVision/VAR, models/var.py, autoregressive_infer_cfg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toprovar.exporter.codebook import Quantizer, resize_down
from toprovar.exporter.index_sampling import IndexNoise, draw_indices, mask_unlikely, soft_embeddings
from toprovar.exporter.var.transformer import Prompt, Var
from toprovar.runtime.errors import ToprovarError

Observer = Callable[[str, int, Tensor], None]


@dataclass(frozen=True)
class Sampling:
    """How indices are drawn; the defaults are the published demo's.

    cfg:    guidance of the last scale, growing from 0 at the first; 0 needs no rows of the null class
    top_k:  candidates; 0 keeps all
    top_p:  probability that stays; 0 keeps all
    smooth: feeds on means of codes instead of single codes
    """

    cfg: float = 4.0
    top_k: int = 900
    top_p: float = 0.95
    smooth: bool = False

    def guidance(self, scale: int, scales: int) -> float:
        return self.cfg * scale / (scales - 1)


@dataclass
class Generation:
    """latent: [B, d, H, H], what the tokenizer's decoder takes; indices: per scale [B, n*n] int64."""

    latent: Tensor
    indices: list[Tensor] = field(default_factory=list)


def _unobserved(name: str, scale: int, tensor: Tensor) -> None:
    pass


def check_sides(model: Var, sides: Sequence[int], what: str = "schedule") -> None:
    """Raises: ToprovarError if the model has other levels or positions than maps of these sides need."""
    tokens, config = sum(side * side for side in sides), model.config
    if len(sides) < 2 or sides[0] != 1 or len(sides) != config.levels or tokens != config.tokens:
        raise ToprovarError(
            f"{what}: found sides {list(sides)}, {len(sides)} maps of {tokens} tokens together; expected "
            f"{config.levels} maps of {config.tokens} tokens, the first of side 1",
            "pass the sides that the model was trained with",
        )


@torch.inference_mode()
def generate(
    model: Var,
    quantizer: Quantizer,
    prompt: Prompt,
    sides: Sequence[int],
    sampling: Sampling,
    noise: IndexNoise | None = None,
    forced_indices: Sequence[Tensor] | None = None,
    forced_maps: Mapping[int, Tensor] | None = None,
    observe: Observer = _unobserved,
) -> Generation:
    """Draws the latents of a batch of classes.

    prompt:         2B rows with those of the null class, else B
    sides:          of the square token maps; the first is 1
    noise:          may be None where indices are forced and no smoothing runs
    forced_indices: indices to use instead of drawn ones, per scale [B, n*n]; fewer than `sides` stop early
    forced_maps:    {scale: [B, d, n, n]} inputs of scales to use instead of the resized latent
    observe:        called with (name, scale, tensor) for intermediate values, names as in the parity files
    Raises:         ToprovarError if the sides, the guidance or the noise do not fit.
    """
    check_sides(model, sides)
    if sampling.cfg != 0 and not prompt.guided:
        raise ToprovarError(
            f"guidance {sampling.cfg} needs rows of the null class; the prompt has none",
            "make the prompt with guided=True",
        )
    if noise is None and (forced_indices is None or sampling.smooth):
        raise ToprovarError("this run draws something and was given no noise", "pass noise, or force the indices")
    B, scales, codebook = prompt.images, len(sides), quantizer.embedding.weight
    latent = codebook.new_zeros(B, quantizer.channels, sides[-1], sides[-1])
    out = Generation(latent)
    cache = model.empty_cache(prompt.rows)
    first = 0
    for scale in range(len(forced_indices) if forced_indices is not None else scales):
        side, t = sides[scale], sampling.guidance(scale, scales)
        if scale == 0:
            x = model.first_token(prompt)
        else:
            resized = (forced_maps or {}).get(scale, resize_down(latent, side))
            observe("next", scale, resized)
            x = model.embed_codes(resized, scale, first).repeat(prompt.rows // B, 1, 1)
        first += side * side
        observe("in", scale, x)
        for layer, block in enumerate(model.blocks):
            x, keys, values = block(x, prompt.modulations[layer], *cache[layer])
            cache[layer] = keys, values
            observe(f"block{layer}", scale, x)
            observe(f"k{layer}", scale, keys)
            observe(f"v{layer}", scale, values)
        logits = model.logits(x, prompt)
        observe("raw", scale, logits)
        if prompt.guided:
            logits = (1 + t) * logits[:B] - t * logits[B:]  # [B, n*n, V]
        observe("logits", scale, logits)
        masked = mask_unlikely(logits, sampling.top_k, sampling.top_p)
        if forced_indices is not None:
            indices = forced_indices[scale]
        else:
            assert noise is not None
            indices = draw_indices(masked, noise.indices(scale, *masked.shape[1:]))
        out.indices.append(indices)
        tokens = codebook[indices]  # [B, n*n, d]
        if sampling.smooth:
            assert noise is not None
            plane = noise.smoothing(scale, *masked.shape[1:])
            tokens = soft_embeddings(masked, plane, codebook, scale / (scales - 1))
        latent = latent + quantizer.contribution(tokens, side, sides[-1], scale, scales)
    out.latent = latent
    return out
