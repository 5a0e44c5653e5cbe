"""A model's generation loop in PyTorch, dense or by a plan: reference for the exported graphs and ground for
calibration.

What a plan does is the same for every family: it chooses tokens, skips and gathers, restores, decides. A family says
how its maps are embedded, how a block runs and how codes are drawn, in a subclass. Images of a batch choose their own
tokens; those that decide differently go on in groups of their own. docs/calibration.md describes plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from toprovar.exporter.planned.images import Images, Prompt, new_images
from toprovar.exporter.planned.restore import nearest_kept, put_rows, resampled, resampled_residual, take_rows
from toprovar.exporter.planned.scores import (
    Rank,
    code_energy,
    depth_weight,
    lowest_scores,
    rotated_order,
    stratified,
    structure_score,
    variance_score,
)
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
from toprovar.runtime.plan import Plan

Observer = Callable[[str, int, Tensor], None]
SmallPicture = Callable[[Tensor, tuple[int, int]], np.ndarray]


class Config(Protocol):
    """Sizes that a loop needs of its model."""

    @property
    def depth(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def head_width(self) -> int: ...


@dataclass
class BlockOutput:
    """x [R, L, C]; new keys and values [L, R, H, D]; entropy [R, L] in nats over heads' mean, if asked for."""

    x: Tensor
    k: Tensor
    v: Tensor
    entropy_nats: Tensor | None = None


@dataclass
class Generation:
    """What a run left behind.

    codes:     [B, d, H, W] accumulated codes on the tokenizer's grid
    drawn:     per scale that ran, what was drawn: bits [B, L, bits] uint8, or indices [B, L, 1] int64; the loop's
               `not_drawn` at positions and images that drew none there
    entropy:   {(scale, layer): [R, L] nats} where asked for; of the first image's group
    kept:      {(scale, layer): [n] int64} positions that ran in a pruned layer, of the first image
    counts:    per image, per scale that ran, tokens per layer
    decisions: (image, scale, what, value), in the order they were taken
    """

    codes: Tensor
    drawn: list[Tensor] = field(default_factory=list)
    entropy: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    counts: list[list[tuple[int, ...]]] = field(default_factory=list)
    decisions: list[tuple[int, int, str, float | str]] = field(default_factory=list)

    @property
    def bits(self) -> list[Tensor]:
        """What a bit family drew."""
        return self.drawn

    @property
    def indices(self) -> list[Tensor]:
        """What an index family drew, per scale [B, L]."""
        return [drawn[..., 0] for drawn in self.drawn]


@dataclass(frozen=True)
class LoopOptions:
    """How a loop runs.

    plan:              None is dense
    scales:            to run; fewer than the schedule stop early
    entropy_layers:    layers whose attention entropy is recorded at every scale they run whole
    observe:           called with (name, scale, tensor) for intermediate values, names as in the parity files
    on_scale:          called with (scale, accumulated codes) after every scale
    gate_whole_layers: also sends layers that keep every token through gather and scatter (a test of that path)
    rank:              (score [N] of the plan's source, count) -> [count] int64 positions that run, ascending; graphs
                       know only `lowest_scores`, another rule is for evaluation
    small_picture:     (codes [1, d, H, W], map in tokens) -> [3, h, w]; a skipvar decision looks at it
    """

    plan: Plan | None = None
    scales: int | None = None
    entropy_layers: Collection[int] = ()
    observe: Observer | None = None
    on_scale: Callable[[int, Tensor], None] | None = None
    gate_whole_layers: bool = False
    rank: Rank = lowest_scores
    small_picture: SmallPicture | None = None


def _unobserved(name: str, scale: int, tensor: Tensor) -> None:
    pass


def mix(x: Tensor, cfg: float) -> Tensor:
    """cfg * conditional + (1 - cfg) * unconditional. x: [2B, ...] -> [B, ...]."""
    conditional, unconditional = x.chunk(2)
    return cfg * conditional + (1 - cfg) * unconditional


P = TypeVar("P", bound=Prompt)


