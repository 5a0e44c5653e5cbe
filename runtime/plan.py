"""The plan: everything a method decided, as data. Exporter and runtime know this schema and no method names.

A plan says, per scale and layer, how many tokens run; which score ranks them; what pruned positions get; which scales
are skipped; when guidance stops; and what is decided only while a picture is made. The parts are orthogonal: a method
is one choice of each. docs/calibration.md describes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from toprovar.runtime.decisions import Decision, DecisionKind, RhoDecision, SatsDecision, SkipvarDecision
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json, write_json
from toprovar.runtime.parts import Count, Index, Part, Share, Side, Whole

PLAN_SCHEMA_VERSION = 2
COUNT_GRID = 64  # the query tile of fused attention and GEMM kernels
MIN_PRUNED_TOKENS = 256  # smaller maps are whole or skipped

ScoreKind = Literal["none", "entropy", "variance", "structure", "change", "code_energy"]
RestoreKind = Literal["identity", "cached_residual", "prev_residual", "nn_kept", "prev_code", "zero_code"]
Granularity = Literal["block", "sublayer", "scale"]
CARRIED_SCORES = ("change", "code_energy")  # made by the scale before, on the map of the scale that uses them
RESIDUALS = ("cached_residual", "prev_residual")
SUBLAYERS = ("attention", "cross", "ffn")


class Backbone(Part):
    """The model a plan was made for. bits: uniform numbers that drawing one token takes: its bits, or the codes of the
    codebook of a family that draws indices."""

    family: str
    layers: Annotated[int, Whole, Field(ge=1, le=4096)]  # a list of this length is made before it is compared
    width: Side
    heads: Side
    bits: Side
    weights_sha256: str = ""

    @property
    def draws_indices(self) -> bool:
        """Whether a token is an index of a codebook instead of bits."""
        return self.family in ("var", "hart")

    @property
    def needs_last_scale(self) -> bool:
        """Whether the last scale always runs: HART's residual head hangs on it."""
        return self.family == "hart"

    @property
    def logits(self) -> int:
        """Per token."""
        return self.bits if self.draws_indices else 2 * self.bits

    @property
    def sublayers(self) -> tuple[str, ...]:
        """Parts of a block that can choose their own tokens, in order."""
        return SUBLAYERS if self.family == "infinity" else ("attention", "ffn")


class Score(Part):
    """What ranks tokens, on the conditional row.

    kind: entropy     of a whole layer's attention at this scale; the lowest run
          variance    squared distance of the gated part's input from its mean over tokens; the highest run
          structure   projection of the scale's input on its main direction, and distance from its local mean; the
                      highest run
          change      what the scale before changed, summed over its layers; the highest run
          code_energy detail energy of the scale before's codes; the highest run
    source_layer: {scale: {gated layer: layer whose entropy ranks its tokens}}
    granularity: one choice of tokens per block, per sub-layer, or per scale (gathered before block 0, restored after
                 the last block)
    row:         "each": every row chooses for itself (variance only)
    rotation:    {scale: share of the order by which `change` is rotated}, so that no region is starved at every scale
    structure_weight, iterations: of the projection, and power iterations (structure)
    stratified:  in each of 4 x 4 regions at least a quarter of an even share runs
    """

    kind: ScoreKind = "none"
    granularity: Granularity = "block"
    source_layer: dict[Index, dict[Index, Index]] = Field(default_factory=dict)
    row: Literal["cond", "each"] = "cond"
    heads: Literal["mean"] = "mean"
    rotation: dict[Index, Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=dict)
    structure_weight: Annotated[float, Field(ge=0)] = 1.0
    iterations: Annotated[int, Field(ge=1, le=64)] = 4
    stratified: bool = False


class Restore(Part):
    """What a pruned position gets.

    identity: nothing is added; cached_residual: the part's residual of `ref_scale`, resampled; prev_residual: that of
    the scale before. For whole scales: nn_kept, the hidden state of the nearest kept position; prev_code, the codes of
    the scale before; zero_code, no code at all; identity, the scale's input.
    """

    kind: RestoreKind = "identity"
    ref_scale: Index | None = None
    resample: Literal["bilinear", "area"] = "bilinear"


class CfgStop(Part):
    """Conditional rows alone run from `scale` on (static), or once a decision says so (decided)."""

    mode: Literal["none", "static", "decided"] = "none"
    scale: Index | None = None


