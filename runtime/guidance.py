"""Classifier-free guidance and sampling temperature, per scale.

Source: Infinity (arXiv 2412.04431). `cfg*c + (1-cfg)*u` on logits that were divided by tau; insertion lists say
where rows are mixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from toprovar.runtime.errors import ToprovarError

Growth = Literal["none", "linear", "stale"]
LARGEST = 1000.0  # of cfg and tau
UNLIMITED = 1e4  # a logit no bit reaches: nothing is cut off


class Projection(BaseModel):
    """Adaptive projected guidance: a bounded difference of the rows, without its part along the conditional logits.

    norm_threshold: bound of the difference's root mean square; 0 for none
    eta:            share that is kept of the part along the conditional logits
    Source:         adaptive projected guidance (arXiv 2410.02416)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    norm_threshold: Annotated[float, Field(ge=0, le=1000)] = 0.05
    eta: Annotated[float, Field(ge=0, le=1000)] = 0.0


class Guidance(BaseModel):
    """How rows are mixed and tokens drawn.

    cfg, tau:  one value per scale
    top_p:     0 switches the cut off
    insertion: 0 = logits, -j = output of layer depth-j
    top_k:     candidates per scale of families that draw from a codebook; 0, or no list, keeps all
    smooth:    those families feed on means of codes instead of single codes
    growth:    how one number t stands for all scales: none: cfg = t; linear: cfg - 1 grows from 0 to t; stale:
               likewise, and the last scale keeps that of the one before (VAR and HART, whose papers speak of t)
    projection: of the rows' difference on logits; None for the plain one
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cfg: tuple[Annotated[float, Field(ge=0, le=LARGEST)], ...]
    tau: tuple[Annotated[float, Field(gt=0, le=LARGEST)], ...]
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.97
    insertion: tuple[Annotated[int, Field(le=0)], ...] = (0,)
    top_k: tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...] = ()
    smooth: bool = False
    growth: Growth = "none"
    projection: Projection | None = None

    @classmethod
    def growing(
        cls,
        cfg: Sequence[float],
        scales: int,
        growth: Growth,
        tau: Sequence[float] = (1.0,),
        top_p: float = 0.97,
        top_k: Sequence[int] = (0,),
        smooth: bool = False,
    ) -> Guidance:
        """One t for all scales, or the cfg of each. Raises: ToprovarError for another number of values."""
        return cls(
            cfg=grown(cfg, scales, growth),
            tau=per_scale(tuple(tau), scales, "tau"),
            top_p=top_p,
            top_k=tuple(int(k) for k in per_scale(tuple(top_k), scales, "top_k")),
            smooth=smooth,
            growth=growth,
        )

    @property
    def uses_unconditional_row(self) -> bool:
        return any(value != 1 for value in self.cfg)

    @property
    def mixes_logits(self) -> bool:
        return 0 in self.insertion

    def mixed_layers(self, depth: int) -> frozenset[int]:
        """Layers whose outputs are mixed."""
        return frozenset(depth + j for j in self.insertion if j < 0)

    def candidates(self, scale: int) -> int:
        """top_k of a scale; 0 keeps all."""
        return self.top_k[scale] if self.top_k else 0

    @property
    def bit_limit(self) -> float:
        """Log-odds from which on a bit is certain: top-p over two outcomes in closed form (top-k >= 2 is inert)."""
        if self.top_p == 0 or self.top_p == 1:
            return UNLIMITED
        return max(math.log(self.top_p / (1 - self.top_p)), 0.0)


def grown(values: Sequence[float], scales: int, growth: Growth, name: str = "cfg") -> tuple[float, ...]:
    """cfg of every scale: from one number by the family's growth, or as given for each scale.

    Raises: ToprovarError naming both counts, or for growth beyond what guidance can be.
    """
    if growth == "none" or len(values) != 1:
        return per_scale(tuple(values), scales, name)
    last = scales - 2 if growth == "stale" else scales - 1
    all_scales = tuple(1 + values[0] * min(scale, last) / max(scales - 1, 1) for scale in range(scales))
    if max(all_scales) > LARGEST:
        raise ToprovarError(
            f"{name}: {values[0]:g} grows to {max(all_scales):g}; expected at most {LARGEST:g}", f"write {name} 3"
        )
    return all_scales


def per_scale(values: list[float] | tuple[float, ...], scales: int, name: str) -> tuple[float, ...]:
    """One value is repeated for all scales; otherwise there must be one per scale.

    Raises: ToprovarError naming both counts.
    """
    if len(values) == 1:
        return tuple(values) * scales
    if len(values) != scales:
        raise ToprovarError(
            f"{name} has {len(values)} values; the schedule has {scales} scales", f"give one value, or {scales} of them"
        )
    return tuple(values)
