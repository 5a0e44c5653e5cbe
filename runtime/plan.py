"""The plan: everything a method decided, as data. Exporter and runtime know this schema and no method names.

A plan says, per scale and layer, how many tokens run; where the score that ranks them comes from; what pruned positions
get; and which scales are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json, write_json

PLAN_SCHEMA_VERSION = 1
COUNT_GRID = 64  # the query tile of fused attention and GEMM kernels
MIN_PRUNED_TOKENS = 256  # smaller maps are whole or skipped

Side = Annotated[int, Field(ge=1, le=2**20)]
Index = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class Backbone(_Part):
    """The model a plan was made for."""

    family: str
    layers: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    bits: Annotated[int, Field(ge=1)]
    weights_sha256: str = ""


class Score(_Part):
    """kind: what ranks tokens; source_layer: {scale: {gated layer: layer whose entropy is used}}."""

    kind: Literal["none", "entropy"] = "none"
    source_layer: dict[Index, dict[Index, Index]] = {}
    row: Literal["cond"] = "cond"
    heads: Literal["mean"] = "mean"


class Restore(_Part):
    """What a pruned position gets: nothing (identity), or the block's residual of a dense scale, resampled."""

    kind: Literal["identity", "cached_residual"] = "identity"
    ref_scale: Index | None = None
    resample: Literal["bilinear", "area"] = "bilinear"


class CfgStop(_Part):
    mode: Literal["none"] = "none"


class LayerScores(_Part):
    """R per layer in [0, 1] (1 = Detail, prunable; 0 = Global) and the class made of it."""

    R: tuple[float, ...] = ()
    classes: tuple[Literal["global", "detail"], ...] = Field(default=(), alias="class")


class ScaleDepth(_Part):
    """Scale depth D: pruning starts at D + 1."""

    mode: Literal["none", "static"] = "none"
    value: Index | None = None
    tau: float | None = None
    direction: Literal["le", "ge"] | None = None


class Calibration(_Part):
    """Where the numbers come from."""

    prompts_sha256: str = ""
    prompts: int = 0
    ssim_threshold: float | None = None
    alpha: tuple[float, float] | None = None
    beta: float | None = None
    stats: str = ""
    warnings: tuple[str, ...] = ()