class CodeWeight(Part):
    """depth: codes are scaled before they are added up; {scale: (weight of the last token in order, of the first)},
    linear between them."""

    kind: Literal["none", "depth"] = "none"
    ramp: dict[Index, tuple[Share, Share]] = Field(default_factory=dict)


class PlanPath(Part):
    """Another way through the scales behind a decision; what it does not name stays as in the plan."""

    keep: dict[Index, tuple[Count, ...]] | None = None
    skip_scales: tuple[Index, ...] | None = None
    ref_scale: Index | None = None
    cfg_stop: Index | None = None


class LayerScores(Part):
    """R per layer in [0, 1] (1 = Detail, prunable; 0 = Global) and the class made of it."""

    R: tuple[Share, ...] = ()
    classes: tuple[Literal["global", "detail"], ...] = Field(default=(), alias="class")


class ScaleDepth(Part):
    """Scale depth D: pruning starts at D + 1. adaptive: `value` is where the plan's own numbers assume it."""

    mode: Literal["none", "static", "adaptive"] = "none"
    value: Index | None = None
    tau: Share | None = None
    direction: Literal["le", "ge"] | None = None


class Calibration(Part):
    """Where the numbers come from.

    expected_speedup: mean over calibration prompts of what decisions led to, as a TLE speed-up
    measured_ssim:    mean SSIM to dense over some of them, where the plan was fitted to it
    template:         the maps it was calibrated at, where the plan was carried over to others
    """

    prompts_sha256: str = ""
    prompts: Count = 0
    ssim_threshold: float | None = None
    alpha: tuple[float, float] | None = None
    beta: float | None = None
    settings: dict[str, str | float | int | bool | None] = Field(default_factory=dict)
    stats: str = ""
    expected_speedup: Annotated[float, Field(gt=0)] | None = None
    measured_ssim: Annotated[float, Field(ge=-1, le=1)] | None = None
    template: str = ""
    warnings: tuple[str, ...] = ()


