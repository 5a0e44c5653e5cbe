"""The rules a plan must keep: each that is broken is one precise message. `Plan.check` runs them."""

from __future__ import annotations

from toprovar.runtime.decisions import EnergyMassDecision, RhoDecision, SatsDecision, SkipvarDecision
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import CARRIED_SCORES, COUNT_GRID, MIN_PRUNED_TOKENS, RESIDUALS, Plan

# what pruned positions can get, by how tokens are gathered
RESTORES = {
    "block": ("identity", *RESIDUALS),
    "sublayer": ("identity", *RESIDUALS),
    "scale": ("identity", "nn_kept", "prev_code", "zero_code"),
}
# how each score's tokens can be gathered
GRANULARITIES = {
    "none": ("block", "sublayer", "scale"),
    "entropy": ("block",),
    "variance": ("block", "sublayer", "scale"),
    "structure": ("scale",),
    "change": ("block", "scale"),
    "code_energy": ("block", "scale"),
}


def check_plan(plan: Plan) -> None:
    """Raises: ToprovarError for the first rule the plan breaks; the message names scale and layer."""
    _check_path(plan)
    _check_decisions(plan)
    _check_notes(plan)
    for name in plan.paths:
        try:
            _check_path(plan.on_path(name))
        except ToprovarError as error:
            raise ToprovarError(f"path {name}: {error.message}", error.hint) from None


def _check_path(plan: Plan) -> None:
    _check_skips(plan)
    _check_parts(plan)
    for scale, counts in plan.keep.items():
        _check_counts(plan, scale, counts)
    for scale, rungs in plan.ladder.items():
        _check_ladder(plan, scale, rungs)
    _check_sources(plan)
    if not plan.run_scales:
        raise ToprovarError("plan skips every scale", "leave at least scale 0 in")
    if not plan.token_layer_equivalents:
        raise ToprovarError("plan keeps no token in any layer", "leave at least one layer of one scale in")
    if plan.method == "dense" and (plan.skip_scales or any(plan.is_pruned(k) for k in plan.run_scales)):
        raise ToprovarError("plan of method dense prunes or skips", "name the method that the plan comes from")
    _check_restore(plan)
    _check_stop(plan)
    _check_weights(plan)


def _check_skips(plan: Plan) -> None:
    expected = tuple(range(plan.scales - len(plan.skip_scales), plan.scales))
    if plan.skip_scales != expected:
        raise ToprovarError(
            f"plan.skip_scales is {list(plan.skip_scales)}; expected the last scales in order, {list(expected)}",
            "only a suffix of the schedule can be skipped",
        )
    path = next((name for name, path in plan.paths.items() if path.skip_scales), None)
    if plan.backbone.needs_last_scale and (plan.skip_scales or path):
        where = f"path {path} skips scales" if path else f"plan.skip_scales is {list(plan.skip_scales)}"
        raise ToprovarError(
            f"{where}; expected none: the last scale of {plan.backbone.family} always runs, its residual head hangs on "
            "it",
            "choose a method that prunes tokens or layers",
        )


def _check_parts(plan: Plan) -> None:
    """Whether score, granularity and restore go together."""
    score, restore = plan.score, plan.restore.kind
    if score.granularity not in GRANULARITIES[score.kind]:
        raise ToprovarError(
            f"plan.score of kind {score.kind} has granularity {score.granularity}; expected "
            f"{' or '.join(GRANULARITIES[score.kind])}"
        )
    if restore not in RESTORES[score.granularity]:
        raise ToprovarError(
            f"plan.restore is {restore} where tokens are gathered per {score.granularity}; expected one of "
            f"{', '.join(RESTORES[score.granularity])}"
        )
    if score.row == "each" and (score.kind != "variance" or score.granularity == "scale"):
        raise ToprovarError("plan.score.row is each; only the variance score of a block or sub-layer has it")
    for scale in score.rotation:
        if scale >= plan.scales:
            raise ToprovarError(
                f"plan.score.rotation names scale {scale}; the schedule has scales 0 to {plan.scales - 1}"
            )


def _check_counts(plan: Plan, scale: int, counts: tuple[int, ...]) -> None:
    if scale >= plan.scales:
        raise ToprovarError(f"plan.keep names scale {scale}; the schedule has scales 0 to {plan.scales - 1}")
    if scale in plan.skip_scales:
        raise ToprovarError(f"plan.keep names scale {scale}, which plan.skip_scales leaves out")
    if len(counts) != plan.backbone.layers:
        raise ToprovarError(
            f"plan.keep at scale {scale} has {len(counts)} counts; the backbone has {plan.backbone.layers} layers"
        )
    if plan.score.granularity == "scale" and len(set(counts)) > 1:
        raise ToprovarError(
            f"plan keeps {min(counts)} to {max(counts)} tokens at scale {scale}, by layer; tokens are gathered per "
            "scale, so every layer must have the same count"
        )
    for layer, count in enumerate(counts):
        _check_count(plan, scale, layer, count)
    if plan.score.kind == "entropy":
        _check_entropy_gates(plan, scale, counts)


