"""Statistics whose answers are known, for methods that are tested without a model."""

from __future__ import annotations

import numpy as np

from toprovar.calibrate.prompt_run import ENERGY_SHARES, guard_scale
from toprovar.calibrate.statistics import Statistics
from toprovar.exporter.schedules import schedule_for
from toprovar.runtime.plan import Backbone

FULL = schedule_for(1.0, "1M")
HART = tuple((side, side) for side in (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64))


def backbone_of(layers: int) -> Backbone:
    return Backbone(family="infinity", layers=layers, width=2048, heads=16, bits=32)


def statistics_of(schedule=FULL, layers: int = 32, prompts: int = 4, **changes) -> Statistics:
    """rho falls through 0.4 at the fourth scale from the end; six layers have a large sigma1/sigma2; a share m of the
    code energy is in a share m of the tokens; frequencies rise from prompt to prompt, closeness falls."""
    scales, guard = len(schedule), guard_scale(schedule)
    tokens = np.array([h * w for h, w in schedule], float)
    rho = np.clip(0.4 + 0.05 * (scales - 4 - np.arange(scales)), 0.2, 0.6)
    ratio = np.full(layers, 8.0)
    ratio[[0, 1, 2, layers // 2, layers - 2, layers - 1]] = 100.0
    truncated = np.full((prompts, scales), np.nan)
    conditional = np.full((prompts, scales), np.nan)
    for p in range(prompts):
        truncated[p, guard:] = np.linspace(0.95 - 0.05 * p, 1.0, scales - guard)
        conditional[p, -3:] = np.array([0.9, 0.95, 0.99]) - 0.04 * p
    energy = np.full((prompts, scales, len(ENERGY_SHARES)), np.nan)
    energy[:, 1:] = np.ceil(tokens[1:, None] * np.array(ENERGY_SHARES))
    frequency = np.full((prompts, scales, 2), np.nan)
    frequency[:, 5:] = (0.05 + 0.05 * np.arange(prompts))[:, None, None]
    values = {
        "schedule": schedule,
        "prompts": [f"prompt {i}" for i in range(prompts)],
        "seeds": list(range(prompts)),
        "rho": np.tile(rho, (prompts, 1)),
        "mean_entropy": np.ones((prompts, scales, layers)),
        "singular_ratio": np.tile(ratio, (prompts, 1)),
        "truncated_ssim": truncated,
        "shown": [],
        "digest": "0" * 64,
        "energy_tokens": energy,
        "frequency": frequency,
        "conditional_ssim": conditional,
    }
    return Statistics(**{**values, **changes})
