"""From judged pictures to the numbers that are published: shares with intervals, by bucket, and against dense."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from toprovar.tools.evaluation.frechet import Features, features_of, frechet_distance, half_width, resampled_distances
from toprovar.tools.evaluation.intervals import Z, mcnemar_p, paired_difference, wilson_interval
from toprovar.tools.evaluation.journal import Record
from toprovar.tools.evaluation.prompts import BUCKETS, SCENE_LAYOUTS, Prompt
from toprovar.tools.evaluation.scoring import ASPECTS
from toprovar.tools.train_demo.captions import Concept

ALL = "all"
INTERVALS = (
    "95 %: shares by Wilson; differences to dense over the same prompts and noise by Agresti and Min's adjusted Wald; "
    "Fréchet distances by 1.96 bootstrap standard deviations, 200 resamples of pictures; SSIM by 1.96 standard errors"
)
GROUPS: dict[str, Callable[[Prompt], bool]] = {
    **{bucket: lambda prompt, bucket=bucket: prompt.bucket == bucket for bucket in BUCKETS},  # type: ignore[misc]
    **{layout: lambda prompt, layout=layout: prompt.scene.layout == layout for layout in SCENE_LAYOUTS},  # type: ignore[misc]
    "seen": lambda prompt: not prompt.held_out,
    "held-out style": lambda prompt: prompt.held_out == "style",
    "held-out pair": lambda prompt: prompt.held_out == "pair",
}


def _holds(record: Record, aspect: str) -> bool | None:
    """Whether an aspect, or everything, is right; None where it was not asked for."""
    if aspect == ALL:
        return all(record.right.values())
    if aspect == "top5":
        return all(record.verdict["in_top5"])
    return record.right.get(aspect)


def _share(verdicts: Sequence[bool | None]) -> dict[str, Any] | None:
    asked = [verdict for verdict in verdicts if verdict is not None]
    if not asked:
        return None
    low, high = wilson_interval(sum(asked), len(asked))
    return {
        "right": sum(asked),
        "count": len(asked),
        "share": round(sum(asked) / len(asked), 6),
        "interval": [round(low, 6), round(high, 6)],
    }


def scores(records: Sequence[Record], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Shares of every aspect over all prompts, and of "everything right" and "concept" by group."""
    by_group = {}
    for group, belongs in GROUPS.items():
        mine = [record for record, prompt in zip(records, prompts, strict=True) if belongs(prompt)]
        if mine:
            by_group[group] = {aspect: _share([_holds(r, aspect) for r in mine]) for aspect in (ALL, "concept")}
    return {
        "aspects": {a: _share([_holds(r, a) for r in records]) for a in (ALL, *ASPECTS[:1], "top5", *ASPECTS[1:])},
        "groups": by_group,
        "swapped": sum(bool(record.verdict["swapped"]) for record in records),
    }


def frechet_facts(records: Sequence[Record], reference: Features, base: Sequence[Record] | None) -> dict[str, Any]:
    """Distance to the reference, and its difference to `base` over the same prompts; empty for too few crops."""
    own = [record.features for record in records]
    rows = np.concatenate(own)
    if len(own) < 2:
        return {}
    distance, resampled = frechet_distance(features_of(rows), reference), resampled_distances(own, reference)
    facts: dict[str, Any] = {
        "distance": round(distance, 5),
        "half_width": round(half_width(resampled), 5),
        "crops": len(rows),
        "reference_crops": reference.count,
    }
    if base is not None:
        theirs = [record.features for record in base]
        difference = distance - frechet_distance(features_of(np.concatenate(theirs)), reference)
        facts["to_dense"] = {
            "difference": round(difference, 5),
            "half_width": round(half_width(resampled - resampled_distances(theirs, reference)), 5),
        }
    return facts


def _mean(values: Sequence[float]) -> dict[str, float]:
    half = Z * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": round(statistics.mean(values), 6), "half_width": round(half, 6), "min": round(min(values), 6)}


def against_dense(records: Sequence[Record], dense: Sequence[Record]) -> dict[str, Any]:
    """What a plan changes, prompt by prompt with the same noise."""
    differences: dict[str, Any] = {}
    for aspect in (ALL, *ASPECTS):
        pairs = [(_holds(mine, aspect), _holds(base, aspect)) for mine, base in zip(records, dense, strict=True)]
        mine = [bool(own) for own, theirs in pairs if own is not None and theirs is not None]
        base = [bool(theirs) for own, theirs in pairs if own is not None and theirs is not None]
        if not mine:
            continue
        difference, low, high = paired_difference(mine, base)
        differences[aspect] = {
            "difference": round(difference, 6),
            "interval": [round(low, 6), round(high, 6)],
            "mcnemar_p": round(mcnemar_p(mine, base), 6),
        }
    return {
        "differences": differences,
        "ssim": _mean([record.ssim for record in records]),
        "psnr_db": _mean([record.psnr_db for record in records]),
        "wall_speedup": round(
            statistics.median(base.steps_ms / mine.steps_ms for mine, base in zip(records, dense, strict=True)), 4
        ),
    }


def answer_text(record: Record, concepts: Sequence[Concept]) -> str:
    """The judge's answers as one line: concepts / style / background / arrangement."""
    names = [concepts[i].name if i < len(concepts) else "nothing" for i in record.verdict["concepts"]]
    ground = "-".join((record.verdict["pattern"], *record.verdict["colours"]))
    return " / ".join((", ".join(names), record.verdict["style"], ground, record.verdict["arrangement"]))


def raw_verdicts(records: Sequence[Record], concepts: Sequence[Concept]) -> dict[str, Any]:
    """Per aspect one character per prompt (1 right, 0 wrong, - not asked), and every answer in words."""
    marks = {True: "1", False: "0", None: "-"}
    return {
        "right": {aspect: "".join(marks[_holds(record, aspect)] for record in records) for aspect in ASPECTS},
        "answers": [answer_text(record, concepts) for record in records],
    }


def variant_facts(
    records: Sequence[Record],
    dense: Sequence[Record] | None,
    prompts: Sequence[Prompt],
    concepts: Sequence[Concept],
    reference: Features,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """One entry of the result file. dense: the records to compare with; None for dense itself."""
    return {
        **about,
        "steps_ms_median": round(statistics.median(record.steps_ms for record in records), 3),
        **scores(records, prompts),
        "frechet": frechet_facts(records, reference, dense),
        "against_dense": against_dense(records, dense) if dense is not None else None,
        "verdicts": raw_verdicts(records, concepts),
    }
