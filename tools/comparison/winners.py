"""Which plan is best among those that save so much, and which are not told apart from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from toprovar.tools.comparison.lineup import DENSE, TARGETS
from toprovar.tools.evaluation.intervals import bootstrap_interval, paired_difference

OURS = "toprovar"
SLACK = 0.97  # plans are fitted on other prompts and in whole blocks of 64 tokens: 3 % short of a floor still counts

Variant = Mapping[str, Any]
AXES: dict[str, Callable[[Variant], float]] = {
    "TLE": lambda variant: variant["tle"]["taken"],
    "wall-clock": lambda variant: variant["steps_ms"]["speedup"],
}


def _ssim_lead(best: Variant, other: Variant) -> tuple[float, float, float]:
    difference = np.array(best["raw"]["ssim"]) - np.array(other["raw"]["ssim"])
    low, high = bootstrap_interval(difference)
    return float(difference.mean()), low, high


def _adherence_lead(best: Variant, other: Variant) -> tuple[float, float, float]:
    answers = [[mark == "1" for mark in variant["raw"]["right"]] for variant in (best, other)]
    return paired_difference(*answers)


# {name: (value of a variant, lead of one over another with its interval)}
SCORES: dict[
    str, tuple[Callable[[Variant], float | None], Callable[[Variant, Variant], tuple[float, float, float]]]
] = {
    "SSIM": (lambda variant: variant["ssim"]["mean"], _ssim_lead),
    "adherence": (lambda variant: variant["adherence"]["share"] if variant["adherence"] else None, _adherence_lead),
}


def find_winners(variants: Sequence[Variant], floors: Sequence[float] = TARGETS) -> list[dict[str, Any]]:
    """One entry per axis, floor and score. Of equal values the faster one wins.

    A plan is not told apart from the best if the paired interval of its lag holds 0; `ours` is ToProVAR's best there.
    """
    found = []
    for axis, speed in AXES.items():
        for floor in floors:
            fast = [v for v in variants if v["name"] != DENSE and speed(v) >= SLACK * floor]
            for score, (value, lead) in SCORES.items():
                known = [v for v in fast if value(v) is not None]
                if not known:
                    continue
                order = sorted(known, key=lambda v: (-(value(v) or 0.0), -speed(v)))  # used at once
                best = order[0]
                ours = next((v for v in order if v["method"] == OURS), None)
                found.append(
                    {
                        "axis": axis,
                        "floor": floor,
                        "score": score,
                        "plans": len(known),
                        "best": _named(best, value, speed),
                        "not_told_apart": [v["name"] for v in order[1:] if lead(best, v)[1] <= 0],
                        "ours": None if ours is None else {**_named(ours, value, speed), **_lag(lead(best, ours))},
                    }
                )
    return found


def _named(
    variant: Variant, value: Callable[[Variant], float | None], speed: Callable[[Variant], float]
) -> dict[str, Any]:
    return {"name": variant["name"], "value": round(value(variant) or 0.0, 6), "speedup": speed(variant)}


def _lag(lead: tuple[float, float, float]) -> dict[str, Any]:
    return {"lag": round(lead[0], 6), "interval": [round(edge, 6) for edge in lead[1:]]}


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def sentence(entry: Mapping[str, Any]) -> str:
    """An entry in words."""
    best, ours = entry["best"], entry["ours"]
    start = (
        f"At {entry['floor']:g} times by {entry['axis']}, {best['name']} has the best {entry['score']} of "
        f"{counted(entry['plans'], 'plan')}: {best['value']:.3f} at {best['speedup']:.2f}"
    )
    ties, missing = entry["not_told_apart"], "" if ours else "; no ToProVAR plan is as fast"
    if len(ties) == entry["plans"] - 1 > 0:  # a name at the top of a list of equals says nothing
        return (
            f"At {entry['floor']:g} times by {entry['axis']}, {entry['score']} decides nothing: none of the "
            f"{entry['plans']} plans is told apart from the largest value, {best['value']:.3f}{missing}."
        )
    if ties:
        start += f", not told apart from {', '.join(ties)}"
    if ours is None:
        return f"{start}{missing}."
    if ours["name"] == best["name"]:
        return f"{start}."
    low, high = ours["interval"]
    told = "is not told apart" if low <= 0 else "is below"
    return (
        f"{start}; ToProVAR's best there, {ours['name']}, {told}: {ours['value']:.3f} at {ours['speedup']:.2f}, "
        f"lag {ours['lag']:.3f} [{low:.3f}, {high:.3f}]."
    )