def _check_count(plan: Plan, scale: int, layer: int, count: int) -> None:
    tokens, where = plan.tokens(scale), f"scale {scale}, layer {layer}"
    if count > tokens:
        raise ToprovarError(f"plan keeps {count} tokens at {where}; the scale has {tokens}")
    if count == 0 and plan.score.granularity == "scale":
        raise ToprovarError(
            f"plan keeps no token at {where}; tokens are gathered per scale", "name the scale in skip_scales"
        )
    if count in (0, tokens):
        return
    if count % plan.grid or (plan.grid == COUNT_GRID and tokens < MIN_PRUNED_TOKENS):
        raise ToprovarError(
            f"plan keeps {count} of {tokens} tokens at {where}; expected 0, {tokens}, or a multiple of "
            f"{COUNT_GRID} on maps of at least {MIN_PRUNED_TOKENS} tokens"
        )
    if plan.score.kind == "none":
        raise ToprovarError(f"plan prunes at {where} without a score source", "name one in score.source_layer")
    if plan.score.kind in CARRIED_SCORES and scale == 0:
        raise ToprovarError(f"plan prunes at {where} by {plan.score.kind}, which only an earlier scale can give")


def _check_entropy_gates(plan: Plan, scale: int, counts: tuple[int, ...]) -> None:
    tokens, sources = plan.tokens(scale), plan.score.source_layer.get(scale, {})
    for layer, count in enumerate(counts):
        if count in (0, tokens):
            continue
        where = f"scale {scale}, layer {layer}"
        if layer not in sources:
            raise ToprovarError(f"plan prunes at {where} without a score source", "name one in score.source_layer")
        source = sources[layer]
        if source >= layer or counts[source] != tokens:
            raise ToprovarError(
                f"score source of {where} is layer {source}, which must come before it and run all {tokens} tokens"
            )


def _check_ladder(plan: Plan, scale: int, rungs: tuple[int, ...]) -> None:
    if scale >= plan.scales or scale in plan.skip_scales or scale == 0:
        raise ToprovarError(f"plan.ladder names scale {scale}; expected scales behind the first that run")
    if plan.score.granularity != "scale" or plan.score.kind not in CARRIED_SCORES:
        raise ToprovarError(
            f"plan.ladder needs a score that the scale before makes ({', '.join(CARRIED_SCORES)}), gathered per scale; "
            f"found {plan.score.kind} per {plan.score.granularity}"
        )
    if plan.decision(EnergyMassDecision) is None:
        raise ToprovarError(f"plan.ladder names scale {scale}; no energy_mass decision chooses from it")
    if not rungs or list(rungs) != sorted(set(rungs)) or rungs[-1] != plan.tokens(scale):
        raise ToprovarError(
            f"plan.ladder at scale {scale} is {list(rungs)}; expected rising counts without duplicates up to all "
            f"{plan.tokens(scale)} tokens"
        )
    for rung in rungs:
        _check_count(plan, scale, 0, rung)
    if plan.counts(scale)[0] not in rungs:
        raise ToprovarError(
            f"plan keeps {plan.counts(scale)[0]} tokens at scale {scale}, which is no rung of its ladder"
        )


def _check_sources(plan: Plan) -> None:
    for scale, sources in plan.score.source_layer.items():
        for layer, source in sources.items():
            if scale >= plan.scales or layer >= plan.backbone.layers or source >= layer:
                raise ToprovarError(
                    f"plan.score.source_layer names layer {source} for layer {layer} at scale {scale}; expected a "
                    f"scale below {plan.scales}, a layer below {plan.backbone.layers}, and a source before it"
                )
            if plan.score.kind != "entropy":
                raise ToprovarError(f"plan.score.source_layer belongs to the score entropy; found {plan.score.kind}")
            if scale in plan.run_scales and plan.counts(scale)[source] != plan.tokens(scale):
                raise ToprovarError(
                    f"score source of scale {scale}, layer {layer} is layer {source}, which must come before it and "
                    f"run all {plan.tokens(scale)} tokens"
                )


def _check_restore(plan: Plan) -> None:
    pruned = [k for k in plan.run_scales if plan.is_pruned(k)]
    if plan.restore.kind in ("prev_residual", "prev_code") and pruned and pruned[0] == 0:
        raise ToprovarError(f"plan.restore is {plan.restore.kind} and scale 0 is pruned; nothing comes before it")
    if plan.restore.kind != "cached_residual":
        return
    reference = plan.restore.ref_scale
    if reference is None or reference >= plan.scales or reference in plan.skip_scales:
        raise ToprovarError(f"plan.restore.ref_scale is {reference}; expected a scale that runs")
    if plan.is_pruned(reference):
        raise ToprovarError(f"plan.restore.ref_scale {reference} is pruned itself; it must be dense in all layers")
    if pruned and reference >= pruned[0]:
        raise ToprovarError(
            f"plan.restore.ref_scale {reference} runs after the first pruned scale {pruned[0]}; it must come before"
        )


