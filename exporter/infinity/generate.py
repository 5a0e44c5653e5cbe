"""Infinity's generation loop in PyTorch: what its maps, blocks and bits are; plans are run by planned/loop.py.

Source: Infinity (arXiv 2412.04431), FoundationVision/Infinity, autoregressive_infer_cfg.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toprovar.exporter.infinity.rope import rope_table
from toprovar.exporter.infinity.tokenizer import BitTokenizer, resize_bilinear, tokens_from_latent
from toprovar.exporter.infinity.transformer import Infinity, Prompt
from toprovar.exporter.planned.images import Images
from toprovar.exporter.planned.loop import BlockOutput, Generation, LoopOptions, Observer, PlannedLoop
from toprovar.exporter.planned.restore import take_rows
from toprovar.exporter.planned.scores import Rank, lowest_scores
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.plan import SUBLAYERS, Plan

Noise = Callable[[int, int], Tensor]


def draw_bits(logits: Tensor, noise: Tensor, limit: float) -> Tensor:
    """Samples bits in closed form. logits: [B, L, 2*bits] adjacent pairs; noise: [B, L, bits] in [0, 1) -> uint8."""
    zero, one = logits.unflatten(-1, (-1, 2)).unbind(-1)
    odds = one - zero
    chance = torch.where(odds >= limit, 1.0, torch.where(odds <= -limit, 0.0, odds.sigmoid()))
    return (noise < chance).to(torch.uint8)


def generate(
    model: Infinity,
    prompt: Prompt,
    schedule: Schedule,
    guidance: Guidance,
    noise: Noise | None = None,
    plan: Plan | None = None,
    forced_bits: Sequence[Tensor] | None = None,
    entropy_layers: Sequence[int] = (),
    observe: Observer | None = None,
    on_scale: Callable[[int, Tensor], None] | None = None,
    gate_whole_layers: bool = False,
    rank: Rank = lowest_scores,
    tokenizer: BitTokenizer | None = None,
) -> Generation:
    """Draws the codes of a batch of prompts.

    prompt:            R rows; R = 2B (conditional, then unconditional) where any cfg differs from 1, else B
    noise:             (scale, tokens) -> [B, L, bits] uniform in [0, 1); unused where bits are forced
    forced_bits:       bits to use instead of drawn ones, per scale [B, L, bits]; fewer scales than the schedule stop
                       early
    entropy_layers:    layers whose attention entropy is recorded at every scale they run whole
    observe:           called with (name, scale, tensor) for intermediate values, names as in the parity files
    on_scale:          called with (scale, accumulated codes) after every scale
    gate_whole_layers: also sends layers that keep every token through gather and scatter (a test of that path)
    rank:              (score [N] of the plan's source, count) -> [count] int64 positions that run, ascending; graphs
                       know only `lowest_scores`, another rule is for evaluation
    tokenizer:         decodes the small pictures that a skipvar decision looks at
    Raises:            ToprovarError if the plan asks for what this run cannot give.
    """

    def small(codes: Tensor, size: tuple[int, int]) -> np.ndarray:
        assert tokenizer is not None
        return small_picture(tokenizer, codes, size, model.config.patch)

    options = LoopOptions(
        plan=plan,
        scales=None if forced_bits is None else len(forced_bits),
        entropy_layers=entropy_layers,
        observe=observe,
        on_scale=on_scale,
        gate_whole_layers=gate_whole_layers,
        rank=rank,
        small_picture=small if tokenizer is not None else None,
    )
    return run_loop(model, prompt, schedule, guidance, noise, forced_bits, options)


@torch.inference_mode()
def run_loop(
    model: Infinity,
    prompt: Prompt,
    schedule: Schedule,
    guidance: Guidance,
    noise: Noise | None = None,
    forced_bits: Sequence[Tensor] | None = None,
    options: LoopOptions = LoopOptions(),
) -> Generation:
    """`generate` with its options in one piece."""
    return _Loop(model, schedule, guidance, noise, forced_bits, options).run(prompt)


class _Loop(PlannedLoop[Prompt]):
    not_drawn = 255
    sublayers = SUBLAYERS
    drawn_dtype = torch.uint8

    def __init__(
        self,
        model: Infinity,
        schedule: Schedule,
        guidance: Guidance,
        noise: Noise | None,
        forced_bits: Sequence[Tensor] | None,
        options: LoopOptions,
    ) -> None:
        self.model, self.noise, self.forced_bits = model, noise, forced_bits
        self.columns, self.patch = model.config.bits, model.config.patch
        super().__init__(model.config, schedule, guidance, options)
        self.table = torch.from_numpy(rope_table(self.config.head_width, schedule)).to(model.pos_start.device)

    @property
    def code_channels(self) -> int:
        return self.model.config.code_channels

    def first_input(self, prompt: Prompt) -> Tensor:
        return self.model.first_input(prompt)

    def empty_cache(self, prompt: Prompt) -> Tensor:
        return torch.empty(0, prompt.rows, self.config.heads, self.config.head_width, device=prompt.pooled.device)

    def _map(self, scale: int) -> tuple[int, int]:
        """A scale's map on the tokenizer's grid."""
        height, width = self.schedule[scale]
        return height * self.patch, width * self.patch

    def resized(self, codes: Tensor, scale: int) -> Tensor:
        size = self._map(scale)
        return codes if size == self.full else resize_bilinear(codes, size)

    def next_input(self, group: Images, codes: Tensor, scale: int) -> Tensor:
        tokens = tokens_from_latent(codes, self.patch)
        self.watch("codes_in", scale, tokens)
        return self.model.embed_codes(tokens, scale)

    def _rope(self, scale: int, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines at the tokens' original positions: [L, D/2], or [R, 1, n, D/2]. rows: [R, n]."""
        start = sum(self.tokens[:scale])
        cos, sin = self.table[:, start : start + self.tokens[scale]]  # each [L, D/2]
        return (cos, sin) if rows is None else (cos[rows][:, None], sin[rows][:, None])

    def block(
        self, group: Images, layer: int, scale: int, x: Tensor, kept: Tensor | None, want_entropy: bool
    ) -> BlockOutput:
        prompt = group.prompt
        assert isinstance(prompt, Prompt)
        cos, sin = self._rope(scale, None if kept is None else group.rows(kept))
        return self.model.layers[layer](
            x, prompt, prompt.cross[layer], cos, sin, group.k[layer], group.v[layer], want_entropy
        )

    def part(
        self, group: Images, layer: int, scale: int, part: str, x: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        prompt, block = group.prompt, self.model.layers[layer]
        assert isinstance(prompt, Prompt)
        if part == "attention":
            cos, sin = self._rope(scale, kept)
            change, k, v, _ = block.self_attention(x, prompt, cos, sin, group.k[layer], group.v[layer])
            return change, k, v
        if part == "cross":
            return block.cross_attention(x, prompt, prompt.cross[layer]), None, None
        return block.feed_forward(x, prompt), None, None

    def raw_logits(self, group: Images, scale: int, x: Tensor, rows: int) -> Tensor:
        assert isinstance(group.prompt, Prompt)
        return self.model.logits(x, group.prompt, rows)

    def draw(
        self, group: Images, scale: int, x: Tensor, logits: Tensor, places: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.forced_bits is not None:
            bits = self.forced_bits[scale][places]
            bits = bits if kept is None else take_rows(bits, kept)
        else:
            assert self.noise is not None
            noise = self.noise(scale, self.tokens[scale])[places]
            bits = draw_bits(logits, noise if kept is None else take_rows(noise, kept), self.guidance.bit_limit)
        return bits, (bits.float() * 2 - 1) * self.code_channels**-0.5

    def previous_values(self, code: Tensor, scale: int) -> Tensor:
        return previous_values(code, self.schedule[scale], self.patch)

    def code_map(self, values: Tensor, scale: int) -> Tensor:
        grid = values.transpose(1, 2).unflatten(-1, self.schedule[scale])  # [B, bits, h, w]
        return F.pixel_shuffle(grid, 2) if self.model.config.patchify else grid

    def contribution(self, code: Tensor, scale: int) -> Tensor:
        return code if code.shape[-2:] == self.full else resize_bilinear(code, self.full)


def previous_values(code: Tensor, size: tuple[int, int], patch: int) -> Tensor:
    """The codes of the scale before at this scale's tokens, nearest neighbour.

    code: [B, d, h'*patch, w'*patch] -> [B, N, bits].
    """
    height, width = size
    return tokens_from_latent(F.interpolate(code, size=(height * patch, width * patch), mode="nearest"), patch)


def small_picture(tokenizer: BitTokenizer, codes: Tensor, size: tuple[int, int], patch: int) -> np.ndarray:
    """Accumulated codes as a picture at a small map. codes: [1, d, H, W]; size in tokens. Returns: [3, h, w]."""
    return tokenizer.decode(resize_bilinear(codes, (size[0] * patch, size[1] * patch)))[0].cpu().numpy()