class Plan(Part):
    """keep:   {scale: tokens that run per layer}; whole where it is silent
    grid:      keep counts are multiples of it: 64, or 1 for plans that repeat a published run token for token
    ladder:    {scale: counts}; before the scale, an energy_mass decision takes one of them instead of `keep`
    paths:     {name: path}, entered by a rho or skipvar decision
    """

    schema_version: Literal[2] = 2
    tool_version: str = ""
    backbone: Backbone
    schedule: Annotated[tuple[tuple[Side, Side], ...], Field(min_length=1, max_length=1024)]
    method: str
    preset: str = ""
    seed_rule: Literal["counter"] = "counter"
    skip_scales: tuple[Index, ...] = ()
    cfg_stop: CfgStop = CfgStop()
    score: Score = Score()
    keep: dict[Index, tuple[Count, ...]] = Field(default_factory=dict)
    grid: Annotated[Literal[1, 64], Whole] = 64
    ladder: dict[Index, tuple[Count, ...]] = Field(default_factory=dict)
    restore: Restore = Restore()
    code_weight: CodeWeight = CodeWeight()
    paths: dict[str, PlanPath] = Field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    layers: LayerScores = LayerScores()
    D: ScaleDepth = ScaleDepth()
    calib: Calibration = Calibration()

    # -- reading the plan ------------------------------------------------------------------------------------------

    @property
    def scales(self) -> int:
        return len(self.schedule)

    def tokens(self, scale: int) -> int:
        """N_k."""
        height, width = self.schedule[scale]
        return height * width

    @property
    def run_scales(self) -> list[int]:
        return [k for k in range(self.scales) if k not in self.skip_scales]

    def counts(self, scale: int) -> tuple[int, ...]:
        """Tokens that run in each layer of a scale; all of them where the plan is silent."""
        if scale in self.skip_scales:
            return (0,) * self.backbone.layers
        return self.keep.get(scale, (self.tokens(scale),) * self.backbone.layers)

    def choices(self, scale: int) -> list[tuple[int, ...]]:
        """All counts that the scale may run with: the rungs of its ladder, or those of the plan."""
        if scale in self.ladder:
            return [(rung,) * self.backbone.layers for rung in self.ladder[scale]]
        return [self.counts(scale)]

    def is_pruned(self, scale: int) -> bool:
        """Whether some layer of the scale runs without some token, now or by a decision."""
        return any(count < self.tokens(scale) for counts in self.choices(scale) for count in counts)

    def cached_tokens(self, scale: int) -> tuple[int, ...]:
        """Keys each layer finds in its cache when `scale` starts."""
        totals = [0] * self.backbone.layers
        for k in range(scale):
            for layer, count in enumerate(self.counts(k)):
                totals[layer] += count
        return tuple(totals)

    def is_guided(self, scale: int) -> bool:
        """Whether unconditional rows may still run at a scale."""
        return self.cfg_stop.mode != "static" or self.cfg_stop.scale is None or scale < self.cfg_stop.scale

    def source_layers(self, scale: int) -> list[int]:
        """Layers of a scale whose entropy ranks tokens."""
        return sorted(set(self.score.source_layer.get(scale, {}).values()))

    def gated_layers(self, scale: int, counts: tuple[int, ...], also_whole: bool = False) -> list[int]:
        """Layers in which tokens are chosen at these counts. also_whole: those that keep every token too."""
        tokens = self.tokens(scale)
        if self.score.kind == "none":
            return []
        may = self.score.source_layer.get(scale, {}) if self.score.kind == "entropy" else range(self.backbone.layers)
        whole = also_whole and (scale in self.keep or scale in self.ladder)
        return [layer for layer in may if 0 < counts[layer] < tokens or (counts[layer] == tokens and whole)]

    def restored_layers(self, scale: int) -> list[int]:
        """Layers of a scale in which some positions are pruned."""
        return [layer for layer, count in enumerate(self.counts(scale)) if count < self.tokens(scale)]

    def residual_scale(self, scale: int) -> int | None:
        """The scale whose residuals restore this one; None where it needs none."""
        if self.restore.kind == "cached_residual":
            return self.restore.ref_scale
        return scale - 1 if self.restore.kind == "prev_residual" else None

    def residual_layers(self, scale: int) -> list[int]:
        """Layers whose residual a scale has to leave behind for pruned scales after it, on any path."""
        layers = set()
        for plan in self.futures():
            for k in plan.run_scales:
                if k > scale and plan.restore.kind in RESIDUALS and plan.residual_scale(k) == scale:
                    layers |= set(plan.restored_layers(k))
        return sorted(layers)

    def _gates_next(self, scale: int) -> bool:
        return scale + 1 in self.run_scales and (scale + 1 in self.keep or scale + 1 in self.ladder)

    def carries_score(self, scale: int) -> bool:
        """Whether a scale has to make the score of the next one."""
        return self.score.kind in CARRIED_SCORES and any(plan._gates_next(scale) for plan in self.futures())

    def carries_codes(self, scale: int) -> bool:
        """Whether a scale has to leave its own codes behind for the next one."""
        return self.restore.kind == "prev_code" and any(plan._gates_next(scale) for plan in self.futures())

    # -- decisions -------------------------------------------------------------------------------------------------

    def on_path(self, name: str) -> Plan:
        """The plan with a path taken: no further paths lie behind it."""
        path = self.paths[name]
        changes: dict[str, Any] = {
            "paths": {},
            "decisions": tuple(d for d in self.decisions if not isinstance(d, RhoDecision | SkipvarDecision)),
        }
        if path.keep is not None:
            changes["keep"] = path.keep
        if path.skip_scales is not None:
            changes["skip_scales"] = path.skip_scales
        if path.ref_scale is not None:
            changes["restore"] = self.restore.model_copy(update={"ref_scale": path.ref_scale})
        if path.cfg_stop is not None:
            changes["cfg_stop"] = CfgStop(mode="static", scale=path.cfg_stop)
        return self.model_copy(update=changes)

    def futures(self) -> Iterator[Plan]:
        """The plan itself and every path of it."""
        yield self
        for name in self.paths:
            yield self.on_path(name)

    def decision(self, kind: type[DecisionKind]) -> DecisionKind | None:
        return next((d for d in self.decisions if isinstance(d, kind)), None)

    def entries(self, scale: int) -> list[str]:
        """Paths that can be entered after a scale."""
        rho, skipvar = self.decision(RhoDecision), self.decision(SkipvarDecision)
        names = [rho.paths[scale]] if rho and scale in rho.paths else []
        if skipvar and scale == skipvar.scale:
            names += [*skipvar.skip_paths.values(), *skipvar.uncond_paths.values()]
        return list(dict.fromkeys(names))

    def rho_layers(self, scale: int) -> tuple[int, ...]:
        """Layers whose entropy a decision after this scale averages."""
        rho = self.decision(RhoDecision)
        return rho.layers if rho and scale in rho.paths else ()

    def measures_gap(self, scale: int) -> bool:
        """Whether a decision reads this scale's distance between conditional and unconditional logits."""
        sats = self.decision(SatsDecision)
        return sats is not None and (scale in sats.scales or scale + 1 in sats.scales)

    # -- work ------------------------------------------------------------------------------------------------------

    @property
    def token_layer_equivalents(self) -> float:
        """Work in tokens through the whole depth: sum over scales and layers of n(k, l) / L.

        A scale without unconditional rows counts half. Decisions are not foreseen: this is the plan's own path.
        """
        rows = [1.0 if self.is_guided(k) else 0.5 for k in range(self.scales)]
        return sum(rows[k] * sum(self.counts(k)) for k in range(self.scales)) / self.backbone.layers

    @property
    def tle_speedup(self) -> float:
        """Dense work over planned work."""
        dense = sum(self.tokens(k) for k in range(self.scales))
        return dense / self.token_layer_equivalents

    @property
    def expected_speedup(self) -> float:
        """`tle_speedup`, or, where pictures take paths of their own, what it was over the calibration prompts."""
        return self.calib.expected_speedup or self.tle_speedup

    @property
    def tle_range(self) -> tuple[float, float]:
        """Smallest and largest `tle_speedup` that decisions can lead to."""
        found = []
        sats = self.decision(SatsDecision)
        for plan in self.futures():
            for pick in (min, max):
                keep = dict(plan.keep) | {k: pick(plan.choices(k)) for k in plan.ladder if k in plan.run_scales}
                found.append(plan.model_copy(update={"keep": keep}))
        if sats is not None:
            stop = CfgStop(mode="static", scale=min(sats.scales) + 1)
            found += [plan.model_copy(update={"cfg_stop": stop}) for plan in found]
        speedups = [plan.tle_speedup for plan in found]
        return min(speedups), max(speedups)

    # -- refusing a bad plan ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises: ToprovarError for the first rule the plan breaks; the message names scale and layer."""
        from toprovar.runtime.plan_rules import check_plan

        check_plan(self)

    def check_backbone(self, backbone: Backbone, schedule: tuple[tuple[int, int], ...]) -> None:
        """Raises: ToprovarError if the plan was made for another model or schedule, naming both values."""
        for field in ("family", "layers", "width", "heads", "bits"):
            mine, theirs = getattr(self.backbone, field), getattr(backbone, field)
            if mine != theirs:
                raise ToprovarError(
                    f"plan was made for another model: {field} {mine} in the plan, {theirs} in the checkpoint",
                    "calibrate this checkpoint and use its own plan",
                )
        if self.schedule != tuple(schedule):
            raise ToprovarError(
                f"plan was made for another schedule: {_maps(self.schedule)} in the plan, {_maps(schedule)} asked for",
                "calibrate at this size, or export at the plan's size; export --aspect carries a plan over to another "
                "template of its budget",
            )


