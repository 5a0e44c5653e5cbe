"""What images that took the same decisions carry from scale to scale, in PyTorch: the runtime's reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from toprovar.runtime.plan import Plan

Residual = tuple[int, int, str]  # scale, layer, "" or the sub-layer
Self = TypeVar("Self", bound="Prompt")


class Prompt(Protocol):
    """What a family's steps need of the prompts; constant over scales. R rows, the conditional ones first."""

    @property
    def rows(self) -> int: ...

    def take(self: Self, rows: Tensor) -> Self:
        """Some rows, in the order of `rows` [R'] int64."""


@dataclass
class Images:
    """B images of a batch, R rows: conditional rows, then (under guidance) unconditional ones.

    places:    which images of the batch they are
    plan:      the plan, or the path of it that was entered
    codes:     [B, d, H, W] accumulated
    x:         [R, L, C] input of the next scale
    k, v:      per layer [S, R, H, D]
    residuals: {(scale, layer, part): [R, N, C]}
    carried:   [B, N] score that the scale before made for the next one
    own_codes: [B, d, h, w] codes of the scale before, and before_last the accumulated codes before it
    gap:       [B] distance of conditional and unconditional logits at the scale before
    """

    places: list[int]
    plan: Plan | None
    prompt: Prompt
    guided: bool
    codes: Tensor
    x: Tensor
    k: list[Tensor]
    v: list[Tensor]
    residuals: dict[Residual, Tensor] = field(default_factory=dict)
    carried: Tensor | None = None
    own_codes: Tensor | None = None
    before_last: Tensor | None = None
    gap: list[float] | None = None

    @property
    def count(self) -> int:
        return len(self.places)

    def rows(self, per_image: Tensor) -> Tensor:
        """Every image's entry for each of its rows. [B, ...] -> [R, ...]."""
        return torch.cat([per_image, per_image]) if self.guided else per_image

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.k[layer] = torch.cat([self.k[layer], k])
        self.v[layer] = torch.cat([self.v[layer], v])

    def take(self, picks: list[int], guided: bool, plan: Plan | None) -> Images:
        """Some of the images; guided False leaves their unconditional rows behind."""
        if picks == list(range(self.count)) and guided == self.guided:
            self.plan = plan
            return self
        images = torch.tensor(picks, device=self.codes.device)
        rows = torch.cat([images, images + self.count]) if guided else images
        return Images(
            places=[self.places[i] for i in picks],
            plan=plan,
            prompt=self.prompt.take(rows),
            guided=guided,
            codes=self.codes[images],
            x=self.x[rows],
            k=[k[:, rows] for k in self.k],
            v=[v[:, rows] for v in self.v],
            residuals={key: value[rows] for key, value in self.residuals.items()},
            carried=None if self.carried is None else self.carried[images],
            own_codes=None if self.own_codes is None else self.own_codes[images],
            before_last=None if self.before_last is None else self.before_last[images],
            gap=None if self.gap is None else [self.gap[i] for i in picks],
        )


def new_images(
    prompt: Prompt,
    guided: bool,
    plan: Plan | None,
    x: Tensor,
    code_shape: tuple[int, ...],
    empty_cache: Tensor,
    depth: int,
) -> Images:
    """All images of a batch before scale 0. x: [R, L, C] its input; empty_cache: [0, R, H, D] of one layer."""
    count = prompt.rows // 2 if guided else prompt.rows
    return Images(
        places=list(range(count)),
        plan=plan,
        prompt=prompt,
        guided=guided,
        codes=torch.zeros(count, *code_shape, device=x.device),
        x=x,
        k=[empty_cache] * depth,
        v=[empty_cache] * depth,
    )