def _check_stop(plan: Plan) -> None:
    stop = plan.cfg_stop
    if stop.mode == "static" and (stop.scale is None or stop.scale >= plan.scales):
        raise ToprovarError(f"plan.cfg_stop.scale is {stop.scale}; expected a scale from 0 to {plan.scales - 1}")
    if stop.mode != "static" and stop.scale is not None:
        raise ToprovarError(f"plan.cfg_stop names scale {stop.scale} in mode {stop.mode}; only static has one")
    if (plan.decision(SatsDecision) is not None) != (stop.mode == "decided"):
        raise ToprovarError(f"plan.cfg_stop has mode {stop.mode}; a sats decision and mode decided go together", "")


def _check_weights(plan: Plan) -> None:
    weight = plan.code_weight
    if weight.kind == "none" and weight.ramp:
        raise ToprovarError("plan.code_weight has a ramp and kind none")
    if weight.kind == "depth" and plan.score.kind != "change":
        raise ToprovarError(f"plan.code_weight of kind depth needs the score change; found {plan.score.kind}")
    for scale in weight.ramp:
        if scale >= plan.scales or not plan.is_pruned(scale):
            raise ToprovarError(f"plan.code_weight names scale {scale}, which the plan does not prune")


def _check_decisions(plan: Plan) -> None:
    kinds = [decision.kind for decision in plan.decisions]
    if len(set(kinds)) != len(kinds):
        raise ToprovarError(f"plan.decisions holds {', '.join(kinds)}; expected each kind once")
    rho, skipvar = plan.decision(RhoDecision), plan.decision(SkipvarDecision)
    sats, mass = plan.decision(SatsDecision), plan.decision(EnergyMassDecision)
    if rho and skipvar:
        raise ToprovarError("plan.decisions holds rho and skipvar; one of them can choose the path")
    if mass and not plan.ladder:
        raise ToprovarError("plan.decisions holds energy_mass without a ladder")
    if rho:
        _check_rho(plan, rho)
    if skipvar and not (
        0 < skipvar.scale < plan.scales - 1
        and skipvar.feature_scale <= skipvar.scale
        and skipvar.scale in plan.run_scales
    ):
        raise ToprovarError(
            f"skipvar decides after scale {skipvar.scale} at the map of scale {skipvar.feature_scale}; expected inner "
            f"scales of 0 to {plan.scales - 1}"
        )
    if sats and (
        list(sats.scales) != sorted(set(sats.scales)) or not 0 < sats.scales[0] <= sats.scales[-1] < plan.scales
    ):
        raise ToprovarError(
            f"sats decides after scales {list(sats.scales)}; expected rising scales without duplicates from 1 on"
        )
    entered = {name: scale for scale in range(plan.scales) for name in plan.entries(scale)}
    for name in entered.keys() - plan.paths.keys():
        raise ToprovarError(f"a decision leads to path {name}; plan.paths has {', '.join(plan.paths) or 'none'}")
    for name in plan.paths.keys() - entered.keys():
        raise ToprovarError(f"no decision leads to path {name}")
    for name, scale in entered.items():
        path = plan.on_path(name)
        for k in range(scale + 1):
            if path.counts(k) != plan.counts(k) or path.is_guided(k) != plan.is_guided(k) or k in path.skip_scales:
                raise ToprovarError(
                    f"path {name} is entered after scale {scale} and differs from the plan at scale {k} already"
                )


def _check_notes(plan: Plan) -> None:
    """What the plan only tells: R and class of every layer, and D."""
    for name, values in (("R", plan.layers.R), ("class", plan.layers.classes)):
        if len(values) not in (0, plan.backbone.layers):
            raise ToprovarError(
                f"plan.layers.{name} has {len(values)} values; the backbone has {plan.backbone.layers} layers"
            )
    if plan.D.value is not None and plan.D.value >= plan.scales:
        raise ToprovarError(f"plan.D is {plan.D.value}; the schedule has scales 0 to {plan.scales - 1}")


def _check_rho(plan: Plan, rho: RhoDecision) -> None:
    if plan.score.granularity == "sublayer":
        raise ToprovarError("rho averages the entropy of whole blocks; plan.score gathers tokens per sublayer")
    for scale in rho.paths:
        if scale not in plan.run_scales:
            raise ToprovarError(f"rho decides after scale {scale}, which the plan does not run")
        for layer in rho.layers:
            if layer >= plan.backbone.layers or plan.counts(scale)[layer] != plan.tokens(scale):
                raise ToprovarError(f"rho averages layer {layer} at scale {scale}; expected a layer that runs whole")
