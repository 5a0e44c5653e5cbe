"""The step of families that draw indices of a codebook, VAR and HART; the arithmetic is that of index_loop.py."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import onnx_ir as ir

from toprovar.exporter.codebook import RESIDUAL_SHARE, smoothing_index
from toprovar.exporter.index_sampling import SMALLEST_NOISE, smooth_temperature
from toprovar.exporter.planned.step import INT32, PlannedStep, Sizes, StepOptions
from toprovar.exporter.resize_matrices import resize_pair
from toprovar.exporter.routes import Route
from toprovar.exporter.weights_file import WeightsLayout

# finite, so that noise can still choose a masked index where a recording did
MASKED = np.float32(-3e38)


class IndexSizes(Sizes, Protocol):
    @property
    def vocabulary(self) -> int: ...

    @property
    def cosine(self) -> bool: ...


class IndexStep(PlannedStep):
    def __init__(self, config: IndexSizes, route: Route, layout: WeightsLayout, options: StepOptions) -> None:
        super().__init__(config, route, layout, options)
        self.vocabulary, self.is_cosine = config.vocabulary, config.cosine
        self.attention_scale = 1.0 if config.cosine else 0.25 / config.head_width**0.5
        self.is_last_scale = self.scale == len(self.schedule) - 1

    @property
    def noise_columns(self) -> int:
        return self.vocabulary

    @property
    def value_columns(self) -> int:
        return self.sizes.code_channels

    def small_codes(self) -> ir.Value:
        """Accumulated codes at this scale's size: mean over areas. Returns: [B, d, h, w]."""
        small = self.g.resize(self.codes(), *resize_pair("area", self.full, self.map))
        self.watch("next", small, (self.B, self.sizes.code_channels, *self.map))
        return small

    def heads_of(self, qkv: ir.Value, factor: str) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values, each [n, R, H, D], of the packed projection; unit q and k where the model has a
        learned factor."""
        g, H, D = self.g, self.sizes.heads, self.sizes.head_width
        q, k, v = g.split(g.reshape(qkv, (-1, self.R, 3 * H, D)), 2, [H] * 3)
        if self.is_cosine:
            q, k = g.Mul(self._unit(q), g.weight(factor)), self._unit(k)
        return q, k, v

    def _unit(self, x: ir.Value) -> ir.Value:
        g = self.g
        x = g.f32(x)
        return g.Div(x, g.Max(g.Sqrt(g.ReduceSum(g.Mul(x, x), [-1], keepdims=1)), np.float32(1e-12)))

    def draw(self, x: ir.Value, logits: ir.Value, drawn_at: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        g = self.g
        masked = self._masked(logits)
        indices = g.ArgMax(g.Add(masked, self._gumbel(self.take_noise(drawn_at))), axis=2, keepdims=1)  # [n, B, 1]
        drawn = g.Cast(indices, to=INT32)
        codes = g.Gather(g.weight("codebook"), g.Squeeze(indices, [2]), axis=0)  # [n, B, d]
        return drawn, self._soft(masked, drawn_at) if self.options.smooth else codes

    def _masked(self, logits: ir.Value) -> ir.Value:
        """top-k, then top-p. logits: [n, B, V]."""
        g, V = self.g, self.vocabulary
        top_k = self.options.candidates(self.scale)
        if 0 < top_k < V:
            values, _ = g.TopK(logits, [top_k], outputs=2, axis=-1)
            smallest = g.Slice(values, [top_k - 1], [top_k], [2])
            logits = g.Where(g.Less(logits, smallest), MASKED, logits)
        if self.options.top_p > 0:
            kept = top_k if 0 < top_k < V else V
            logits = g.Where(g.Less(logits, self._smallest_of_top_p(logits, kept)), MASKED, logits)
        return logits

    def _smallest_of_top_p(self, logits: ir.Value, candidates: int) -> ir.Value:
        """The least logit that top-p keeps: chances from it downwards sum to more than 1 - p. Returns: [n, B, 1].

        candidates: that can be alive; equal ones beyond them have the same logit as the last of them
        """
        g = self.g
        values, _ = g.TopK(logits, [candidates], outputs=2, axis=-1)  # descending
        below = g.CumSum(g.Softmax(values, axis=-1), np.int64(2), reverse=1)
        kept = g.Greater(below, np.float32(1 - self.options.top_p))
        smallest = g.ReduceMin(g.Where(kept, values, -MASKED), [2], keepdims=1)
        return g.Min(smallest, g.Slice(values, [0], [1], [2]))  # the largest always stays

    def _gumbel(self, noise: ir.Value) -> ir.Value:
        g = self.g
        return g.Neg(g.Log(g.Neg(g.Log(g.Max(noise, np.float32(SMALLEST_NOISE))))))

    def _soft(self, masked: ir.Value, drawn_at: ir.Value | None) -> ir.Value:
        """The smooth variant's tokens, means of codes. Returns: [n, B, d]."""
        g, place = self.g, self.scale / (len(self.schedule) - 1)
        noise = g.input("smooth_noise", (self.L, self.B, self.vocabulary))
        if drawn_at is not None:
            noise = self.take(noise, self.of_images(drawn_at), self.vocabulary, self.B)
        sharpened = g.Add(g.Mul(masked, np.float32(1 + place)), self._gumbel(noise))
        weights = g.Softmax(g.Div(sharpened, np.float32(smooth_temperature(place))), axis=-1)
        return g.MatMul(weights, g.weight("codebook"))

    def code_map(self, values: ir.Value) -> ir.Value:
        # in this order: TensorRT-RTX 1.7 fails on a convolution behind a transpose and then a reshape
        cells = self.g.reshape(values, (*self.map, self.B, self.value_columns))
        return self.g.Transpose(cells, perm=[2, 3, 0, 1])

    def code_tokens(self, small: ir.Value) -> ir.Value:
        flat = self.g.reshape(small, (self.B, self.value_columns, self.L))
        return self.g.Transpose(flat, perm=[2, 0, 1])

    def contribution(self, code: ir.Value) -> ir.Value:
        g, name = self.g, f"smoothing.{smoothing_index(self.scale, len(self.schedule), self._convolutions())}"
        grid = g.resize(code, *resize_pair("bicubic", self.map, self.full))
        convolved = g.Conv(grid, g.weight(name), g.weight(f"{name}_bias"), kernel_shape=[3, 3], pads=[1] * 4)
        share = np.float32(RESIDUAL_SHARE)
        return g.Add(g.Mul(grid, np.float32(1) - share), g.Mul(convolved, share))

    def _convolutions(self) -> int:
        names = self.g.layout.specs
        return sum(f"smoothing.{k}" in names for k in range(len(names)))
