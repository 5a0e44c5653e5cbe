"""The loop of families that draw indices of a codebook: VAR and HART."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch.nn.functional as F
from torch import Tensor

from toprovar.exporter.codebook import Quantizer, resize_down
from toprovar.exporter.index_sampling import draw_indices, mask_unlikely, soft_embeddings
from toprovar.exporter.planned.images import Images, Prompt
from toprovar.exporter.planned.loop import Config, LoopOptions, PlannedLoop
from toprovar.exporter.planned.restore import take_rows
from toprovar.exporter.schedules import Schedule
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance

P = TypeVar("P", bound=Prompt)


class DrawingNoise(Protocol):
    def indices(self, scale: int, tokens: int, vocabulary: int) -> Tensor:
        """[B, tokens, vocabulary] uniform in [0, 1)."""

    def smoothing(self, scale: int, tokens: int, vocabulary: int) -> Tensor:
        """[B, tokens, vocabulary] uniform in [0, 1), independent of `indices`."""


N = TypeVar("N", bound=DrawingNoise)


class IndexLoop(PlannedLoop[P], Generic[P, N]):
    """quantizer:      codebook and smoothing convolutions
    noise:          may be None where indices are forced and nothing else is random
    forced_indices: indices to use instead of drawn ones, per scale [B, L]
    forced_maps:    {scale: [B, d, n, n]} inputs of scales to use instead of the resized codes
    """

    def __init__(
        self,
        config: Config,
        quantizer: Quantizer,
        schedule: Schedule,
        guidance: Guidance,
        noise: N | None,
        forced_indices: Sequence[Tensor] | None,
        forced_maps: Mapping[int, Tensor] | None,
        options: LoopOptions,
    ) -> None:
        super().__init__(config, schedule, guidance, options)
        self.quantizer, self.noise = quantizer, noise
        self.forced_indices, self.forced_maps = forced_indices, forced_maps or {}
        if noise is None and (forced_indices is None or guidance.smooth):
            raise ToprovarError("this run draws something and was given no noise", "pass noise, or force the indices")

    @property
    def code_channels(self) -> int:
        return self.quantizer.channels

    @property
    def place(self) -> list[float]:
        """Of every scale, in 0..1."""
        return [scale / (len(self.schedule) - 1) for scale in range(len(self.schedule))]

    def resized(self, codes: Tensor, scale: int) -> Tensor:
        return self.forced_maps[scale] if scale in self.forced_maps else resize_down(codes, self.schedule[scale][0])

    def draw(
        self, group: Images, scale: int, x: Tensor, logits: Tensor, places: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        guidance, codebook = self.guidance, self.quantizer.embedding.weight
        masked = mask_unlikely(logits, guidance.candidates(scale), guidance.top_p)

        def of_these(whole: Tensor) -> Tensor:
            mine = whole.to(x.device)[places]
            return mine if kept is None else take_rows(mine, kept)

        L, V = self.tokens[scale], logits.shape[-1]
        if self.forced_indices is not None:
            indices = of_these(self.forced_indices[scale][..., None])
        else:
            assert self.noise is not None
            indices = draw_indices(masked, of_these(self.noise.indices(scale, L, V)))[..., None]
        tokens = codebook[indices[..., 0]]  # [B, n, d]
        if guidance.smooth:
            assert self.noise is not None
            tokens = soft_embeddings(masked, of_these(self.noise.smoothing(scale, L, V)), codebook, self.place[scale])
        return indices, tokens

    def code_map(self, values: Tensor, scale: int) -> Tensor:
        return values.transpose(1, 2).unflatten(-1, self.schedule[scale])

    def contribution(self, code: Tensor, scale: int) -> Tensor:
        tokens = code.flatten(2).transpose(1, 2)
        return self.quantizer.contribution(tokens, code.shape[-1], self.full[0], scale, len(self.schedule))

    def previous_values(self, code: Tensor, scale: int) -> Tensor:
        return F.interpolate(code, size=self.schedule[scale], mode="nearest").flatten(2).transpose(1, 2)
