"""From the pictures of a variant to the numbers that are published, with intervals over prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from toprovar.runtime.plan import Plan
from toprovar.tools.comparison.records import Drawn
from toprovar.tools.evaluation.intervals import (
    RESAMPLES,
    bootstrap_interval,
    mcnemar_p,
    paired_difference,
    wilson_interval,
)

INTERVALS = (
    f"95 %: SSIM, PSNR, work and speed-ups by percentile bootstrap over prompts ({RESAMPLES} resamples, PCG64 seed 0); "
    "adherence by Wilson; its difference to dense over the same prompts and noise by Agresti and Min's adjusted Wald"
)


def _rounded(value: float, digits: int = 6) -> float:
    return round(float(value), digits)


def work_facts(records: Sequence[Drawn], dense: Sequence[Drawn], plan: Plan | None) -> dict[str, Any]:
    """TLE speed-ups: the plan's own path, its mean over calibration prompts, its range, and what was really taken.

    Taken: dense work over the mean work of the pictures drawn.
    """
    full = statistics.mean(record.work_tokens for record in dense)
    mine = np.array([record.work_tokens for record in records])
    low, high = bootstrap_interval(mine)
    planned = plan.tle_speedup if plan else 1.0
    return {
        "planned": _rounded(planned, 4),
        "expected": _rounded(plan.expected_speedup if plan else 1.0, 4),
        "range": [_rounded(edge, 4) for edge in (plan.tle_range if plan else (1.0, 1.0))],
        "taken": _rounded(full / float(mine.mean()), 4),
        "interval": [_rounded(full / high, 4), _rounded(full / low, 4)],
        "is_decided_per_picture": bool(plan is not None and plan.decisions),
    }


def time_facts(records: Sequence[Drawn], dense: Sequence[Drawn]) -> dict[str, Any]:
    """Times of the scale steps, and the median over prompts of dense time over the variant's own."""
    own = np.array([record.steps_ms for record in records])
    ratios = np.array([base.steps_ms for base in dense]) / own
    return {
        "median": _rounded(np.median(own), 3),
        "p90": _rounded(np.percentile(own, 90), 3),
        "speedup": _rounded(np.median(ratios), 4),
        "interval": bootstrap_interval(ratios, np.median),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    own = np.array(values)
    return {"mean": _rounded(own.mean()), "interval": bootstrap_interval(own), "min": _rounded(own.min())}


def bit_facts(records: Sequence[Drawn], scales: int) -> dict[str, Any]:
    """Share of equal bits among those that were drawn, over all scales that ran and per scale; None where none ran.

    drawn: share of all bits of those scales that were drawn at all
    """
    totals = np.zeros((scales, 3), np.int64)
    for record in records:
        totals[: len(record.bits)] += np.array(record.bits, np.int64)
    equal, drawn, every = totals.sum(0).tolist()
    return {
        "share": _rounded(equal / drawn) if drawn else None,
        "drawn": _rounded(drawn / every),
        "per_scale": [_rounded(row[0] / row[1]) if row[1] else None for row in totals.tolist()],
    }


def adherence_facts(records: Sequence[Drawn], dense: Sequence[Drawn] | None) -> dict[str, Any] | None:
    """Share of pictures in which everything that was asked for is right, and its difference to dense."""
    mine = [record.all_right for record in records]
    if any(answer is None for answer in mine):
        return None
    right = [bool(answer) for answer in mine]
    low, high = wilson_interval(sum(right), len(right))
    facts: dict[str, Any] = {
        "right": sum(right),
        "count": len(right),
        "share": _rounded(sum(right) / len(right)),
        "interval": [_rounded(low), _rounded(high)],
        "to_dense": None,
    }
    if dense is not None:
        base = [bool(record.all_right) for record in dense]
        difference, low, high = paired_difference(right, base)
        facts["to_dense"] = {
            "difference": _rounded(difference),
            "interval": [_rounded(low), _rounded(high)],
            "mcnemar_p": _rounded(mcnemar_p(right, base)),
        }
    return facts


def raw_facts(records: Sequence[Drawn]) -> dict[str, Any]:
    """One value per picture, in the order of the prompts. right: 1, 0, or - where nothing is known."""
    marks = {True: "1", False: "0", None: "-"}
    return {
        "steps_ms": [record.steps_ms for record in records],
        "work_tokens": [record.work_tokens for record in records],
        "ssim": [record.ssim for record in records],
        "psnr_db": [record.psnr_db for record in records],
        "equal_bits": [sum(scale[0] for scale in record.bits) for record in records],
        "drawn_bits": [sum(scale[1] for scale in record.bits) for record in records],
        "right": "".join(marks[record.all_right] for record in records),
        "wrong_aspects": [[name for name, holds in (record.right or {}).items() if not holds] for record in records],
        "decisions": [[list(decision) for decision in record.decisions] for record in records],
    }


def variant_facts(
    records: Sequence[Drawn], dense: Sequence[Drawn], plan: Plan | None, about: dict[str, Any], scales: int
) -> dict[str, Any]:
    """One entry of the result file; plan: None for dense itself. Fewer scales run on some paths than on others."""
    per_scale = [[record.scale_ms[k] for record in records if k < len(record.scale_ms)] for k in range(scales)]
    return {
        **about,
        "tle": work_facts(records, dense, plan),
        "steps_ms": time_facts(records, dense),
        "scale_ms_median": [_rounded(statistics.median(times), 3) if times else None for times in per_scale],
        "ssim": _spread([record.ssim for record in records]),
        "psnr_db": _spread([record.psnr_db for record in records]),
        "equal_bits": bit_facts(records, scales),
        "adherence": adherence_facts(records, dense if plan is not None else None),
        "raw": raw_facts(records),
    }
