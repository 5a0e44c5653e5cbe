"""Guidance on the logits of a pass, and how the published models set it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from toprovar.exporter.infinitystar.schedule import VideoSchedule
from toprovar.runtime.errors import ToprovarError

Kind = Literal["apg", "cfg"]


@dataclass(frozen=True)
class StarGuidance:
    """scale, tau: per map of the schedule, over all clips. kind: "apg" or classic "cfg".

    norm_threshold: apg: bound of the difference's root mean square; 0 for none
    eta:            apg: share that is kept of the difference's part along the conditional logits
    """

    scale: tuple[float, ...]
    tau: tuple[float, ...]
    kind: Kind = "apg"
    norm_threshold: float = 0.05
    eta: float = 0.0

    def __post_init__(self) -> None:
        if len(self.scale) != len(self.tau):
            raise ToprovarError(f"guidance has {len(self.scale)} scales and {len(self.tau)} temperatures")

    @property
    def uses_unconditional_row(self) -> bool:
        return any(value != 1 for value in self.scale)

    def mixed(self, logits: Tensor, entry: int) -> Tensor:
        """logits: [2B, L, n], already divided by tau, conditional rows first -> [B, L, n]."""
        conditional, unconditional = logits.chunk(2)
        scale = self.scale[entry]
        if scale == 1:
            return conditional
        if self.kind == "cfg":
            return scale * conditional + (1 - scale) * unconditional
        return torch.stack(
            [
                c + (scale - 1) * projected_difference(c, u, self.norm_threshold, self.eta)
                for c, u in zip(conditional, unconditional, strict=True)
            ]
        )


def projected_difference(conditional: Tensor, unconditional: Tensor, norm_threshold: float, eta: float) -> Tensor:
    """What adaptive projected guidance adds, before its factor; a whole map of one image counts as one vector.

    Source: Adaptive projected guidance (arXiv 2410.02416); FoundationVision/InfinityStar's use of it.
    """
    difference = conditional - unconditional
    if norm_threshold > 0:
        size = difference.norm() / difference.numel() ** 0.5
        difference = difference * torch.clamp(norm_threshold / size, max=1)
    wide, along = difference.double(), conditional.double()
    along = along / along.norm().clamp(min=1e-12)
    parallel = (wide * along).sum() * along
    return ((wide - parallel) + eta * parallel).to(difference.dtype)


def published_guidance(schedule: VideoSchedule, scale: float = 34.0) -> StarGuidance:
    """Temperature 1 for the image clip, 0.4 for the others."""
    count, first = len(schedule.entries), schedule.scales
    return StarGuidance((scale,) * count, (1.0,) * first + (0.4,) * (count - first))


def per_map(values: Sequence[float], schedule: VideoSchedule, what: str) -> tuple[float, ...]:
    """One value for all maps, or one each. Raises: ToprovarError for another number."""
    count = len(schedule.entries)
    if len(values) == 1:
        return tuple(values) * count
    if len(values) != count:
        raise ToprovarError(
            f"{what} has {len(values)} values; the schedule has {count} maps", f"give one value, or {count} of them"
        )
    return tuple(values)
