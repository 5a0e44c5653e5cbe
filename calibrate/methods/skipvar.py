"""SkipVAR: a classifier decides, once per picture, how many scales to leave out or to run without guidance.

Features are the gradient change and the share of high frequencies of two small pictures, one scale apart; classes 1
to 3 of "skip" leave out that many of the last scales, classes 1 to 3 of "uncond" run that many on conditional rows
alone (arXiv 2506.08908). The published coefficients are for Infinity-2B; for other models both regressions are fitted
to the calibration prompts. The rule for their labels is unpublished; ours is the most aggressive class whose picture
stays as close to the full one as the threshold asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from toprovar.calibrate.methods.common import provenance, reach
from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.settings import MethodOptions, MethodSettings, options_of
from toprovar.calibrate.prompt_run import FEATURE_SCALE
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.decisions import LogisticModel, SkipvarDecision
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.json_files import read_json
from toprovar.runtime.parts import Index, Share
from toprovar.runtime.plan import Backbone, Plan, PlanPath
from toprovar.runtime.version import VERSION

PUBLISHED = Path(__file__).with_name("skipvar_published.json")
CLASSES = 3
DECISION_FROM_END = 4  # after 32x32, the tenth of 13 scales
PENALTY = 1.0  # of squared weights, as the published fit's library has by default
NEWTON_STEPS = 50
FEW_PROMPTS = 30


class SkipvarOptions(MethodOptions):
    """classifier: fit, or published (for Infinity-2B); threshold: SSIM to the full picture that a class must keep;
    decision_scale: 0-based scale behind which it is decided, the fourth from the end if left out."""

    classifier: Literal["fit", "published"] = "fit"
    threshold: Share = 0.84
    decision_scale: Annotated[Index | None, Field()] = None

    def largest(self, scales: int, layers: int) -> dict[str, int]:
        return {"decision_scale": scales - 2}


def skipvar_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    options = options_of(SkipvarOptions, settings, "skipvar")
    if settings.target_speedup is None:
        return _plan(stats, backbone, settings, options)
    if options.classifier == "published":
        if backbone.needs_last_scale:
            raise ToprovarError(
                f"the published classifier ends pictures early; the last scale of {backbone.family} always runs",
                "leave classifier out: one is fitted to the calibration prompts",
            )
        raise ToprovarError(
            "the published classifier has one strength; it cannot be fitted to a target", "use --set classifier=fit"
        )

    def at(strength: float) -> Plan:
        return _plan(stats, backbone, settings, options.model_copy(update={"threshold": 1 - strength}))

    return reach(settings.target_speedup, at, "set an earlier decision with --set decision_scale")


def published_models() -> tuple[LogisticModel, LogisticModel]:
    """The regressions "skip" and "uncond" as published, from JSON; nothing is unpickled."""
    facts = read_json(PUBLISHED)
    return LogisticModel.model_validate(facts["skip"]), LogisticModel.model_validate(facts["uncond"])


def fit_logistic(features: np.ndarray, labels: np.ndarray) -> LogisticModel:
    """Multinomial logistic regression with a squared penalty on weights, by Newton's method.

    features: [P, F]; labels: [P]. A single label gives a model that always answers it.
    """
    classes = sorted({int(label) for label in labels})
    mean, std = features.mean(0), features.std(0)
    std = np.where(std > 0, std, 1.0)
    x = np.hstack([(features - mean) / std, np.ones((len(features), 1))])  # [P, F + 1], intercept last
    K, width = len(classes), x.shape[1]
    y = np.array([[float(label == c) for c in classes] for label in labels])
    penalty = np.diag([PENALTY] * (width - 1) + [1e-6])  # the intercept is free but for a trace that keeps it unique
    w = np.zeros((K, width))
    for _ in range(NEWTON_STEPS if K > 1 else 0):
        scores = x @ w.T
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gradient = ((p - y).T @ x + w @ penalty).ravel()
        hessian = np.zeros((K * width, K * width))
        for a in range(K):
            for b in range(K):
                weight = p[:, a] * ((a == b) - p[:, b])
                block = (x * weight[:, None]).T @ x + (penalty if a == b else 0)
                hessian[a * width : (a + 1) * width, b * width : (b + 1) * width] = block
        step = np.linalg.solve(hessian, gradient).reshape(K, width)
        w -= step
        if np.abs(step).max() < 1e-10:
            break
    return LogisticModel(
        mean=tuple(round(float(v), 9) for v in mean),
        std=tuple(round(float(v), 9) or 1e-9 for v in std),
        weights=tuple(tuple(round(float(v), 9) for v in row[:-1]) for row in w),
        intercepts=tuple(round(float(row[-1]), 9) for row in w),
        labels=tuple(classes),
    )


def most_aggressive(ssim: np.ndarray, threshold: float) -> np.ndarray:
    """ssim: [P, CLASSES], of class 1, 2, ... -> [P] the largest class that reaches the threshold, 0 if none does."""
    fits = ssim >= threshold
    return np.where(fits, np.arange(1, ssim.shape[1] + 1), 0).max(1, initial=0)


def fit_models(
    stats: Statistics, decision: int, threshold: float, may_exit: bool = True
) -> tuple[LogisticModel, LogisticModel | None, list[str]]:
    """Both regressions from the calibration prompts, and what to warn of. may_exit: whether scales may be skipped."""
    scales = len(stats.schedule)
    features = stats.measured("frequency")[:, decision]
    classes = min(CLASSES, scales - 1 - decision)
    exits = np.stack([stats.truncated_ssim[:, scales - 1 - c] for c in range(1, classes + 1)], 1)
    skip_labels = most_aggressive(exits, threshold) if may_exit else np.zeros(len(exits), int)
    kept = skip_labels == 0  # "uncond" learns from what "skip" leaves alone, as the published one did
    warnings = []
    if len(stats.prompts) < FEW_PROMPTS:
        warnings.append(f"{len(stats.prompts)} prompts are few to fit a classifier; {FEW_PROMPTS} or more are advised")
    for label in range(classes + 1 if may_exit else 0):
        if not (skip_labels == label).any():
            warnings.append(f"no prompt has skip class {label} at SSIM {threshold:g}; the classifier never answers it")
    uncond = None
    if kept.any():
        conditional = stats.measured("conditional_ssim")
        stops = np.stack([conditional[kept, scales - c] for c in range(1, classes + 1)], 1)
        uncond = fit_logistic(features[kept], most_aggressive(stops, threshold))
    return fit_logistic(features, skip_labels), uncond, warnings


def _plan(stats: Statistics, backbone: Backbone, settings: MethodSettings, options: SkipvarOptions) -> Plan:
    scales = len(stats.schedule)
    decision = max(scales - DECISION_FROM_END, 1) if options.decision_scale is None else options.decision_scale
    if not FEATURE_SCALE < decision < scales - 1:
        raise ToprovarError(
            f"SkipVAR would decide after scale {decision}; expected {FEATURE_SCALE + 1} to {scales - 2}, behind the "
            "scale of its small pictures and before the last",
            "calibrate at a larger --budget, or set decision_scale",
        )
    if options.classifier == "published":
        if backbone.needs_last_scale:
            raise ToprovarError(
                f"the published classifier ends pictures early; the last scale of {backbone.family} always runs",
                "leave classifier out: one is fitted to the calibration prompts",
            )
        if scales - 1 - decision < CLASSES:
            raise ToprovarError(
                f"the published classifier has {CLASSES} classes; after scale {decision} only {scales - 1 - decision} "
                "scales are left",
                f"leave decision_scale out, or set at most {scales - 1 - CLASSES}",
            )
        skip, published = published_models()
        uncond: LogisticModel | None = published
        warnings = ["the published classifier was fitted to Infinity-2B; elsewhere its answers mean nothing"]
    else:
        skip, uncond, warnings = fit_models(stats, decision, options.threshold, not backbone.needs_last_scale)
    classes = range(1, min(CLASSES, scales - 1 - decision) + 1)
    skip_paths = {} if backbone.needs_last_scale else {c: f"exit after {scales - 1 - c}" for c in classes}
    uncond_paths = {c: f"conditional from {scales - c}" for c in classes} if uncond is not None else {}
    paths = {name: PlanPath(skip_scales=tuple(range(scales - c, scales))) for c, name in skip_paths.items()}
    paths |= {name: PlanPath(cfg_stop=scales - c) for c, name in uncond_paths.items()}
    chooser = SkipvarDecision(
        scale=decision,
        feature_scale=FEATURE_SCALE,
        skip=skip,
        uncond=uncond,
        skip_paths=skip_paths,
        uncond_paths=uncond_paths,
    )
    plan = Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=stats.schedule,
        method="skipvar",
        preset=settings.preset,
        paths=paths,
        decisions=(chooser,),
    )
    taken = [chooser.path(row) for row in stats.measured("frequency")[:, decision]]
    work = [(plan.on_path(name) if name else plan).token_layer_equivalents for name in taken]
    dense = plan.token_layer_equivalents
    facts = {"classifier": options.classifier, "threshold": round(options.threshold, 6)}
    calib = provenance(
        stats, settings, warnings, settings=facts, expected_speedup=round(dense / float(np.mean(work)), 6)
    )
    return plan.model_copy(update={"calib": calib})


SKIPVAR = Method("SkipVAR", skipvar_plan_from_stats, SkipvarOptions, needs=("conditional_ssim",))
