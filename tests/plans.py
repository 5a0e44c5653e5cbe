"""Plans of the tiny model (256 and 400 tokens at scales 4 and 5), one for each thing a plan can say."""

from __future__ import annotations

from conftest import SCHEDULE

from toprovar.exporter.schedules import schedule_for
from toprovar.runtime.decisions import EnergyMassDecision, LogisticModel, RhoDecision, SatsDecision, SkipvarDecision
from toprovar.runtime.plan import CfgStop, CodeWeight, Plan, PlanPath, Restore, Score

BLOCKS = {4: (256, 128, 64, 256), 5: (400, 192, 128, 0)}
WHOLE = {4: (128,) * 4, 5: (192,) * 4}
SOURCES = {4: {1: 0, 2: 0}, 5: {1: 0, 2: 0}}


def plan_of(model, method: str = "made", **parts) -> Plan:
    plan = Plan(backbone=model.backbone, schedule=SCHEDULE, method=method, **parts)
    plan.check()
    return plan


def by_scale(kind: str, restore: str, **score) -> dict:
    return {"score": Score(kind=kind, granularity="scale", **score), "keep": WHOLE, "restore": Restore(kind=restore)}


def logistic(intercepts: tuple[float, ...], labels: tuple[int, ...]) -> LogisticModel:
    weights = tuple((0.0, 0.0) for _ in labels)
    return LogisticModel(mean=(0.0, 0.0), std=(1.0, 1.0), weights=weights, intercepts=intercepts, labels=labels)


CACHED = Restore(kind="cached_residual", ref_scale=3)
PREVIOUS = Restore(kind="prev_residual", resample="area")
STATIC = {
    "entropy, stratified": {
        "score": Score(kind="entropy", source_layer=SOURCES, stratified=True),
        "keep": BLOCKS,
        "restore": Restore(kind="cached_residual", ref_scale=3, resample="area"),
    },
    "entropy, previous residual": {
        "score": Score(kind="entropy", source_layer=SOURCES),
        "keep": BLOCKS,
        "restore": PREVIOUS,
    },
    "variance": {"score": Score(kind="variance"), "keep": BLOCKS, "restore": CACHED},
    "variance, identity, first layer too": {"score": Score(kind="variance"), "keep": {5: (128, 64, 0, 400)}},
    "variance by sub-layer and row, off the grid": {
        "score": Score(kind="variance", granularity="sublayer", row="each"),
        "keep": {4: (256, 153, 0, 256), 5: (400, 199, 121, 0)},
        "grid": 1,
        "restore": Restore(kind="cached_residual", ref_scale=3, resample="area"),
    },
    "variance by sub-layer": {
        "score": Score(kind="variance", granularity="sublayer"),
        "keep": BLOCKS,
        "restore": PREVIOUS,
    },
    "variance by scale": by_scale("variance", "nn_kept"),
    "structure": by_scale("structure", "nn_kept"),
    "structure, input back": by_scale("structure", "identity", structure_weight=0.5, iterations=2),
    "structure, no codes": by_scale("structure", "zero_code", stratified=True),
    "change": {
        "score": Score(kind="change", rotation={4: 0.0, 5: 0.3}),
        "keep": {4: (192, 128, 64, 64), 5: (256, 0, 128, 64)},
        "restore": CACHED,
        "code_weight": CodeWeight(kind="depth", ramp={4: (0.2, 1.0), 5: (0.1, 0.9)}),
    },
    "change by scale": by_scale("change", "prev_code"),
    "code energy": by_scale("code_energy", "prev_code"),
    "guidance stops": {"cfg_stop": CfgStop(mode="static", scale=3)},
    "guidance stops, pruned": {
        "cfg_stop": CfgStop(mode="static", scale=4),
        "score": Score(kind="variance"),
        "keep": BLOCKS,
        "restore": CACHED,
    },
    "the last scale skipped": {
        "score": Score(kind="variance"),
        "keep": {4: BLOCKS[4]},
        "restore": CACHED,
        "skip_scales": (5,),
    },
}

RUNGS = {4: (64, 128, 192, 256), 5: (64, 128, 256, 400)}


def rho_parts(tau: float) -> dict:
    return {
        "score": Score(kind="entropy", source_layer=SOURCES),
        "restore": Restore(kind="cached_residual", ref_scale=3),
        "paths": {
            "D3": PlanPath(keep=BLOCKS, ref_scale=3),
            "D4": PlanPath(keep={5: BLOCKS[5]}, ref_scale=4),
        },
        "decisions": (RhoDecision(tau=tau, direction="le", layers=(0, 1, 2, 3), paths={3: "D3", 4: "D4"}),),
    }


def skipvar_parts(skip: int, uncond: int) -> dict:
    """Classifiers that always answer `skip`, and `uncond` behind class 0."""
    return {
        "cfg_stop": CfgStop(),
        "paths": {
            "exit after 4": PlanPath(skip_scales=(5,)),
            "exit after 3": PlanPath(skip_scales=(4, 5)),
            "conditional from 5": PlanPath(cfg_stop=5),
            "conditional from 4": PlanPath(cfg_stop=4),
        },
        "decisions": (
            SkipvarDecision(
                scale=3,
                feature_scale=2,
                skip=logistic(tuple(float(label == skip) for label in range(3)), (0, 1, 2)),
                uncond=logistic(tuple(float(label == uncond) for label in range(3)), (0, 1, 2)),
                skip_paths={1: "exit after 4", 2: "exit after 3"},
                uncond_paths={1: "conditional from 5", 2: "conditional from 4"},
            ),
        ),
    }


def mass_parts(mass: float, delta: float, norm: str = "rms") -> dict:
    return {
        **by_scale("code_energy", "prev_code"),
        "keep": {4: (128,) * 4, 5: (128,) * 4},
        "ladder": RUNGS,
        "cfg_stop": CfgStop(mode="decided"),
        "decisions": (EnergyMassDecision(mass=mass), SatsDecision(scales=(3, 4), delta=delta, norm=norm)),
    }


DECIDED = {
    "rho crosses early": rho_parts(0.9),
    "rho crosses never": rho_parts(0.01),
    "rho crosses in between": rho_parts(0.47),
    **{
        f"skipvar {skip}, {uncond}": skipvar_parts(skip, uncond)
        for skip, uncond in ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2))
    },
    "energy mass .3, guidance goes on": mass_parts(0.3, 0.0),
    "energy mass .6, guidance ends at once": mass_parts(0.6, 1e6),
    "energy mass .9, guidance decided, l2": mass_parts(0.9, 0.3, "l2"),
}
EVERY = {**STATIC, **DECIDED}


def full_size_plan(model):
    """Prunes the last three scales of the 1M schedule in 26 of 32 layers."""
    schedule = schedule_for(1.0, "1M")
    dense = {0, 1, 2, 15, 30, 31}
    keep, sources = {}, {}
    for k, count in ((10, 384), (11, 576), (12, 1024)):
        tokens = schedule[k][0] * schedule[k][1]
        keep[k] = tuple(tokens if layer in dense else count for layer in range(32))
        sources[k] = {layer: max(d for d in dense if d < layer) for layer in range(32) if layer not in dense}
    return Plan(
        backbone=model.backbone,
        schedule=schedule,
        method="toprovar",
        keep=keep,
        score=Score(kind="entropy", source_layer=sources),
        restore=Restore(kind="cached_residual", ref_scale=9),
    )
