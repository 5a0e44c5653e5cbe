"""The generation loop in PyTorch, dense or by a plan: reference for the exported graphs and ground for calibration.

Source: Infinity (arXiv 2412.04431), FoundationVision/Infinity, autoregressive_infer_cfg; planned execution is ours
(docs/calibration.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toprovar.exporter.infinity.rope import rope_table
from toprovar.exporter.infinity.tokenizer import latent_from_bits, resize_bilinear, tokens_from_latent, unpatch_bits
from toprovar.exporter.infinity.transformer import Infinity, Prompt
from toprovar.exporter.schedules import Schedule, token_counts
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.plan import Plan

Noise = Callable[[int, int], Tensor]
Observer = Callable[[str, int, Tensor], None]
Rank = Callable[[Tensor, int], Tensor]


@dataclass
class Generation:
    """What a run left behind.

    codes:   [B, d, H, W] accumulated codes on the tokenizer's grid
    bits:    per scale that ran, [B, L, bits] uint8
    entropy: {(scale, layer): [R, L] nats} where asked for
    kept:    {(scale, layer): [n] int64} positions that ran in a pruned layer
    """

    codes: Tensor
    bits: list[Tensor] = field(default_factory=list)
    entropy: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)


def lowest_scores(score: Tensor, count: int) -> Tensor:
    """Token gate in PyTorch: ties to the smaller index, result ascending. score: [N] -> [count] int64."""
    return torch.argsort(score, stable=True)[:count].sort().values


def draw_bits(logits: Tensor, noise: Tensor, limit: float) -> Tensor:
    """Samples bits in closed form. logits: [B, L, 2*bits] adjacent pairs; noise: [B, L, bits] in [0, 1) -> uint8."""
    zero, one = logits.unflatten(-1, (-1, 2)).unbind(-1)
    odds = one - zero
    chance = torch.where(odds >= limit, 1.0, torch.where(odds <= -limit, 0.0, odds.sigmoid()))
    return (noise < chance).to(torch.uint8)


def _mix(x: Tensor, cfg: float) -> Tensor:
    conditional, unconditional = x.chunk(2)
    return cfg * conditional + (1 - cfg) * unconditional


class _Cache:
    """Keys and values per layer, time-major, grown by scale."""

    def __init__(self, model: Infinity, rows: int) -> None:
        config = model.config
        empty = torch.empty(0, rows, config.heads, config.head_width, device=model.pos_start.device)
        self.k = [empty] * config.depth
        self.v = [empty] * config.depth

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.k[layer] = torch.cat([self.k[layer], k])
        self.v[layer] = torch.cat([self.v[layer], v])


@torch.inference_mode()
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
    """
    watch = observe or (lambda name, scale, tensor: None)
    config = model.config
    device = model.pos_start.device
    guided = guidance.uses_unconditional_row
    B = prompt.rows // 2 if guided else prompt.rows
    mixed_layers = guidance.mixed_layers(config.depth)
    table = torch.from_numpy(rope_table(config.head_width, schedule)).to(device)
    counts = token_counts(schedule)
    patch = config.patch
    full = (schedule[-1][0] * patch, schedule[-1][1] * patch)
    codes = torch.zeros(B, config.code_channels, *full, device=device)
    run = Generation(codes)
    cache = _Cache(model, prompt.rows)
    residuals: dict[int, Tensor] = {}
    scales = len(forced_bits) if forced_bits is not None else len(schedule)
    x = model.first_input(prompt)
    for scale in range(scales):
        if plan is not None and scale in plan.skip_scales:
            break
        height, width = schedule[scale]
        L = counts[scale]
        cfg = guidance.cfg[scale] if guided else 1.0
        watch("in", scale, x)
        start = sum(counts[:scale])
        cos, sin = table[:, start : start + L]
        keep = plan.counts(scale) if plan else (L,) * config.depth
        sources = plan.score.source_layer.get(scale, {}) if plan else {}
        wanted = {*entropy_layers, *sources.values()}
        restored = set(plan.restored_layers(scale)) if plan else set()
        left_behind = plan.residual_layers(scale) if plan else []
        for layer, block in enumerate(model.layers):
            before = x
            gated = layer in sources and (keep[layer] < L or gate_whole_layers)
            if layer in restored:
                x = _restored(x, plan, residuals.get(layer), (height, width), schedule)
            if keep[layer] == 0:
                pass
            elif gated:
                score = run.entropy[scale, sources[layer]][0]
                kept = rank(score, keep[layer])
                run.kept[scale, layer] = kept
                out = block(
                    before[:, kept], prompt, prompt.cross[layer], cos[kept], sin[kept], cache.k[layer], cache.v[layer]
                )
                cache.append(layer, out.k, out.v)
                x = x.index_copy(1, kept, out.x)
            else:
                out = block(x, prompt, prompt.cross[layer], cos, sin, cache.k[layer], cache.v[layer], layer in wanted)
                cache.append(layer, out.k, out.v)
                if out.entropy_nats is not None:
                    run.entropy[scale, layer] = out.entropy_nats
                x = out.x
            if layer in left_behind:
                residuals[layer] = x - before
            watch(f"block{layer}", scale, x)
            watch(f"k{layer}", scale, cache.k[layer])
            watch(f"v{layer}", scale, cache.v[layer])
            if guided and cfg != 1 and layer in mixed_layers:
                x = _mix(x, cfg).repeat(2, 1, 1)
        watch("blockN", scale, x)
        if guided and guidance.mixes_logits:
            raw = model.logits(x, prompt)
            watch("raw", scale, raw)
            logits = raw / guidance.tau[scale]
            logits = _mix(logits, cfg) if cfg != 1 else logits[:B]
        else:
            raw = model.logits(x[:B], prompt, B)
            watch("raw", scale, raw)
            logits = raw / guidance.tau[scale]
        watch("logits", scale, logits)
        if forced_bits is not None:
            bits = forced_bits[scale]
        else:
            assert noise is not None
            bits = draw_bits(logits, noise(scale, L), guidance.bit_limit)
        run.bits.append(bits)
        grid = bits.view(B, height, width, config.bits)
        code = latent_from_bits(unpatch_bits(grid) if config.patchify else grid)
        codes = codes + (code if code.shape[-2:] == codes.shape[-2:] else resize_bilinear(code, full))
        run.codes = codes
        if on_scale:
            on_scale(scale, codes)
        if scale + 1 < len(schedule):
            size = (schedule[scale + 1][0] * patch, schedule[scale + 1][1] * patch)
            following = codes if size == full else resize_bilinear(codes, size)
            watch("next", scale + 1, following)
            tokens = tokens_from_latent(following, patch)
            watch("codes_in", scale + 1, tokens)
            x = model.embed_codes(tokens, scale + 1).repeat(2 if guided else 1, 1, 1)
    return run


def _restored(
    x: Tensor, plan: Plan | None, residual: Tensor | None, size: tuple[int, int], schedule: Schedule
) -> Tensor:
    """What a layer leaves at pruned positions: x itself, or x plus the reference scale's block residual, resampled."""
    if plan is None or plan.restore.kind == "identity":
        return x
    assert residual is not None
    assert plan.restore.ref_scale is not None
    height, width = schedule[plan.restore.ref_scale]
    grid = residual.transpose(1, 2).unflatten(-1, (height, width))  # [R, C, h, w]
    if plan.restore.resample == "area":
        grid = torch.nn.functional.interpolate(grid, size=size, mode="area")
    else:
        grid = resize_bilinear(grid, size)
    return x + grid.flatten(2).transpose(1, 2)