def _maps(schedule: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{h}x{w}" for h, w in schedule)


def dense_plan(backbone: Backbone, schedule: tuple[tuple[int, int], ...]) -> Plan:
    """Everything runs."""
    return Plan(backbone=backbone, schedule=schedule, method="dense")


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"


Model = TypeVar("Model", bound=BaseModel)
MADE = "make the file again; it is not meant to be edited by hand"


def model_from_json(kind: type[Model], value: Any, what: str, hint: str = MADE) -> Model:
    """Validates parsed JSON; the first fault becomes one message with its place.

    Raises: ToprovarError.
    """
    version = value.get("schema_version") if isinstance(value, dict) else None
    expected = kind.model_fields["schema_version"].default
    if isinstance(value, dict) and "schema_version" not in value:
        raise ToprovarError(f"{what} has no schema_version; expected {expected}", "check that it is the right file")
    if isinstance(version, int) and version != expected:
        raise ToprovarError(
            f"{what} has schema version {version}; this toprovar reads version {expected}",
            "make it again with this version, or install the version that wrote it",
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = _shortened(".".join(str(part) for part in first["loc"]) or "document")
        raise ToprovarError(
            f"{what}: {place}: {first['msg'][:1].lower()}{first['msg'][1:]} (found {_shortened(repr(first['input']))})",
            hint,
        ) from None


def load_plan(path: Path) -> Plan:
    """Raises: ToprovarError if the file is unreadable, of another schema, or breaks a rule."""
    plan = model_from_json(Plan, read_json(path), str(path))
    try:
        plan.check()
    except ToprovarError as error:
        raise ToprovarError(f"{path}: {error.message}", error.hint or MADE) from None
    return plan


def save_plan(plan: Plan, path: Path) -> None:
    plan.check()
    write_json(path, plan.model_dump(mode="json", by_alias=True))
