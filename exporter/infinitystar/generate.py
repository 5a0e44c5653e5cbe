"""InfinityStar's generation loop in PyTorch: what its passes, blocks and bits are; plans are run by planned/loop.py.

A scale of plans and bundles is a pass here: one run over one map, its frames on top of one another. The accumulated
codes are those of all frames, of which a pass reads and writes its own clip's.
Source: FoundationVision/InfinityStar, infinity/models/infinity.py, ar_infer_infinity_elegant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toprovar.exporter.infinitystar.codes import contribution, map_of
from toprovar.exporter.infinitystar.guidance import guided
from toprovar.exporter.infinitystar.rope import map_angles
from toprovar.exporter.infinitystar.schedule import VideoSchedule
from toprovar.exporter.infinitystar.transformer import InfinityStar, KeysValues, Prompt
from toprovar.exporter.planned.images import Images
from toprovar.exporter.planned.loop import BlockOutput, Generation, LoopOptions, PlannedLoop
from toprovar.exporter.planned.restore import take_rows
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.noise import uniform_noise

Noise = Callable[[int, int], Tensor]


class BitNoise:
    """Uniform noise from counters: a value depends on seed, pass, position and bit alone.

    bits: made per token; a pass with fewer takes the first ones
    """

    def __init__(self, seeds: Sequence[int], bits: int) -> None:
        self.seeds, self.bits = list(seeds), bits

    def __call__(self, step: int, tokens: int) -> Tensor:
        """[B, tokens, bits] in [0, 1)."""
        return torch.from_numpy(np.stack([uniform_noise(seed, step, tokens, self.bits) for seed in self.seeds]))


@torch.inference_mode()
def generate(
    model: InfinityStar,
    prompt: Prompt,
    schedule: VideoSchedule,
    guidance: Guidance,
    noise: Noise | None = None,
    given_bits: Sequence[Tensor] = (),
    options: LoopOptions | None = None,
) -> Generation:
    """Draws the latents of a batch of prompts: `codes` [B, d, F*H, W].

    prompt:     2B rows with unconditional ones where any cfg differs from 1, else B
    guidance:   one value per pass
    noise:      (pass, tokens) -> [B, L, bits] uniform in [0, 1); may be None where all bits are given
    given_bits: of the first passes, each [B, t*h*w, n]: teacher forcing, or an image or video to go on from. Such a
                pass runs the transformer only where its keys are seen later, or where an observer looks on
    options:    of the loop; a scale is a pass
    Raises:     ToprovarError if guidance, bits or noise do not fit.
    """
    if len(guidance.cfg) != len(schedule.passes()):
        raise ToprovarError(
            f"guidance is for {len(guidance.cfg)} passes; the schedule has {len(schedule.passes())}",
            "make it with VideoSchedule.per_pass",
        )
    if guidance.uses_unconditional_row and prompt.rows % 2:
        raise ToprovarError(
            "this guidance needs unconditional rows; the prompt has none", "make the prompt with guided=True"
        )
    return _Loop(model, schedule, guidance, noise, given_bits, options or LoopOptions()).run(prompt)


class _Loop(PlannedLoop[Prompt]):
    not_drawn = 255
    drawn_dtype = torch.uint8

    def __init__(
        self,
        model: InfinityStar,
        video: VideoSchedule,
        guidance: Guidance,
        noise: Noise | None,
        given_bits: Sequence[Tensor],
        options: LoopOptions,
    ) -> None:
        self.model, self.video, self.noise, self.given_bits = model, video, noise, given_bits
        self.passes, self.columns = video.passes(), model.config.detail_bits
        super().__init__(model.config, video.flat, guidance, options)
        self.full = (video.frames * video.last[0], video.last[1])

    @property
    def code_channels(self) -> int:
        return self.model.config.detail_bits

    def first_input(self, prompt: Prompt) -> Tensor:
        count = prompt.rows // 2 if self.guidance.uses_unconditional_row else prompt.rows
        zeros = prompt.embedded.new_zeros(count, self.code_channels, *self.passes[0].flat)
        return self.model.embed_codes(zeros).repeat(prompt.rows // count, 1, 1)

    def empty_cache(self, prompt: Prompt) -> Tensor:
        return prompt.context[0][0][:0]

    def resized(self, codes: Tensor, scale: int) -> Tensor:
        return map_of(codes, self.passes[scale], self.video)

    def next_input(self, group: Images, codes: Tensor, scale: int) -> Tensor:
        return self.model.embed_codes(codes)

    def _step(self, group: Images, scale: int) -> None:
        """Given bits need no transformer, unless somebody looks at its keys or values."""
        step = self.passes[scale]
        if scale >= len(self.given_bits) or step.keeps or self.options.observe or self.options.entropy_layers:
            super()._step(group, scale)
            for layer, count in enumerate(self.out.counts[group.places[0]][-1]):
                if step.keeps and not count:  # a skipped layer leaves nothing, nor what the clip before left
                    group.k[layer], group.v[layer] = group.k[layer][:0], group.v[layer][:0]
            return
        places = torch.tensor(group.places)
        self.entropy, self.gap = {}, None
        for place in group.places:
            self.out.counts[place].append((0,) * self.config.depth)
        bits, values = self._valued(self._given(scale)[places], scale)
        self.drawn[places] = bits
        group.codes = group.codes + self.contribution(self.code_map(values, scale), scale)
        self.out.codes = self.out.codes.index_copy(0, places, group.codes)
        self.moved = None
        self._prepare_next(group, scale)

    def _angles(self, scale: int, rows: Tensor | None) -> Tensor:
        """At the tokens' original positions: [L, D/2], or [R, n, D/2]. rows: [R, n]."""
        angles = torch.from_numpy(map_angles(self.passes[scale], self.video.last, self.config.head_width))
        return angles if rows is None else angles[rows]

    def _past(self, group: Images, layer: int, tokens: int) -> tuple[list[KeysValues], Tensor | None]:
        """Keys and values seen besides the own ones, and which of all keys may be seen."""
        prompt = group.prompt
        assert isinstance(prompt, Prompt)
        context = group.k[layer], group.v[layer]
        visible = None
        if not prompt.visible.all():
            before, own = (prompt.visible.new_ones(prompt.rows, count) for count in (len(context[0]), tokens))
            visible = torch.cat([before, prompt.visible, own], dim=1)
        return [context, prompt.context[layer]], visible

    def _kept(self, group: Images, layer: int, scale: int, k: Tensor, v: Tensor) -> KeysValues:
        """What is appended to the cache: nothing, or at the end of a clip all of it, instead of the clip before."""
        if not self.passes[scale].keeps:
            return k[:0], v[:0]
        group.k[layer], group.v[layer] = k[:0], v[:0]
        return k, v

    def block(
        self, group: Images, layer: int, scale: int, x: Tensor, kept: Tensor | None, want_entropy: bool
    ) -> BlockOutput:
        angles = self._angles(scale, None if kept is None else group.rows(kept))
        past, visible = self._past(group, layer, x.shape[1])
        out = self.model.layers[layer](x, angles, past, visible, want_entropy)
        out.k, out.v = self._kept(group, layer, scale, out.k, out.v)
        return out

    def part(
        self, group: Images, layer: int, scale: int, part: str, x: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        block = self.model.layers[layer]
        if part == "ffn":
            return block.feed_forward(x), None, None
        past, visible = self._past(group, layer, x.shape[1])
        change, k, v, _ = block.attention(x, self._angles(scale, kept), past, visible)
        return change, *self._kept(group, layer, scale, k, v)

    def raw_logits(self, group: Images, scale: int, x: Tensor, rows: int) -> Tensor:
        return self.model.logits(x[:rows], self.passes[scale].is_semantic)

    def mixed(self, logits: Tensor, cfg: float) -> Tensor:
        projection = self.guidance.projection
        return super().mixed(logits, cfg) if projection is None else guided(logits, cfg, projection)

    def _given(self, scale: int) -> Tensor:
        given, step = self.given_bits[scale], self.passes[scale]
        expected = [len(self.out.counts), step.tokens, self.model.config.bits(step.is_semantic)]
        if list(given.shape) != expected:
            raise ToprovarError(f"bits of pass {scale} have shape {list(given.shape)}; expected {expected}")
        return given

    def _valued(self, bits: Tensor, scale: int) -> tuple[Tensor, Tensor]:
        """Bits padded to `columns`, and the codes they stand for [B, n, bits]."""
        count = bits.shape[-1]
        padded = bits.new_full((*bits.shape[:2], self.columns), self.not_drawn, dtype=torch.uint8)
        padded[..., :count] = bits
        return padded, (bits.float() * 2 - 1) * count**-0.5

    def draw(
        self, group: Images, scale: int, x: Tensor, logits: Tensor, places: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if scale < len(self.given_bits):
            bits = self._given(scale)[places]
            return self._valued(bits if kept is None else take_rows(bits, kept), scale)
        if self.noise is None:
            raise ToprovarError(
                "this run draws bits and was given no noise", "pass noise, or give the bits of all passes"
            )
        noise = self.noise(scale, self.tokens[scale])[places]
        zero, one = logits.unflatten(-1, (-1, 2)).unbind(-1)
        noise = (noise if kept is None else take_rows(noise, kept))[..., : zero.shape[-1]]
        return self._valued((noise < torch.sigmoid(one - zero)).to(torch.uint8), scale)

    def previous_values(self, code: Tensor, scale: int) -> Tensor:
        """Codes of the pass before count where it has as many bits."""
        bits = self.model.config.bits(self.passes[scale].is_semantic)
        if self.passes[scale - 1].is_semantic != self.passes[scale].is_semantic:
            return code.new_zeros(len(code), self.tokens[scale], bits)
        return F.interpolate(code, size=self.schedule[scale], mode="nearest").flatten(2).transpose(1, 2)

    def code_map(self, values: Tensor, scale: int) -> Tensor:
        return values.transpose(1, 2).unflatten(-1, self.schedule[scale])

    def contribution(self, code: Tensor, scale: int) -> Tensor:
        return contribution(code, self.passes[scale], self.code_channels, self.video)