class PlannedLoop(ABC, Generic[P]):
    """The part of the loop that plans and decisions are about.

    not_drawn: what stands in `drawn` where nothing was drawn
    columns:   numbers drawn per token
    patch:     cells of the code map along a token's side
    full:      the code map of the last scale
    """

    not_drawn = -1
    columns = 1
    patch = 1
    sublayers: tuple[str, ...] = ("attention", "ffn")
    drawn_dtype = torch.int64

    def __init__(self, config: Config, schedule: Schedule, guidance: Guidance, options: LoopOptions) -> None:
        self.config, self.schedule, self.guidance, self.options = config, schedule, guidance, options
        self.watch = options.observe or _unobserved
        self.tokens = token_counts(schedule)
        self.full = (schedule[-1][0] * self.patch, schedule[-1][1] * self.patch)

    # -- what a family says ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def code_channels(self) -> int: ...

    @abstractmethod
    def first_input(self, prompt: P) -> Tensor:
        """Input of scale 0, [R, L, C]; text tokens that run along come first."""

    @abstractmethod
    def next_input(self, group: Images, codes: Tensor, scale: int) -> Tensor:
        """Input of a later scale, [B, L, C]. codes: [B, d, h, w] of that scale's map."""

    @abstractmethod
    def block(
        self, group: Images, layer: int, scale: int, x: Tensor, kept: Tensor | None, want_entropy: bool
    ) -> BlockOutput:
        """One block. x: [R, n, C]; kept: [B, n] their positions, None for all."""

    @abstractmethod
    def part(
        self, group: Images, layer: int, scale: int, part: str, x: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What a sub-layer adds to x, with new keys and values. kept: [R, n] positions, None for all."""

    @abstractmethod
    def raw_logits(self, group: Images, scale: int, x: Tensor, rows: int) -> Tensor:
        """Logits of the first `rows` rows of x."""

    def mixed(self, logits: Tensor, cfg: float) -> Tensor:
        """Guidance on logits behind the temperature. logits: [2B, n, V] -> [B, n, V]."""
        return mix(logits, cfg)

    @abstractmethod
    def draw(
        self, group: Images, scale: int, x: Tensor, logits: Tensor, places: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Draws tokens. logits: [B, n, ...], mixed; places: [B] images of the batch; kept: [B, n], None for all.

        Returns: [B, n, columns], and the codes they stand for [B, n, d].
        """

    @abstractmethod
    def code_map(self, values: Tensor, scale: int) -> Tensor:
        """Codes of a scale on its own map. values: [B, L, d]. Returns: [B, d, h, w]."""

    @abstractmethod
    def contribution(self, code: Tensor, scale: int) -> Tensor:
        """What a scale adds to the accumulated codes. code: [B, d, h, w]. Returns: [B, d, H, W]."""

    @abstractmethod
    def resized(self, codes: Tensor, scale: int) -> Tensor:
        """Accumulated codes on the map of a later scale, [B, d, h, w]."""

    @abstractmethod
    def previous_values(self, code: Tensor, scale: int) -> Tensor:
        """The codes of the scale before at this scale's tokens, nearest neighbour. Returns: [B, L, d]."""

    def resampled_residual(self, residual: Tensor, source: int, scale: int, kind: str) -> Tensor:
        """A residual of an earlier scale on this one's map. residual: [R, N_source, C] -> [R, N, C]."""
        return resampled_residual(residual, self.schedule[source], self.schedule[scale], kind)

    @abstractmethod
    def empty_cache(self, prompt: P) -> Tensor:
        """[0, R, H, D]."""

    def is_guided(self, prompt: P) -> bool:
        """Whether the second half of the rows is unconditional."""
        return self.guidance.uses_unconditional_row

    # -- the run ---------------------------------------------------------------------------------------------------

    def run(self, prompt: P) -> Generation:
        whole = new_images(
            prompt,
            self.is_guided(prompt),
            self.options.plan,
            self.first_input(prompt),
            (self.code_channels, *self.full),
            self.empty_cache(prompt),
            self.config.depth,
        )
        self.out = Generation(whole.codes, counts=[[] for _ in whole.places])
        groups = [whole]
        for scale in range(len(self.schedule) if self.options.scales is None else self.options.scales):
            groups = [part for group in groups for part in self._before(group, scale)]
            if not groups:
                break
            shape = (len(self.out.counts), self.tokens[scale], self.columns)
            self.drawn = torch.full(shape, self.not_drawn, dtype=self.drawn_dtype).to(whole.codes.device)
            following = []
            for group in groups:
                self._step(group, scale)
                following += self._after(group, scale)
            groups = following
            self.out.drawn.append(self.drawn)
            if self.options.on_scale:
                self.options.on_scale(scale, self.out.codes)
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
        if self.options.small_picture is None:
            raise ToprovarError("the plan decides by small pictures; the model has no tokenizer", "pass --tokenizer")
        assert group.before_last is not None
        size = self.schedule[decision.feature_scale]
        pictures = [
            self.options.small_picture(codes[image : image + 1], size) for codes in (group.before_last, group.codes)
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
        plan, watch, size = group.plan, self.watch, self.schedule[scale]
        L, B = self.tokens[scale], group.count
        watch("in", scale, group.x)
        self.entropy: dict[int, Tensor] = {}
        self.gap: list[float] | None = None
        keep = plan.counts(scale) if plan else (L,) * self.config.depth
        for place in group.places:
            self.out.counts[place].append(keep)
        self.places: Tensor | None = None  # [B, L] of the order of a change score
        self.moved = group.x.new_zeros(B, L) if plan and self._carries(plan, scale, "change") else None
        gated = set(plan.gated_layers(scale, keep, self.options.gate_whole_layers)) if plan else set()
        x, kept = group.x, None
        if plan and plan.score.granularity == "scale" and gated:
            kept = self._choose(group, plan, scale, x, keep[0])
            self._record_kept(group, scale, kept)
            x = take_rows(x, group.rows(kept))
            gated = set()
        for layer in range(self.config.depth):
            x = self._layer(group, layer, scale, x, keep[layer], layer in gated, kept)
            watch(f"block{layer}", scale, x)
            watch(f"k{layer}", scale, group.k[layer])
            watch(f"v{layer}", scale, group.v[layer])
            cfg = self.guidance.cfg[scale]
            if group.guided and cfg != 1 and layer in self.guidance.mixed_layers(self.config.depth):
                x = mix(x, cfg).repeat(2, 1, 1)
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
        return torch.stack([self.options.rank(row, count) for row in ranked])

    def _layer(
        self,
        group: Images,
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
            return self._sublayers(group, plan, layer, scale, x, count, is_gated, leaves)
        before, L = x, self.tokens[scale]
        if plan is not None and count < L and kept is None:
            x = self._restored(group, plan, x, scale, layer, "")
        if count and is_gated:
            assert plan is not None
            own = self._choose(group, plan, scale, before, count, plan.score.source_layer.get(scale, {}).get(layer))
            self._record_kept(group, scale, own, layer)
            rows = group.rows(own)
            y = self._block(group, layer, scale, take_rows(before, rows), own)
            x = put_rows(x, rows, y)
            self._move(before, x, own, scale)
        elif count:
            x = self._block(group, layer, scale, before, kept)
            self._move(before, x, kept, scale)
        if leaves:
            group.residuals[scale, layer, ""] = self._drawn_tokens(x - before, scale)
        return x

    def _block(self, group: Images, layer: int, scale: int, x: Tensor, kept: Tensor | None) -> Tensor:
        plan = group.plan
        wanted = {*self.options.entropy_layers, *(plan.source_layers(scale) if plan else ())}
        wanted |= set(plan.rho_layers(scale)) if plan else set()
        out = self.block(group, layer, scale, x, kept, kept is None and layer in wanted)
        group.append(layer, out.k, out.v)
        if out.entropy_nats is not None:
            self.entropy[layer] = out.entropy_nats[:, -self.tokens[scale] :]
            if 0 in group.places:
                self.out.entropy[scale, layer] = self.entropy[layer]
        return out.x

    def _sublayers(
        self,
        group: Images,
        plan: Plan,
        layer: int,
        scale: int,
        x: Tensor,
        count: int,
        is_gated: bool,
        leaves: bool,
    ) -> Tensor:
        """The three parts of a block, each with tokens of its own choice."""
        for part in self.sublayers:
            before, kept = x, None
            y = x
            if is_gated:
                kept = self._choose(group, plan, scale, x, count)
                self._record_kept(group, scale, kept, layer)
                rows = kept if plan.score.row == "each" else group.rows(kept)
                y = take_rows(x, rows)
            change, k, v = self.part(group, layer, scale, part, y, None if kept is None else rows)
            if k is not None and v is not None:
                group.append(layer, k, v)
            if kept is None:
                x = x + change
            else:
                base = x if count == self.tokens[scale] else self._restored(group, plan, x, scale, layer, part)
                x = put_rows(base, rows, y + change)
            if leaves:
                group.residuals[scale, layer, part] = self._drawn_tokens(x - before, scale)
        return x

    def _drawn_tokens(self, x: Tensor, scale: int) -> Tensor:
        """Without text tokens that run along. x: [R, L, C]."""
        return x[:, -self.tokens[scale] :]

    def _restored(self, group: Images, plan: Plan, x: Tensor, scale: int, layer: int, part: str) -> Tensor:
        """What a layer leaves at pruned positions: x itself, or x plus an earlier scale's residual, resampled."""
        source = plan.residual_scale(scale)
        if source is None:
            return x
        if part == "" and plan.score.granularity == "sublayer":  # the whole block is skipped
            for each in self.sublayers:
                x = self._restored(group, plan, x, scale, layer, each)
            return x
        residual = group.residuals[source, layer, part]
        return x + self.resampled_residual(residual, source, scale, plan.restore.resample)

    def _move(self, before: Tensor, after: Tensor, kept: Tensor | None, scale: int) -> None:
        """Adds what a layer changed, mean over channels of the conditional row, where it ran."""
        if self.moved is None:
            return
        count = len(self.moved)
        change = (after[:count] - before[:count]).abs().mean(-1)  # [B, L], or [B, n] of kept tokens
        if kept is None:
            self.moved = self.moved + change[:, -self.tokens[scale] :]
        elif change.shape == kept.shape:
            self.moved = self.moved.scatter_add(1, kept, change)
        else:
            self.moved = self.moved.scatter_add(1, kept, change.gather(1, kept))

    def _draw(self, group: Images, scale: int, x: Tensor, kept: Tensor | None) -> None:
        """Logits, tokens and codes. kept: [B, n] where only those positions reach the head."""
        guidance, B, plan = self.guidance, group.count, group.plan
        cfg = guidance.cfg[scale]
        if group.guided and guidance.mixes_logits:
            raw = self.raw_logits(group, scale, x, 2 * B)
            self.watch("raw", scale, raw)
            raw = self._drawn_tokens(raw, scale)
            if plan is not None and plan.measures_gap(scale):
                sats = plan.decision(SatsDecision)
                assert sats is not None
                rms = (raw[:B] - raw[B:]).square().mean((1, 2)).sqrt()
                self.gap = [sats.gap(float(value), raw[0].numel()) for value in rms]
            logits = raw / guidance.tau[scale]
            logits = self.mixed(logits, cfg) if cfg != 1 else logits[:B]
        else:
            raw = self.raw_logits(group, scale, x[:B], B)
            self.watch("raw", scale, raw)
            logits = self._drawn_tokens(raw, scale) / guidance.tau[scale]
        self.watch("logits", scale, logits)
        places = torch.tensor(group.places, device=x.device)
        drawn, values = self.draw(group, scale, x, logits, places, kept)
        if kept is not None:
            assert plan is not None
            drawn = put_rows(torch.full_like(self.drawn[places], self.not_drawn), kept, drawn)
            if plan.restore.kind == "prev_code":
                assert group.own_codes is not None
                base = self.previous_values(group.own_codes, scale)
            else:
                base = values.new_zeros(B, self.tokens[scale], values.shape[-1])
            values = put_rows(base, kept, values)
        if plan is not None and scale in plan.code_weight.ramp and self.places is not None:
            values = values * depth_weight(self.places, plan.code_weight.ramp[scale])[:, :, None]
        self.drawn[places] = drawn
        code = self.code_map(values, scale)
        self.watch("code", scale, code)
        group.before_last, group.own_codes = group.codes, code
        group.codes = group.codes + self.contribution(code, scale)
        self.out.codes = self.out.codes.index_copy(0, places, group.codes)

    def _prepare_next(self, group: Images, scale: int) -> None:
        """Input of the next scale, and the score that this one makes for it."""
        if scale + 1 == len(self.schedule):
            return
        plan = group.plan
        following = self.resized(group.codes, scale + 1)
        self.watch("next", scale + 1, following)
        group.x = self.next_input(group, following, scale + 1).repeat(2 if group.guided else 1, 1, 1)
        group.carried = None
        if plan is None or not plan.carries_score(scale):
            return
        height, width = self.schedule[scale + 1]
        if self.moved is not None:
            moved = self.moved.unflatten(-1, self.schedule[scale])[:, None]
            group.carried = resampled(moved, (height, width)).flatten(1)
        else:
            assert group.own_codes is not None
            group.carried = code_energy(group.own_codes, self.patch, (height, width))
