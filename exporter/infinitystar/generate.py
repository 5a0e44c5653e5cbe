"""InfinityStar's generation loop in PyTorch: text pass, then every pass over every map of every clip.

Source: FoundationVision/InfinityStar, infinity/models/infinity.py, ar_infer_infinity_elegant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from toprovar.exporter.infinitystar.codes import contribution, resized_down
from toprovar.exporter.infinitystar.guidance import StarGuidance
from toprovar.exporter.infinitystar.rope import map_angles
from toprovar.exporter.infinitystar.schedule import Pass, VideoSchedule
from toprovar.exporter.infinitystar.transformer import Context, InfinityStar, Prompt
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.noise import uniform_noise

Observer = Callable[[str, int, Tensor], None]


class BitNoise:
    """Uniform noise from counters: a value depends on seed, pass, position and bit alone."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = list(seeds)

    def __call__(self, step: int, tokens: int, bits: int) -> Tensor:
        """[B, tokens, bits] in [0, 1)."""
        return torch.from_numpy(np.stack([uniform_noise(seed, step, tokens, bits) for seed in self.seeds]))


@dataclass
class Generation:
    """latent: [B, d, F, H, W], what the tokenizer's decoder takes; bits: per pass [B, t*h*w, n] uint8.

    ran: passes that ran the transformer; given bits need it only where later passes look at their keys
    """

    latent: Tensor
    bits: list[Tensor] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)


@torch.inference_mode()
def generate(
    model: InfinityStar,
    prompt: Prompt,
    schedule: VideoSchedule,
    guidance: StarGuidance,
    noise: BitNoise | None = None,
    given_bits: Sequence[Tensor] = (),
    passes: int | None = None,
    observe: Observer | None = None,
) -> Generation:
    """Draws the latents of a batch of prompts.

    prompt:     2B rows with unconditional ones, else B
    noise:      may be None where all bits are given
    given_bits: of the first passes, each [B, t*h*w, n]: teacher forcing, or an image or video to go on from
    passes:     stops early
    observe:    called with (name, pass, tensor) for intermediate values, names as in the parity files; given passes
                then run too
    Raises:     ToprovarError if guidance, bits or noise do not fit.
    """
    if len(guidance.scale) != len(schedule.entries):
        raise ToprovarError(f"guidance is for {len(guidance.scale)} maps; the schedule has {len(schedule.entries)}")
    if guidance.uses_unconditional_row and not prompt.guided:
        raise ToprovarError(
            "this guidance needs unconditional rows; the prompt has none", "make the prompt with guided=True"
        )
    config, B = model.config, prompt.images
    latents: list[Tensor] = []
    kept: Context | None = None
    out = Generation(torch.empty(0))
    for step in schedule.passes()[:passes]:
        if step.opens:
            latents.append(model.word_embed.weight.new_zeros(B, config.detail_bits, step.frames, *schedule.last))
        given = given_bits[step.index] if step.index < len(given_bits) else None
        logits = None
        if given is None or observe is not None or step.keeps:
            # a clip starts from nothing; its zeros resize to zeros
            x = model.embed_codes(resized_down(latents[-1], step.size)).repeat(len(prompt.rows) // B, 1, 1)
            logits, own = _forward(model, prompt, schedule, step, x, kept, observe)
            out.ran.append(step.index)
            if step.keeps:
                kept = own
            logits = _guided(logits, guidance, step, prompt, observe)
        bits = given if given is not None else _drawn(logits, noise, step, config.bits(step.is_semantic))
        if tuple(bits.shape) != (B, step.tokens, config.bits(step.is_semantic)):
            raise ToprovarError(
                f"bits of pass {step.index} have shape {list(bits.shape)}; expected "
                f"{[B, step.tokens, config.bits(step.is_semantic)]}"
            )
        out.bits.append(bits.to(torch.uint8))
        latents[-1] = latents[-1] + contribution(bits, step, config.detail_bits, schedule.last)
    out.latent = torch.cat(latents, dim=2)
    return out


def _forward(
    model: InfinityStar,
    prompt: Prompt,
    schedule: VideoSchedule,
    step: Pass,
    x: Tensor,
    kept: Context | None,
    observe: Observer | None,
) -> tuple[Tensor, Context]:
    """Head outputs of all rows [R, L, 2*bits], and the pass's own keys and values per layer."""
    see = observe or (lambda name, index, tensor: None)
    see("in", step.index, x)
    angles = torch.from_numpy(map_angles(step, schedule.last, model.config.head_width)).to(x.device)
    see("rope", step.index, torch.stack([angles.cos(), angles.sin()]))
    before = kept if step.context is not None else None
    visible = None
    if prompt.visible is not None:
        context = before[0][0].shape[0] if before else 0
        others = prompt.visible.new_ones(len(x), context), prompt.visible.new_ones(len(x), step.tokens)
        visible = torch.cat([others[0], prompt.visible, others[1]], dim=1)
    own: Context = []
    for layer, block in enumerate(model.layers):
        past = [prompt.context[layer]] if before is None else [before[layer], prompt.context[layer]]
        x, k, v = block(x, angles, past, visible)
        own.append((k, v))
        see(f"block{layer}", step.index, x)
    raw = model.logits(x, step.is_semantic)
    see("raw", step.index, raw)
    return raw, own


def _guided(raw: Tensor, guidance: StarGuidance, step: Pass, prompt: Prompt, observe: Observer | None) -> Tensor:
    """Temperature, then guidance. Returns: [B, L, 2*bits]."""
    logits = raw * (1 / guidance.tau[step.entry])
    logits = guidance.mixed(logits, step.entry) if prompt.guided else logits
    if observe:
        observe("logits", step.index, logits)
        observe("prob", step.index, logits.unflatten(-1, (-1, 2)).softmax(dim=-1).flatten(0, 2))
    return logits


def _drawn(logits: Tensor | None, noise: BitNoise | None, step: Pass, bits: int) -> Tensor:
    """One where the noise is below its probability. Returns: [B, L, bits] uint8."""
    if noise is None:
        raise ToprovarError("this run draws bits and was given no noise", "pass noise, or give the bits of all passes")
    assert logits is not None
    zero, one = logits.unflatten(-1, (-1, 2)).unbind(-1)
    uniform = noise(step.index, step.tokens, bits).to(logits.device)
    return (uniform < torch.sigmoid(one - zero)).to(torch.uint8)
