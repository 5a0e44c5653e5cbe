"""What is kept of every picture of a comparison, one line each, so that an interrupted one goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from toprovar.tools.evaluation.closeness import NO_INDEX, equal_bits, picture_distances
from toprovar.tools.evaluation.journal import LineJournal

if TYPE_CHECKING:
    import numpy as np

    from toprovar.runtime.pipeline import Result, StepRecord


@dataclass(frozen=True)
class Drawn:
    """A picture and how it was made.

    steps_ms:    the scales with sampling and decisions; text_ms: text encoder and prompt graph; decode_ms: decoder
    work_tokens: tokens through the whole depth (TLE) on the path really taken
    bits:        per scale that ran: equal to dense, drawn, all
    decisions:   (scale, what, value) as they were taken
    right:       per aspect of the judge; None where nothing is known about the prompt
    """

    prompt: int
    variant: str
    seed: int
    steps_ms: float
    text_ms: float
    decode_ms: float
    scale_ms: Sequence[float]
    work_tokens: float
    ssim: float
    psnr_db: float
    bits: Sequence[Sequence[int]]
    decisions: Sequence[Sequence[Any]]
    right: Mapping[str, bool] | None

    @property
    def all_right(self) -> bool | None:
        return None if self.right is None else all(self.right.values())


def work_of(steps: Sequence[StepRecord], layers: int) -> float:
    """Token-layer equivalents of the steps that ran; one without unconditional rows counts half, as in plans."""
    return sum((1.0 if step.guided else 0.5) * sum(step.counts) for step in steps) / layers


def drawn_from(
    result: Result,
    dense: Result,
    image: np.ndarray,
    dense_image: np.ndarray,
    layers: int,
    facts: Mapping[str, Any],
    right: Mapping[str, bool] | None,
) -> Drawn:
    """facts: prompt, variant, seed; right: the judge's answers."""
    times, distances = result.latency_ms, picture_distances(image, dense_image)
    return Drawn(
        **facts,
        steps_ms=round(times["steps"], 3),
        text_ms=round(times["text"] + times["prompt"], 3),
        decode_ms=round(times["decode"], 3),
        scale_ms=[round(step.latency_ms, 3) for step in result.steps],
        work_tokens=round(work_of(result.steps, layers), 4),
        ssim=distances["ssim"],
        psnr_db=distances["psnr_db"],
        bits=equal_draws(result, dense),
        decisions=[
            [scale, what, round(value, 6) if isinstance(value, float) else value]
            for scale, what, value in result.decisions
        ],
        right=None if right is None else dict(right),
    )


def equal_draws(result: Result, dense: Result) -> list[list[int]]:
    """Of bits, or of indices where the family has a codebook, as `equal_bits`."""
    if result.indices:
        return equal_bits(result.indices, dense.indices, NO_INDEX)
    return equal_bits(result.bits, dense.bits)


def _line(identity: str, record: Drawn) -> str:
    return json.dumps({"identity": identity, **asdict(record)}, allow_nan=False) + "\n"


def _record(text: str) -> tuple[str, Drawn]:
    facts = json.loads(text)
    identity = facts.pop("identity")
    return str(identity), Drawn(**facts)


class DrawnJournal(LineJournal[Drawn]):
    """Of `toprovar compare`."""

    what = "comparison"
    line = staticmethod(_line)
    record = staticmethod(_record)
