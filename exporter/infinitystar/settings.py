"""Guidance and temperature as the published models set them."""

from __future__ import annotations

from toprovar.exporter.infinitystar.schedule import VideoSchedule
from toprovar.runtime.guidance import Guidance, Projection

PUBLISHED_SCALE = 34.0
PUBLISHED_TAU = (1.0, 0.4)  # of the image clip, of the others


def published_guidance(schedule: VideoSchedule, scale: float = PUBLISHED_SCALE) -> Guidance:
    """One value per pass."""
    steps = schedule.passes()
    return Guidance(
        cfg=(scale,) * len(steps),
        tau=tuple(PUBLISHED_TAU[min(step.clip, 1)] for step in steps),
        top_p=0,
        projection=Projection(),
    )