class Plan(_Part):
    schema_version: Literal[1] = 1
    tool_version: str = ""
    backbone: Backbone
    schedule: Annotated[tuple[tuple[Side, Side], ...], Field(min_length=1, max_length=64)]
    method: str
    preset: str = ""
    seed_rule: Literal["counter"] = "counter"
    skip_scales: tuple[Index, ...] = ()
    cfg_stop: CfgStop = CfgStop()
    score: Score = Score()
    keep: dict[Index, tuple[Count, ...]] = {}
    restore: Restore = Restore()
    code_weight: Literal["none"] = "none"
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

    def is_pruned(self, scale: int) -> bool:
        return any(count < self.tokens(scale) for count in self.counts(scale))

    def cached_tokens(self, scale: int) -> tuple[int, ...]:
        """Keys each layer finds in its cache when `scale` starts."""
        totals = [0] * self.backbone.layers
        for k in range(scale):
            for layer, count in enumerate(self.counts(k)):
                totals[layer] += count
        return tuple(totals)

    def source_layers(self, scale: int) -> list[int]:
        """Layers of a scale whose entropy something needs."""
        return sorted(set(self.score.source_layer.get(scale, {}).values()))

    def residual_layers(self, scale: int) -> list[int]:
        """Layers whose block residual a scale has to leave behind for pruned scales after it."""
        if self.restore.kind != "cached_residual" or scale != self.restore.ref_scale:
            return []
        return sorted({layer for k in self.run_scales for layer in self.restored_layers(k)})

    def restored_layers(self, scale: int) -> list[int]:
        """Layers of a scale in which some positions are pruned."""
        return [layer for layer, count in enumerate(self.counts(scale)) if count < self.tokens(scale)]

    @property
    def token_layer_equivalents(self) -> float:
        """Work in tokens through the whole depth: sum over scales and layers of n(k, l) / L."""
        return sum(sum(self.counts(k)) for k in range(self.scales)) / self.backbone.layers

    @property
    def tle_speedup(self) -> float:
        """Dense work over planned work."""
        dense = sum(self.tokens(k) for k in range(self.scales))
        return dense / self.token_layer_equivalents

    # -- refusing a bad plan ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises: ToprovarError for the first rule the plan breaks; the message names scale and layer."""
        self._check_skips()
        for scale, counts in self.keep.items():
            self._check_counts(scale, counts)
        self._check_sources()
        if not self.run_scales:
            raise ToprovarError("plan skips every scale", "leave at least scale 0 in")
        if not self.token_layer_equivalents:
            raise ToprovarError("plan keeps no token in any layer", "leave at least one layer of one scale in")
        if self.method == "dense" and (self.skip_scales or any(self.is_pruned(k) for k in self.run_scales)):
            raise ToprovarError("plan of method dense prunes or skips", "name the method that the plan comes from")
        self._check_restore()

    def _check_skips(self) -> None:
        expected = tuple(range(self.scales - len(self.skip_scales), self.scales))
        if self.skip_scales != expected:
            raise ToprovarError(
                f"plan.skip_scales is {list(self.skip_scales)}; expected the last scales in order, {list(expected)}",
                "only a suffix of the schedule can be skipped",
            )

    def _check_sources(self) -> None:
        for scale, sources in self.score.source_layer.items():
            for layer, source in sources.items():
                if scale >= self.scales or layer >= self.backbone.layers or source >= layer:
                    raise ToprovarError(
                        f"plan.score.source_layer names layer {source} for layer {layer} at scale {scale}; expected a "
                        f"scale below {self.scales}, a layer below {self.backbone.layers}, and a source before it"
                    )

    def _check_counts(self, scale: int, counts: tuple[int, ...]) -> None:
        if scale >= self.scales:
            raise ToprovarError(f"plan.keep names scale {scale}; the schedule has scales 0 to {self.scales - 1}")
        if scale in self.skip_scales:
            raise ToprovarError(f"plan.keep names scale {scale}, which plan.skip_scales leaves out")
        if len(counts) != self.backbone.layers:
            raise ToprovarError(
                f"plan.keep at scale {scale} has {len(counts)} counts; the backbone has {self.backbone.layers} layers"
            )
        tokens = self.tokens(scale)
        sources = self.score.source_layer.get(scale, {})
        for layer, count in enumerate(counts):
            where = f"scale {scale}, layer {layer}"
            if count > tokens:
                raise ToprovarError(f"plan keeps {count} tokens at {where}; the scale has {tokens}")
            if count in (0, tokens):
                continue
            if count % COUNT_GRID or tokens < MIN_PRUNED_TOKENS:
                raise ToprovarError(
                    f"plan keeps {count} of {tokens} tokens at {where}; expected 0, {tokens}, or a multiple of "
                    f"{COUNT_GRID} on maps of at least {MIN_PRUNED_TOKENS} tokens"
                )
            if self.score.kind == "none" or layer not in sources:
                raise ToprovarError(f"plan prunes at {where} without a score source", "name one in score.source_layer")
            source = sources[layer]
            if source >= layer or counts[source] != tokens:
                raise ToprovarError(
                    f"score source of {where} is layer {source}, which must come before it and run all {tokens} tokens"
                )

    def _check_restore(self) -> None:
        pruned = [k for k in self.run_scales if self.is_pruned(k)]
        if self.restore.kind != "cached_residual":
            return
        reference = self.restore.ref_scale
        if reference is None or reference >= self.scales or reference in self.skip_scales:
            raise ToprovarError(f"plan.restore.ref_scale is {reference}; expected a scale that runs")
        if self.is_pruned(reference):
            raise ToprovarError(f"plan.restore.ref_scale {reference} is pruned itself; it must be dense in all layers")
        if pruned and reference >= pruned[0]:
            raise ToprovarError(
                f"plan.restore.ref_scale {reference} runs after the first pruned scale {pruned[0]}; it must come before"
            )

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
                "calibrate at this size, or export at the plan's size",
            )


def _maps(schedule: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{h}x{w}" for h, w in schedule)


def dense_plan(backbone: Backbone, schedule: tuple[tuple[int, int], ...]) -> Plan:
    """Everything runs."""
    return Plan(backbone=backbone, schedule=schedule, method="dense")


Model = TypeVar("Model", bound=BaseModel)


def model_from_json(kind: type[Model], value: Any, what: str) -> Model:
    """Validates parsed JSON; the first fault becomes one message with its place.

    Raises: ToprovarError.
    """
    version = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(value, dict) and "schema_version" not in value:
        raise ToprovarError(
            f"{what} has no schema_version; expected {PLAN_SCHEMA_VERSION}", "check that it is the right file"
        )
    if isinstance(version, int) and version != PLAN_SCHEMA_VERSION:
        raise ToprovarError(
            f"{what} has schema version {version}; this toprovar reads version {PLAN_SCHEMA_VERSION}",
            "make it again with this version, or install the version that wrote it",
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        found = repr(first["input"])
        raise ToprovarError(
            f"{what}: {place}: {first['msg'].lower()} (found {found[:80]}{'…' if len(found) > 80 else ''})",
            "make the file again; it is not meant to be edited by hand",
        ) from None


def load_plan(path: Path) -> Plan:
    """Raises: ToprovarError if the file is unreadable, of another schema, or breaks a rule."""
    plan = model_from_json(Plan, read_json(path), str(path))
    try:
        plan.check()
    except ToprovarError as error:
        raise ToprovarError(f"{path}: {error.message}", error.hint) from None
    return plan


def save_plan(plan: Plan, path: Path) -> None:
    plan.check()
    write_json(path, plan.model_dump(mode="json", by_alias=True))
