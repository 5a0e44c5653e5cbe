"""HART's generation loop in PyTorch: text pass, one pass per map, the residual head behind the last one.

Plans are run by planned/loop.py. Source: mit-han-lab/hart, hart_transformer_t2i.py, autoregressive_infer_cfg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from toprovar.exporter.codebook import Quantizer
from toprovar.exporter.hart.config import STEPS
from toprovar.exporter.hart.rope import image_angles, text_angles
from toprovar.exporter.hart.transformer import Hart, Prompt
from toprovar.exporter.index_sampling import IndexNoise
from toprovar.exporter.planned.images import Images
from toprovar.exporter.planned.index_loop import DrawingNoise, IndexLoop
from toprovar.exporter.planned.loop import BlockOutput, Generation, LoopOptions
from toprovar.exporter.planned.restore import take_rows
from toprovar.exporter.schedules import square
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.noise import RESIDUAL_PLANE, normal_noise

TOP_K_EARLY, TOP_K_LATE, LATE_SCALE = 600, 300, 7  # published: 600 below scale 7, 300 from there on


def published_candidates(scale: int) -> int:
    """top_k of a scale."""
    return TOP_K_EARLY if scale < LATE_SCALE else TOP_K_LATE


def guidance_of(
    scales: int, cfg: float = 4.5, top_k: Sequence[int] | None = None, top_p: float = 0.0, smooth: bool = False
) -> Guidance:
    """Guidance and sampling of every scale; the defaults are the published ones.

    cfg:    t that the last scale would have if it grew to the end: it grows from 0, and the last scale keeps that of
            the one before, as the reference does. 0 needs no unconditional rows
    top_k:  candidates per scale; 0 keeps all; the last number goes on
    top_p:  0 keeps all
    smooth: feeds on means of codes instead of single codes
    """
    return Guidance.growing(
        (cfg,),
        scales,
        "stale",
        top_p=top_p,
        top_k=tuple(top_k[min(s, len(top_k) - 1)] if top_k else published_candidates(s) for s in range(scales)),
        smooth=smooth,
    )


class Noise(DrawingNoise, Protocol):
    """Everything random of a run, for B images."""

    def residual_start(self, tokens: int, channels: int) -> Tensor:
        """[B*tokens, channels] standard normal."""

    def residual_steps(self, tokens: int, channels: int, rows: int) -> Tensor:
        """[steps, rows*tokens, channels] standard normal; rows are B, or 2B under guidance."""


class SeededNoise(IndexNoise):
    """Noise from counters, for the residual head too: planes RESIDUAL_PLANE onwards."""

    def _normal(self, plane: int, tokens: int, channels: int) -> Tensor:
        """[B*tokens, channels]."""
        return torch.from_numpy(np.concatenate([normal_noise(seed, plane, tokens, channels) for seed in self.seeds]))

    def residual_start(self, tokens: int, channels: int) -> Tensor:
        return self._normal(RESIDUAL_PLANE, tokens, channels)

    def residual_steps(self, tokens: int, channels: int, rows: int) -> Tensor:
        # the unconditional half never reaches the picture: it takes the same numbers
        steps = torch.stack([self._normal(RESIDUAL_PLANE + 1 + step, tokens, channels) for step in range(STEPS)])
        return steps.repeat(1, rows // len(self.seeds), 1)


@torch.inference_mode()
def generate(
    model: Hart,
    quantizer: Quantizer,
    prompt: Prompt,
    sides: Sequence[int],
    guidance: Guidance,
    noise: Noise | None = None,
    forced_indices: Sequence[Tensor] | None = None,
    forced_maps: Mapping[int, Tensor] | None = None,
    options: LoopOptions = LoopOptions(),
    residual: bool = True,
) -> Generation:
    """Draws the codes of a batch of prompts.

    prompt:         2B rows with the unconditional ones, else B
    sides:          of the square token maps; the first is 1
    noise:          may be None where indices are forced and neither smoothing nor the residual head runs
    forced_indices: indices to use instead of drawn ones, per scale [B, n*n]
    forced_maps:    {scale: [B, d, n, n]} inputs of scales to use instead of the resized codes
    residual:       adds the residual head's map to the last one
    Raises:         ToprovarError if the sides or the noise do not fit.
    """
    if len(sides) < 2 or sides[0] != 1:
        raise ToprovarError(
            f"HART draws its first map from one text token and further ones behind it: found sides {list(sides)}; "
            "expected at least two, the first of them 1"
        )
    if guidance.uses_unconditional_row and not prompt.guided:
        raise ToprovarError(
            f"guidance {max(guidance.cfg):g} needs unconditional rows; the prompt has none",
            "make the prompt with guided=True",
        )
    loop = _Loop(model.config, quantizer, square(sides), guidance, noise, forced_indices, forced_maps, options)
    loop.model, loop.residual = model, residual
    return loop.run(prompt)


class _Loop(IndexLoop[Prompt, Noise]):
    model: Hart
    residual: bool

    def is_guided(self, prompt: Prompt) -> bool:
        return prompt.guided

    def empty_cache(self, prompt: Prompt) -> Tensor:
        return prompt.embedded.new_empty(0, prompt.rows, self.config.heads, self.config.head_width)

    def first_input(self, prompt: Prompt) -> Tensor:
        return prompt.embedded + self.model.level(0)

    def next_input(self, group: Images, codes: Tensor, scale: int) -> Tensor:
        return self.model.embed_codes(codes, scale)

    def _angles(self, prompt: Prompt, scale: int, rows: Tensor | None) -> Tensor:
        """[R, L or n, D]. rows: [R, n] positions, None for all."""
        if scale == 0:
            return text_angles(prompt.positions, self.config.head_width)
        side, last = self.schedule[scale][0], self.schedule[-1][0]
        angles = image_angles(side, last, prompt.last_position, self.config.head_width)
        return angles if rows is None else take_rows(angles, rows)

    def block(
        self, group: Images, layer: int, scale: int, x: Tensor, kept: Tensor | None, want_entropy: bool
    ) -> BlockOutput:
        prompt, block = group.prompt, self.model.blocks[layer]
        assert isinstance(prompt, Prompt)
        angles = self._angles(prompt, scale, None if kept is None else group.rows(kept))
        out = block.self_attention(x, prompt.modulation, angles, group.k[layer], group.v[layer], want_entropy)
        out.x = x + out.x
        out.x = out.x + block.feed_forward(out.x, prompt.modulation)
        return out

    def part(
        self, group: Images, layer: int, scale: int, part: str, x: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        prompt, block = group.prompt, self.model.blocks[layer]
        assert isinstance(prompt, Prompt)
        if part == "attention":
            angles = self._angles(prompt, scale, kept)
            out = block.self_attention(x, prompt.modulation, angles, group.k[layer], group.v[layer])
            return out.x, out.k, out.v
        return block.feed_forward(x, prompt.modulation), None, None

    def raw_logits(self, group: Images, scale: int, x: Tensor, rows: int) -> Tensor:
        assert isinstance(group.prompt, Prompt)
        return self.model.logits(x, group.prompt, rows)

    def draw(
        self, group: Images, scale: int, x: Tensor, logits: Tensor, places: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        indices, tokens = super().draw(group, scale, x, logits, places, kept)
        if scale == len(self.schedule) - 1 and self.residual:
            tokens = tokens + self._residual(group, scale, x, indices[..., 0], places, kept)
        return indices, tokens

    def _residual(
        self, group: Images, scale: int, x: Tensor, indices: Tensor, places: Tensor, kept: Tensor | None
    ) -> Tensor:
        """What the residual head adds to the drawn codes, [B, n, d]."""
        if self.noise is None:
            raise ToprovarError("this run draws something and was given no noise", "pass noise, or force the indices")
        N, d, images = self.tokens[scale], self.quantizer.channels, len(self.out.counts)
        halves = 2 if group.guided else 1
        rows = torch.cat([places + half * images for half in range(halves)])
        start = self.noise.residual_start(N, d).to(x.device).unflatten(0, (-1, N))[places]  # [B, N, d]
        steps = self.noise.residual_steps(N, d, halves * images).to(x.device).unflatten(1, (-1, N))[:, rows]
        if kept is not None:
            start, steps = take_rows(start, kept), torch.stack([take_rows(step, group.rows(kept)) for step in steps])
        embeddings = self.quantizer.embedding.weight[indices].repeat(halves, 1, 1)
        z = self.model.residual_condition(x, embeddings).flatten(0, 1)  # [R*n, C]
        t = self.guidance.cfg[scale] - 1 if group.guided else None
        residual = self.model.diffloss(z, t, start.flatten(0, 1), steps.flatten(1, 2))
        self.watch("diff/z", scale, z)
        self.watch("diff/out", scale, residual)
        return residual[: len(residual) // halves].unflatten(0, (group.count, -1))

    def contribution(self, code: Tensor, scale: int) -> Tensor:
        """The last map is taken as it is."""
        return code if scale == len(self.schedule) - 1 else super().contribution(code, scale)
