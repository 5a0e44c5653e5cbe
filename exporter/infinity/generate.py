"""The generation loop in PyTorch, dense or by a plan: reference for the exported graphs and ground for calibration.

Images of a batch choose their own tokens; those that decide differently go on in groups of their own.
Source: Infinity (arXiv 2412.04431), FoundationVision/Infinity, autoregressive_infer_cfg; planned execution is ours
(docs/calibration.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from toprovar.exporter.infinity.images import Images, new_images
from toprovar.exporter.infinity.restore import (
    NOT_DRAWN,
    nearest_kept,
    previous_values,
    put_rows,
    resampled_residual,
    take_rows,
)
from toprovar.exporter.infinity.rope import rope_table
from toprovar.exporter.infinity.scores import (
    Rank,
    code_energy,
    depth_weight,
    lowest_scores,
    rotated_order,
    stratified,
    structure_score,
    variance_score,
)
from toprovar.exporter.infinity.tokenizer import BitTokenizer, resize_bilinear, tokens_from_latent
from toprovar.exporter.infinity.transformer import Block, Infinity, Prompt
from toprovar.exporter.schedules import Schedule, token_counts
from toprovar.runtime.decisions import (
    EnergyMassDecision,
    RhoDecision,
    SatsDecision,
    SkipvarDecision,
    frequency_features,
    low_entropy_ratio,
)
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.plan import SUBLAYERS, Plan

Noise = Callable[[int, int], Tensor]
Observer = Callable[[str, int, Tensor], None]


@dataclass
class Generation:
    """What a run left behind.

    codes:     [B, d, H, W] accumulated codes on the tokenizer's grid
    bits:      per scale that ran, [B, L, bits] uint8; 255 at positions and images that drew none there
    entropy:   {(scale, layer): [R, L] nats} where asked for; of the first image's group
    kept:      {(scale, layer): [n] int64} positions that ran in a pruned layer, of the first image
    counts:    per image, per scale that ran, tokens per layer
    decisions: (image, scale, what, value), in the order they were taken
    """

    codes: Tensor
    bits: list[Tensor] = field(default_factory=list)
    entropy: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    counts: list[list[tuple[int, ...]]] = field(default_factory=list)
    decisions: list[tuple[int, int, str, float | str]] = field(default_factory=list)


def draw_bits(logits: Tensor, noise: Tensor, limit: float) -> Tensor:
    """Samples bits in closed form. logits: [B, L, 2*bits] adjacent pairs; noise: [B, L, bits] in [0, 1) -> uint8."""
    zero, one = logits.unflatten(-1, (-1, 2)).unbind(-1)
    odds = one - zero
    chance = torch.where(odds >= limit, 1.0, torch.where(odds <= -limit, 0.0, odds.sigmoid()))
    return (noise < chance).to(torch.uint8)


def _mix(x: Tensor, cfg: float) -> Tensor:
    conditional, unconditional = x.chunk(2)
    return cfg * conditional + (1 - cfg) * unconditional


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
    loop = _Loop(
        model, schedule, guidance, noise, forced_bits, entropy_layers, observe or _unobserved, gate_whole_layers, rank,
        tokenizer,
    )  # fmt: skip
    return loop.run(prompt, plan, on_scale)


def _unobserved(name: str, scale: int, tensor: Tensor) -> None:
    pass


class _Loop:
    def __init__(
        self,
        model: Infinity,
        schedule: Schedule,
        guidance: Guidance,
        noise: Noise | None,
        forced_bits: Sequence[Tensor] | None,
        entropy_layers: Sequence[int],
        watch: Observer,
        gate_whole_layers: bool,
        rank: Rank,
        tokenizer: BitTokenizer | None,
    ) -> None:
        self.model, self.schedule, self.guidance, self.noise = model, schedule, guidance, noise
        self.forced_bits, self.entropy_layers, self.watch = forced_bits, entropy_layers, watch
        self.gate_whole_layers, self.rank, self.tokenizer = gate_whole_layers, rank, tokenizer
        self.config = model.config
        self.tokens = token_counts(schedule)
        self.table = torch.from_numpy(rope_table(self.config.head_width, schedule)).to(model.pos_start.device)
        patch = self.config.patch
        self.full = (schedule[-1][0] * patch, schedule[-1][1] * patch)

    def run(self, prompt: Prompt, plan: Plan | None, on_scale: Callable[[int, Tensor], None] | None) -> Generation:
        guided = self.guidance.uses_unconditional_row
        whole = new_images(self.model, prompt, guided, plan, (self.config.code_channels, *self.full))
        self.out = Generation(whole.codes, counts=[[] for _ in whole.places])
        groups = [whole]
        for scale in range(len(self.forced_bits) if self.forced_bits is not None else len(self.schedule)):
            groups = [part for group in groups for part in self._before(group, scale)]
            if not groups:
                break
            self.drawn = torch.full(
                (len(self.out.counts), self.tokens[scale], self.config.bits), NOT_DRAWN, dtype=torch.uint8
            ).to(whole.codes.device)
            following = []
            for group in groups:
                self._step(group, scale)
                following += self._after(group, scale)
            groups = following
            self.out.bits.append(self.drawn)
            if on_scale:
                on_scale(scale, self.out.codes)
        return self.out

    # -- decisions -------------------------------------------------------------------------------------------------

    def _before(self, group: Images, scale: int) -> list[Images]:
        """The group by the counts its images take; nothing where the plan ends."""
        plan = group.plan
        if plan is None:
            return [group]
        if scale in plan.skip_scales:
            return []
        guided = group.guided and plan.is_guided(scale)
        decision = plan.decision(EnergyMassDecision)
        if decision is None or scale not in plan.ladder:
            return [group.take(list(range(group.count)), guided, plan)]
        assert group.carried is not None
        choice = [decision.count(energy.cpu().numpy(), plan.ladder[scale]) for energy in group.carried]
        for place, count in zip(group.places, choice, strict=True):
            self.out.decisions.append((place, scale, "tokens", float(count)))
        parts = []
        for count in sorted(set(choice)):
            keep = {**plan.keep, scale: (count,) * plan.backbone.layers}
            picks = [i for i, mine in enumerate(choice) if mine == count]
            parts.append(group.take(picks, guided, plan.model_copy(update={"keep": keep})))
        return parts

    def _after(self, group: Images, scale: int) -> list[Images]:
        """The group by the paths its images enter and by whether guidance goes on."""
        plan = group.plan
        if plan is None or not plan.decisions:
            return [group]
        taken = [(self._path(group, plan, i, scale), group.guided and not ends) for i, ends in self._ends(group, scale)]
        parts = []
        for path, guided in dict.fromkeys(taken):
            picks = [i for i, mine in enumerate(taken) if mine == (path, guided)]
            parts.append(group.take(picks, guided, plan.on_path(path) if path else plan))
        return parts

    def _path(self, group: Images, plan: Plan, image: int, scale: int) -> str | None:
        rho, skipvar = plan.decision(RhoDecision), plan.decision(SkipvarDecision)
        path = None
        if rho and scale in rho.paths:
            maps = torch.stack([self.entropy[layer][image] for layer in rho.layers]).mean(0)
            path = rho.path(scale, low_entropy_ratio(maps.cpu().numpy()))
        elif skipvar and scale == skipvar.scale:
            path = skipvar.path(self._frequencies(group, image, skipvar))
        else:
            return None
        self.out.decisions.append((group.places[image], scale, "path", path or "main"))
        return path

    def _frequencies(self, group: Images, image: int, decision: SkipvarDecision) -> np.ndarray:
        if self.tokenizer is None:
            raise ToprovarError("the plan decides by small pictures; the model has no tokenizer", "pass --tokenizer")
        assert group.before_last is not None
        pictures = [
            small_picture(
                self.tokenizer, codes[image : image + 1], self.schedule[decision.feature_scale], self.config.patch
            )
            for codes in (group.before_last, group.codes)
        ]
        return frequency_features(*pictures)

    def _ends(self, group: Images, scale: int) -> list[tuple[int, bool]]:
        """(image, whether its guidance ends after this scale)."""
        images = range(group.count)
        decision = group.plan.decision(SatsDecision) if group.plan else None
        before, group.gap = group.gap, self.gap
        if decision is None or scale not in decision.scales or before is None or self.gap is None:
            return [(i, False) for i in images]
        ends = [decision.ends_guidance(now, then) for now, then in zip(self.gap, before, strict=True)]
        for i in images:
            self.out.decisions.append((group.places[i], scale, "guidance", "ends" if ends[i] else "goes on"))
        return list(zip(images, ends, strict=True))

    # -- one scale -------------------------------------------------------------------------------------------------

    def _step(self, group: Images, scale: int) -> None:
        model, plan, watch, size = self.model, group.plan, self.watch, self.schedule[scale]
        L, B = self.tokens[scale], group.count
        watch("in", scale, group.x)
        self.entropy: dict[int, Tensor] = {}
        self.gap: list[float] | None = None
        keep = plan.counts(scale) if plan else (L,) * self.config.depth
        for place in group.places:
            self.out.counts[place].append(keep)
        start = sum(self.tokens[:scale])
        self.positions = self.table[:, start : start + L]  # [2, L, D/2]
        self.places: Tensor | None = None  # [B, L] of the order of a change score
        self.moved = group.x.new_zeros(B, L) if plan and self._carries(plan, scale, "change") else None
        gated = set(plan.gated_layers(scale, keep, self.gate_whole_layers)) if plan else set()
        x, kept = group.x, None
        if plan and plan.score.granularity == "scale" and gated:
            kept = self._choose(group, plan, scale, x, keep[0])
            self._record_kept(group, scale, kept)
            x = take_rows(x, group.rows(kept))
            gated = set()
        for layer, block in enumerate(model.layers):
            x = self._layer(group, block, layer, scale, x, keep[layer], layer in gated, kept)
            watch(f"block{layer}", scale, x)
            watch(f"k{layer}", scale, group.k[layer])
            watch(f"v{layer}", scale, group.v[layer])
            cfg = self.guidance.cfg[scale]
            if group.guided and cfg != 1 and layer in self.guidance.mixed_layers(self.config.depth):
                x = _mix(x, cfg).repeat(2, 1, 1)
        only_kept = False
        if kept is not None:
            assert plan is not None
            only_kept = plan.restore.kind in ("prev_code", "zero_code")
            if plan.restore.kind == "nn_kept":
                nearest = torch.stack([nearest_kept(row, size) for row in kept])
                x = take_rows(x, group.rows(nearest))
            elif plan.restore.kind == "identity":
                x = put_rows(group.x, group.rows(kept), x)
        watch("blockN", scale, x)
        self._draw(group, scale, x, kept if only_kept else None)
        self._prepare_next(group, scale)

    def _carries(self, plan: Plan, scale: int, kind: str) -> bool:
        return plan.score.kind == kind and plan.carries_score(scale)

    def _record_kept(self, group: Images, scale: int, kept: Tensor, layer: int | None = None) -> None:
        if 0 in group.places:
            for each in range(self.config.depth) if layer is None else (layer,):
                self.out.kept[scale, each] = kept[group.places.index(0)]

    def _choose(
        self, group: Images, plan: Plan, scale: int, x: Tensor, count: int, source: int | None = None
    ) -> Tensor:
        """Positions that run. x: [R, L, C] input of the gated part. Returns: [B, count], or [R, count] by row."""
        score, size = plan.score, self.schedule[scale]
        rows = x if score.row == "each" else x[: group.count]
        if score.kind == "entropy":
            assert source is not None
            ranked = self.entropy[source][: group.count]
        elif score.kind == "variance":
            ranked = variance_score(rows)
        elif score.kind == "structure":
            ranked = structure_score(rows, size, score.structure_weight, score.iterations)
        else:
            assert group.carried is not None
            ranked = -group.carried
            if score.kind == "change":
                if self.places is None:
                    self.places = rotated_order(group.carried, score.rotation.get(scale, 0.0))
                ranked = -self.places
        if score.stratified:
            ranked = torch.stack([stratified(row, size, count) for row in ranked])
        return torch.stack([self.rank(row, count) for row in ranked])

    def _layer(
        self,
        group: Images,
        block: Block,
        layer: int,
        scale: int,
        x: Tensor,
        count: int,
        is_gated: bool,
        kept: Tensor | None,
    ) -> Tensor:
        """Whole, gated or skipped, as the plan says. kept: [B, n] where the scale was gathered before block 0."""
        plan = group.plan
        leaves = plan is not None and layer in plan.residual_layers(scale)
        if plan is not None and plan.score.granularity == "sublayer" and count:
            return self._sublayers(group, plan, block, layer, scale, x, count, is_gated, leaves)
        before, L = x, self.tokens[scale]
        if plan is not None and count < L and kept is None:
            x = self._restored(group, plan, x, scale, layer, "")
        if count and is_gated:
            assert plan is not None
            own = self._choose(group, plan, scale, before, count, plan.score.source_layer.get(scale, {}).get(layer))
            self._record_kept(group, scale, own, layer)
            rows = group.rows(own)
            y = self._block(group, block, layer, scale, take_rows(before, rows), own)
            x = put_rows(x, rows, y)
            self._move(before, x, own)
        elif count:
            x = self._block(group, block, layer, scale, before, kept)
            self._move(before, x, kept)
        if leaves:
            group.residuals[scale, layer, ""] = x - before
        return x

    def _rope(self, group: Images, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines at the tokens' original positions: [L, D/2], or [R, 1, n, D/2]."""
        cos, sin = self.positions
        if kept is None:
            return cos, sin
        rows = kept if len(kept) == len(group.x) else group.rows(kept)
        return cos[rows][:, None], sin[rows][:, None]

    def _block(self, group: Images, block: Block, layer: int, scale: int, x: Tensor, kept: Tensor | None) -> Tensor:
        plan = group.plan
        wanted = {*self.entropy_layers, *(plan.source_layers(scale) if plan else ())}
        wanted |= set(plan.rho_layers(scale)) if plan else set()
        cos, sin = self._rope(group, kept)
        out = block(
            x, group.prompt, group.prompt.cross[layer], cos, sin, group.k[layer], group.v[layer],
            kept is None and layer in wanted,
        )  # fmt: skip
        group.append(layer, out.k, out.v)
        if out.entropy_nats is not None:
            self.entropy[layer] = out.entropy_nats
            if 0 in group.places:
                self.out.entropy[scale, layer] = out.entropy_nats
        return out.x

    def _sublayers(
        self,
        group: Images,
        plan: Plan,
        block: Block,
        layer: int,
        scale: int,
        x: Tensor,
        count: int,
        is_gated: bool,
        leaves: bool,
    ) -> Tensor:
        """The three parts of a block, each with tokens of its own choice."""
        prompt = group.prompt
        for part in SUBLAYERS:
            before, kept = x, None
            y = x
            if is_gated:
                kept = self._choose(group, plan, scale, x, count)
                self._record_kept(group, scale, kept, layer)
                rows = kept if plan.score.row == "each" else group.rows(kept)
                y = take_rows(x, rows)
            if part == "attention":
                cos, sin = self._rope(group, kept)
                change, k, v, _ = block.self_attention(y, prompt, cos, sin, group.k[layer], group.v[layer])
                group.append(layer, k, v)
            elif part == "cross":
                change = block.cross_attention(y, prompt, prompt.cross[layer])
            else:
                change = block.feed_forward(y, prompt)
            if kept is None:
                x = x + change
            else:
                base = x if count == self.tokens[scale] else self._restored(group, plan, x, scale, layer, part)
                x = put_rows(base, rows, y + change)
            if leaves:
                group.residuals[scale, layer, part] = x - before
        return x

    def _restored(self, group: Images, plan: Plan, x: Tensor, scale: int, layer: int, part: str) -> Tensor:
        """What a layer leaves at pruned positions: x itself, or x plus an earlier scale's residual, resampled."""
        source = plan.residual_scale(scale)
        if source is None:
            return x
        if part == "" and plan.score.granularity == "sublayer":  # the whole block is skipped
            for each in SUBLAYERS:
                x = self._restored(group, plan, x, scale, layer, each)
            return x
        residual = group.residuals[source, layer, part]
        return x + resampled_residual(residual, self.schedule[source], self.schedule[scale], plan.restore.resample)

    def _move(self, before: Tensor, after: Tensor, kept: Tensor | None) -> None:
        """Adds what a layer changed, mean over channels of the conditional row, where it ran."""
        if self.moved is None:
            return
        count = len(self.moved)
        change = (after[:count] - before[:count]).abs().mean(-1)  # [B, L], or [B, n] of kept tokens
        if kept is None:
            self.moved = self.moved + change
        elif change.shape == kept.shape:
            self.moved = self.moved.scatter_add(1, kept, change)
        else:
            self.moved = self.moved.scatter_add(1, kept, change.gather(1, kept))

    def _draw(self, group: Images, scale: int, x: Tensor, kept: Tensor | None) -> None:
        """Logits, bits and codes. kept: [B, n] where only those positions reach the head."""
        model, config, guidance, B = self.model, self.config, self.guidance, group.count
        height, width = self.schedule[scale]
        cfg, prompt = guidance.cfg[scale], group.prompt
        if group.guided and guidance.mixes_logits:
            raw = model.logits(x, prompt)
            if group.plan is not None and group.plan.measures_gap(scale):
                sats = group.plan.decision(SatsDecision)
                assert sats is not None
                rms = (raw[:B] - raw[B:]).square().mean((1, 2)).sqrt()
                self.gap = [sats.gap(float(value), raw[0].numel()) for value in rms]
            self.watch("raw", scale, raw)
            logits = raw / guidance.tau[scale]
            logits = _mix(logits, cfg) if cfg != 1 else logits[:B]
        else:
            raw = model.logits(x[:B], prompt, B)
            self.watch("raw", scale, raw)
            logits = raw / guidance.tau[scale]
        self.watch("logits", scale, logits)
        places = torch.tensor(group.places, device=x.device)
        if self.forced_bits is not None:
            bits = self.forced_bits[scale][places]
            bits = bits if kept is None else take_rows(bits, kept)
        else:
            assert self.noise is not None
            noise = self.noise(scale, self.tokens[scale])[places]
            bits = draw_bits(logits, noise if kept is None else take_rows(noise, kept), guidance.bit_limit)
        values = (bits.float() * 2 - 1) * config.code_channels**-0.5  # [B, L or n, bits]
        if kept is not None:
            assert group.plan is not None
            bits = put_rows(torch.full_like(self.drawn[places], NOT_DRAWN), kept, bits)
            if group.plan.restore.kind == "prev_code":
                assert group.own_codes is not None
                base = previous_values(group.own_codes, (height, width), config.patch)
            else:
                base = values.new_zeros(B, height * width, config.bits)
            values = put_rows(base, kept, values)
        if group.plan is not None and scale in group.plan.code_weight.ramp and self.places is not None:
            values = values * depth_weight(self.places, group.plan.code_weight.ramp[scale])[:, :, None]
        self.drawn[places] = bits
        grid = values.transpose(1, 2).unflatten(-1, (height, width))  # [B, bits, h, w]
        code = torch.nn.functional.pixel_shuffle(grid, 2) if config.patchify else grid
        group.before_last, group.own_codes = group.codes, code
        group.codes = group.codes + (code if code.shape[-2:] == self.full else resize_bilinear(code, self.full))
        self.out.codes = self.out.codes.index_copy(0, places, group.codes)

    def _prepare_next(self, group: Images, scale: int) -> None:
        """Input of the next scale, and the score that this one makes for it."""
        if scale + 1 == len(self.schedule):
            return
        patch, plan = self.config.patch, group.plan
        height, width = self.schedule[scale + 1]
        size = (height * patch, width * patch)
        following = group.codes if size == self.full else resize_bilinear(group.codes, size)
        self.watch("next", scale + 1, following)
        tokens = tokens_from_latent(following, patch)
        self.watch("codes_in", scale + 1, tokens)
        group.x = self.model.embed_codes(tokens, scale + 1).repeat(2 if group.guided else 1, 1, 1)
        group.carried = None
        if plan is None or not plan.carries_score(scale):
            return
        if self.moved is not None:
            moved = self.moved.unflatten(-1, self.schedule[scale])[:, None]
            group.carried = resize_bilinear(moved, (height, width)).flatten(1)
        else:
            assert group.own_codes is not None
            group.carried = code_energy(group.own_codes, patch, (height, width))


def small_picture(tokenizer: BitTokenizer, codes: Tensor, size: tuple[int, int], patch: int) -> np.ndarray:
    """Accumulated codes as a picture at a small map. codes: [1, d, H, W]; size in tokens. Returns: [3, h, w]."""
    return tokenizer.decode(resize_bilinear(codes, (size[0] * patch, size[1] * patch)))[0].cpu().numpy()
