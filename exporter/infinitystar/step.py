"""One pass of InfinityStar as an ONNX graph; what plans do to it is written in planned/step.py.

A scale of the plan is a pass. Repetitions of a map share their graph: the number of the pass is an input. Instead of a
cache there are the keys and values of the text and of the last map of the clip before. The arithmetic is that of
transformer.py, codes.py and guidance.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.infinitystar.config import InfinityStarConfig
from toprovar.exporter.infinitystar.graphs import (
    attention_operands,
    feed_forward,
    folded,
    rms_norm,
    unfolded,
)
from toprovar.exporter.infinitystar.rope import FIRST_PASS, frequencies
from toprovar.exporter.infinitystar.schedule import VideoSchedule
from toprovar.exporter.infinitystar.weights import map_rows
from toprovar.exporter.planned.step import PlannedStep, StepOptions
from toprovar.exporter.resize_matrices import bilinear_matrix, resize_pair
from toprovar.exporter.routes import Route
from toprovar.exporter.weights_file import WeightsLayout

BOOL = ir.DataType.BOOL.value


def step_graph(
    config: InfinityStarConfig,
    video: VideoSchedule,
    route: Route,
    layout: WeightsLayout,
    options: StepOptions,
) -> GraphBuilder:
    """The graph of one route; that of a dense plan gives the dense pass.

    Inputs:  codes [B, d, F*H, W] (not at pass 0), pass_index [1], noise [L, B, d] in [0, 1), cfg, tau, bit_limit [1],
             text_k_##, text_v_## [T, R, G, D] (any T up to the bundle's), context_k_ee_##, context_v_ee_## of map ee,
             the last one of the clip before; what plans need as of Infinity
    Outputs: bits [L, B, n] int32 (-1 where none was drawn), codes_next [B, d, F*H, W]; context_k_ee_##,
             context_v_ee_## [n, R, G, D] of the own map ee where later passes see it; what plans need as of Infinity
    """
    return _Step(config, video, route, layout, options).build()


class _Step(PlannedStep):
    drawn_name = "bits"

    def __init__(
        self,
        config: InfinityStarConfig,
        video: VideoSchedule,
        route: Route,
        layout: WeightsLayout,
        options: StepOptions,
    ) -> None:
        self.config, self.video, self.projection = config, video, options.projection
        self.passes = video.passes()
        self.own = self.passes[route.scale]
        self.columns = config.bits(self.own.is_semantic)
        self.attention_scale = config.head_width**-0.5
        super().__init__(config, route, layout, options)
        self.full = (video.frames * video.last[0], video.last[1])
        self.turned: dict[ir.Value | None, tuple[ir.Value, ir.Value]] = {}
        self.text: dict[tuple[str, int], ir.Value] = {}

    @property
    def noise_columns(self) -> int:
        return self.config.detail_bits

    @property
    def value_columns(self) -> int:
        return self.columns

    @property
    def logit_columns(self) -> int:
        return 2 * self.columns

    # -- the way in ------------------------------------------------------------------------------------------------

    def start(self) -> ir.Value:
        g, C = self.g, self.config.width
        if self.scale == 0:
            bias = g.reshape(g.weight("word_embed_bias"), (1, 1, C))
            x = g.Expand(bias, [self.L, self.R, C])  # a clip starts from zeros
        else:
            tokens = self.code_tokens(self._clip_on_map(self.codes()))
            x = self.both(g.Add(g.MatMul(tokens, g.weight("word_embed")), g.weight("word_embed_bias")))
        self.turned[None] = self._table("cos"), self._table("sin")
        T, (R, G, D) = self.options.text_tokens, (self.R, self.config.kv_heads, self.config.head_width)
        for layer in range(self.config.depth):
            for kind in "kv":
                name = f"text_{kind}_{layer:02d}"
                self.text[kind, layer] = g.input(name, (T, R, G, D), self.cache_dtype, is_open=True)
        return x

    def _clip_on_map(self, codes: ir.Value) -> ir.Value:
        """Accumulated codes of the own clip's frames on the own map. [B, d, F*H, W] -> [B, d, t*h, w]."""
        g, own, (H, W) = self.g, self.own, self.video.last
        first, frames = own.first_frame * H, own.frames
        clip = g.Slice(codes, [first], [first + frames * H], [2])
        shape = self.B, self.config.detail_bits
        small = g.resize(g.reshape(clip, (*shape, frames, H, W)), *resize_pair("area", (H, W), own.size))
        return g.reshape(small, (*shape, *own.flat))

    def code_tokens(self, small: ir.Value) -> ir.Value:
        return self.g.Transpose(self.g.reshape(small, (self.B, -1, self.L)), perm=[2, 0, 1])

    def _table(self, part: str) -> ir.Value:
        """Cosines or sines of all tokens, [L, 1, 1, D/2]: the axis of passes, then the table's three."""
        g, L, count = self.g, self.L, self.config.head_width // 8
        if part == "cos":
            place = g.Add(g.input("pass_index", (1,)), np.float32(FIRST_PASS))
            self.pass_angles = g.Mul(g.constant(frequencies(self.config.head_width)), place)  # [D/8]
        own = g.Cos(self.pass_angles) if part == "cos" else g.Sin(self.pass_angles)
        along = g.Expand(g.reshape(own, (1, count)), [L, count])
        whole = g.Concat(along, g.weight(f"rope_{part}", map_rows(self.video)[self.own.entry]), axis=1)
        return g.reshape(whole, (L, 1, 1, 4 * count))

    def _angles(self, kept: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines at the tokens' original positions."""
        if kept not in self.turned:
            cos, sin = self.turned[None]
            self.turned[kept] = self._turn(cos, kept), self._turn(sin, kept)
        return self.turned[kept]

    def _turn(self, table: ir.Value, kept: ir.Value) -> ir.Value:
        """[L, 1, 1, D/2] at the kept positions: [n, 1, 1, D/2] or [n, R, 1, D/2]."""
        g, half = self.g, self.config.head_width // 2
        if self.is_shared():
            return g.Gather(table, kept, axis=0)
        return g.reshape(g.Gather(g.reshape(table, (self.L, half)), kept, axis=0), (-1, self.R, 1, half))

    # -- blocks ------------------------------------------------------------------------------------------------------

    def block(self, layer: int, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        return feed_forward(self.g, layer, self.part(layer, "attention", x, kept))

    def part(self, layer: int, part: str, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        g = self.g
        if part == "ffn":
            return feed_forward(g, layer, x)
        q, k, v = attention_operands(g, self.config, layer, x, self.R, *self._angles(kept))
        return g.Add(x, g.f32(g.linear(self.attention(layer, q, k, v), f"layers.{layer}.proj")))

    def attention(self, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        """Over the context, the text and the own tokens. q: [n, R, H, D]; k, v: [n, R, G, D]. Returns: [n, R, H*D]."""
        g, config, R, count = self.g, self.config, self.R, self.route.counts[layer]
        inputs = [folded(g, config, q, R), k, v, self._past(layer, "k"), self._past(layer, "v")]
        if layer in self.plan.source_layers(self.scale) or layer in self.plan.rho_layers(self.scale):
            o, entropy = g.custom("EntropyAttention", inputs, outputs=2, scale=self.attention_scale)
            shared = g.reshape(entropy, (-1, config.heads // config.kv_heads, R))
            own = self.conditional(g.ReduceMean(shared, [1], keepdims=0))  # [n, B]
            self.entropy[layer] = g.Transpose(own, perm=[1, 0])
        else:
            o = g.custom("CachedAttention", inputs, scale=self.attention_scale)
        if self.own.keeps:
            for kind, value in (("k", k), ("v", v)):
                g.output(value, _context_name(kind, self.own.entry, layer), self._shape(count), self.cache_dtype)
        return unfolded(g, config, o, R)

    def _shape(self, tokens: int) -> tuple[int, ...]:
        return tokens, self.R, self.config.kv_heads, self.config.head_width

    def _past(self, layer: int, kind: str) -> ir.Value:
        g, text = self.g, self.text[kind, layer]
        if self.own.context is None or self.own.context_pass is None:
            return text
        source = self.passes[self.own.context_pass]
        is_open = is_context_open(self.route)
        count = source.tokens if is_open else self.plan.counts(source.index)[layer]
        if not count:
            return text
        name = _context_name(kind, self.own.context, layer)
        return g.Concat(g.input(name, self._shape(count), self.cache_dtype, is_open), text, axis=0)

    # -- the way out -------------------------------------------------------------------------------------------------

    def raw_logits(self, x: ir.Value, rows: int) -> ir.Value:
        g, head = self.g, "semantic_head" if self.own.is_semantic else "head"
        return g.Add(g.MatMul(rms_norm(g, x, "final_norm"), g.weight(head)), g.weight(f"{head}_bias"))

    def mixed_logits(self, logits: ir.Value) -> ir.Value:
        if self.projection is None:
            return self.mix(logits)
        g = self.g
        conditional, unconditional = g.split(logits, 1, [self.B, self.B])  # [n, B, V]
        difference = g.Sub(conditional, unconditional)
        if self.projection.norm_threshold > 0:
            square = g.ReduceMean(g.ReduceMean(g.Mul(difference, difference), [2], keepdims=1), [0], keepdims=1)
            share = g.Div(np.float32(self.projection.norm_threshold), g.Sqrt(square))
            difference = g.Mul(difference, g.Min(share, np.float32(1)))
        along = self._product(difference, conditional)
        size = g.Max(self._product(conditional, conditional), np.float32(1e-24))
        parallel = g.Mul(conditional, g.Div(along, size))
        difference = g.Sub(difference, g.Mul(parallel, np.float32(1 - self.projection.eta)))
        return g.Add(conditional, g.Mul(difference, g.Sub(self.cfg, np.float32(1))))

    def _product(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Inner product of whole maps, row by row so that fp32 sums stay short. [n, B, V] -> [1, B, 1]."""
        g = self.g
        return g.ReduceSum(g.ReduceSum(g.Mul(a, b), [2], keepdims=1), [0], keepdims=1)

    def draw(self, x: ir.Value, logits: ir.Value, drawn_at: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        g, count = self.g, self.columns
        pairs = g.reshape(logits, (-1, self.B, count, 2))
        noise = self.take_noise(drawn_at)
        if count < self.noise_columns:
            noise = g.Slice(noise, [0], [count], [2])
        drawn = g.custom("BitSampler", [pairs, noise, g.input("bit_limit", (1,))])
        value = np.float32(count**-0.5)
        return drawn, g.Where(g.Cast(drawn, to=BOOL), value, -value)

    def code_map(self, values: ir.Value) -> ir.Value:
        g = self.g
        return g.reshape(g.Transpose(values, perm=[1, 2, 0]), (self.B, self.columns, *self.own.flat))

    @property
    def map_channels(self) -> int:
        return self.columns

    def previous_values(self) -> ir.Value | None:
        """Codes of the pass before count where it has as many bits."""
        before = self.passes[self.scale - 1]
        return super().previous_values() if before.is_semantic == self.own.is_semantic else None

    def contribution(self, code: ir.Value) -> ir.Value:
        g, own, d, (H, W) = self.g, self.own, self.config.detail_bits, self.video.last
        if self.columns != d:  # linearly along the channels
            flat = g.reshape(code, (self.B, self.columns, self.L))
            code = g.MatMul(g.constant(bilinear_matrix(self.columns, d)), flat)
        frames = g.reshape(code, (self.B, d, own.frames, *own.size))
        large = g.reshape(g.resize(frames, *resize_pair("bilinear", own.size, (H, W))), (self.B, d, own.frames * H, W))
        before, after = own.first_frame, self.video.frames - own.first_frame - own.frames
        if not before and not after:
            return large
        return g.Pad(large, [0, 0, before * H, 0, 0, 0, after * H, 0], np.float32(0))


def is_context_open(route: Route) -> bool:
    """Whether decisions leave open how many tokens ran in the clip before."""
    return bool(route.plan.decisions or route.path)


def _context_name(kind: str, entry: int, layer: int) -> str:
    return f"context_{kind}_{entry:02d}_{layer:02d}"
