"""LD-Pruning: late scales run the tokens where the codes before had detail; guidance ends early (arXiv 2606.00310).

LHEP: as few tokens as hold a share of the Haar energy of the scale before's codes; the others repeat those codes.
SATS: guidance ends once conditional and unconditional logits stop drifting apart. The number of tokens differs from
picture to picture: at run time the smallest of a few prepared counts that is enough is taken (`adaptive`), or always
the count that was enough for nine of ten calibration prompts (`fixed`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from toprovar.calibrate.methods.common import keep_count, provenance, reach, skipped_scales, tokens_per_scale
from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.settings import MethodOptions, MethodSettings, options_of
from toprovar.calibrate.prompt_run import ENERGY_SHARES
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.decisions import Decision, EnergyMassDecision, SatsDecision
from toprovar.runtime.parts import Share
from toprovar.runtime.plan import MIN_PRUNED_TOKENS, Backbone, CfgStop, Plan, Restore, Score
from toprovar.runtime.version import VERSION

RUNGS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1)  # of a scale's tokens
ENOUGH = 90  # percentile of prompts whose need a fixed count covers


class LdPruningOptions(MethodOptions):
    """mass: share of the energy that runs; delta, norm, epsilon: of SATS (the paper's L2 norm grows with the map, RMS
    does not); counts: adaptive or fixed; lhep_scales, sats_scales: how many of the last scales they act at, 0 for none.
    """

    mass: Share = 0.5
    delta: Annotated[float, Field(ge=0)] = 0.15
    norm: Literal["rms", "l2"] = "rms"
    epsilon: Annotated[float, Field(gt=0)] = 1e-6
    counts: Literal["adaptive", "fixed"] = "adaptive"
    lhep_scales: Annotated[int, Field(ge=0, le=64)] = 3
    sats_scales: Annotated[int, Field(ge=0, le=64)] = 4


def ladder_of(tokens: int) -> tuple[int, ...]:
    """Counts of a scale to prepare, the last one all its tokens."""
    return tuple(sorted({keep_count(tokens, 1 - rung) for rung in RUNGS}))


def tokens_needed(stats: Statistics, scale: int, mass: float) -> np.ndarray:
    """[P] tokens of a scale that hold a share of the energy, linear between the shares that were measured."""
    measured = stats.measured("energy_tokens")[:, scale]
    return np.array([np.interp(mass, (0.0, *ENERGY_SHARES), (1.0, *row)) for row in measured])


def ld_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    options = options_of(LdPruningOptions, settings, "ld_pruning")
    if settings.target_speedup is None:
        return _plan(stats, backbone, settings, options, options.mass)
    return reach(
        settings.target_speedup,
        lambda strength: _plan(stats, backbone, settings, options, 1 - strength),
        "use --preset paper, or --set lhep_scales=4",
    )


def _plan(
    stats: Statistics, backbone: Backbone, settings: MethodSettings, options: LdPruningOptions, mass: float
) -> Plan:
    tokens, skip = tokens_per_scale(stats), skipped_scales(stats, settings, backbone)
    scales, last = len(tokens), len(tokens) - 1 - len(skip)
    keep, ladder, taken = {}, {}, {}
    for k in range(max(1, scales - options.lhep_scales), last + 1):
        if tokens[k] < MIN_PRUNED_TOKENS:
            continue
        needed = tokens_needed(stats, k, mass)
        rungs = ladder_of(tokens[k])
        if options.counts == "fixed":
            keep[k] = (keep_count(tokens[k], 1 - float(np.percentile(needed, ENOUGH)) / tokens[k]),) * backbone.layers
        else:
            taken[k] = [next(rung for rung in rungs if rung >= min(need, tokens[k])) for need in needed]
            keep[k], ladder[k] = (nearest_rung(rungs, float(np.mean(taken[k]))),) * backbone.layers, rungs
    sats = tuple(range(max(1, scales - options.sats_scales), last))  # behind the last scale nothing is left to drop
    decisions: list[Decision] = [EnergyMassDecision(mass=mass)] if ladder else []
    if sats:
        decisions.append(SatsDecision(scales=sats, delta=options.delta, norm=options.norm, epsilon=options.epsilon))
    score = Score(kind="code_energy", granularity="scale") if keep else Score()
    plan = Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=stats.schedule,
        method="ld_pruning",
        preset=settings.preset,
        skip_scales=skip,
        cfg_stop=CfgStop(mode="decided" if sats else "none"),
        score=score,
        keep=keep,
        ladder=ladder,
        restore=Restore(kind="prev_code") if keep else Restore(),
        decisions=tuple(decisions),
    )
    work = [prompt_work(plan, stats, p, {k: rungs[p] for k, rungs in taken.items()}) for p in range(len(stats.prompts))]
    facts = {"mass": round(mass, 6), "counts": options.counts}
    expected = round(sum(tokens) / float(np.mean(work)), 6)
    return plan.model_copy(update={"calib": provenance(stats, settings, settings=facts, expected_speedup=expected)})


def prompt_work(plan: Plan, stats: Statistics, prompt: int, taken: dict[int, int]) -> float:
    """TLE that a calibration prompt would have cost: its rungs, and the end of guidance by its dense run's gaps."""
    keep = dict(plan.keep) | {k: (count,) * plan.backbone.layers for k, count in taken.items()}
    changes: dict[str, object] = {"keep": keep, "ladder": {}}
    sats = plan.decision(SatsDecision)
    if sats is not None and stats.guidance_gap is not None:
        rms = stats.guidance_gap[prompt]
        counts = [taken.get(k, plan.counts(k)[0]) for k in range(plan.scales)]
        gaps = [sats.gap(float(v), n * plan.backbone.logits) for v, n in zip(rms, counts, strict=True)]
        ends = [k for k in sats.scales if sats.ends_guidance(gaps[k], gaps[k - 1])]
        changes["cfg_stop"] = CfgStop(mode="static", scale=ends[0] + 1) if ends else CfgStop()
    return plan.model_copy(update=changes).token_layer_equivalents


def nearest_rung(rungs: tuple[int, ...], count: float) -> int:
    return min(rungs, key=lambda rung: (abs(rung - count), rung))


LD_PRUNING = Method("LD-Pruning", ld_plan_from_stats, LdPruningOptions, reads=("preset",))
