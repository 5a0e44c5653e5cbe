"""What a user may turn when a plan is fitted; every field has the default the docs describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MethodSettings:
    """preset:      "full" keeps every scale; "paper" also skips the last two, as the paper's 2B results imply
    tau:            threshold on rho; None fits it to the statistics
    direction:      which side of tau counts as settled; "auto" reads it off the calibration curve
    scale_depth:    D; None takes the mode over prompts. Pruning starts at D + 1
    beta:           steepness of R; None puts R = 1/2 at the split between Global and Detail
    global_layers:  how many layers stay dense, those with the largest sigma1/sigma2; None splits by Otsu's rule
    alpha_min, alpha_max: bounds of the pruning probability (ToProVAR eq. 6)
    phi_floor:      smallest phi(s) = s / S_max; 0 is the paper's ramp, 1 prunes late scales all alike
    target_speedup: token-layer speed-up to reach by stronger settings (toprovar.py says which); None leaves them alone
    restore:        what pruned positions get
    ssim_threshold: a truncated picture this close to the full one counts as settled
    """

    preset: Literal["full", "paper"] = "full"
    tau: float | None = None
    direction: Literal["auto", "le", "ge"] = "auto"
    scale_depth: int | None = None
    beta: float | None = None
    global_layers: int | None = None
    alpha_min: float = 0.0
    alpha_max: float = 0.9
    phi_floor: float = 0.0
    target_speedup: float | None = None
    restore: Literal["identity", "cached_residual"] = "cached_residual"
    resample: Literal["bilinear", "area"] = "bilinear"
    ssim_threshold: float = 0.8
