"""One scale of Infinity as an ONNX graph; what plans do to it is written in planned/step.py.

The arithmetic is that of transformer.py and generate.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.infinity.config import InfinityConfig
from toprovar.exporter.planned.step import PlannedStep, StepOptions
from toprovar.exporter.resize_matrices import resize_pair
from toprovar.exporter.routes import Route
from toprovar.exporter.weights_file import WeightsLayout
from toprovar.runtime.plan import SUBLAYERS

BOOL = ir.DataType.BOOL.value


def step_graph(config: InfinityConfig, route: Route, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
    """The graph of one route; that of a dense plan gives the dense step.

    Inputs:  codes [B, d, H, W] (pooled_text [R, C] at scale 0), modulation [6, R, C], head_modulation [2, R, C],
             text_mask [R, T], cross_k_##, cross_v_## [T, R, H, D], noise [L, B, bits] in [0, 1),
             cfg, tau, bit_limit [1], k_past_##, v_past_## [S, R, H, D]; where the plan needs them: residual_ss_##
             [N_ss, R, C] of scale ss, score [B, L], codes_before [B, d, h, w] of the scale before
    Outputs: bits [L, B, bits] int32 (-1 where none was drawn), codes_next [B, d, H, W], k_new_##, v_new_##
             [n, R, H, D]; entropy_## [L], kept_##_n [n] int32 (with a leading B for several images), residual_ss_##
             [L, R, C],
             score_next [B, N'], own_codes [B, d, h, w], entropy_mean [B, L], guidance_gap [B]
    Raises:  ToprovarError where guidance inside layers meets a decision about guidance on logits
    """
    return _Step(config, route, layout, options).build()


class _Step(PlannedStep):
    drawn_name = "bits"
    sublayers = SUBLAYERS

    def __init__(self, config: InfinityConfig, route: Route, layout: WeightsLayout, options: StepOptions) -> None:
        self.config = config
        self.patch, self.columns = config.patch, config.bits
        super().__init__(config, route, layout, options)
        self.packs: dict[int, list[ir.Value]] = {}
        self.turned: dict[ir.Value | None, tuple[ir.Value, ir.Value]] = {}

    @property
    def noise_columns(self) -> int:
        return self.config.bits

    @property
    def value_columns(self) -> int:
        return self.config.bits

    @property
    def logit_columns(self) -> int:
        return 2 * self.config.bits

    def start(self) -> ir.Value:
        g, config, L, R = self.g, self.config, self.L, self.R
        if self.scale == 0:
            pooled = g.input("pooled_text", (R, config.width))
            x = g.Add(g.reshape(pooled, (1, R, config.width)), g.weight("lvl_bias", (0, 1)))
        else:
            x = self._embed(self.codes())
        self.modulation = g.input("modulation", (6, R, config.width))
        self.text_mask = g.input("text_mask", (R, self.options.text_tokens))
        self.head_modulation = g.input("head_modulation", (2, R, config.width))
        first = sum(h * w for h, w in self.schedule[: self.scale])
        cos, sin = (g.reshape(g.weight(f"rope_{part}", (first, first + L)), (L, 1, 1, -1)) for part in ("cos", "sin"))
        self.turned[None] = cos, sin
        return x

    def _embed(self, codes: ir.Value) -> ir.Value:
        """Accumulated codes -> [L, R, C]."""
        g, config = self.g, self.config
        small = g.resize(codes, *resize_pair("bilinear", self.full, self.map))  # [B, d, h*patch, w*patch]
        self.watch("next", small, (self.B, config.code_channels, *self.map))
        level = g.weight("lvl_bias", (self.scale, self.scale + 1))
        return self.both(g.Add(g.MatMul(self.code_tokens(small), g.weight("word_embed")), level))

    def code_tokens(self, small: ir.Value) -> ir.Value:
        """[B, d, h*patch, w*patch] -> [L, B, bits]."""
        g, config, B = self.g, self.config, self.B
        if config.patchify:
            small = g.reshape(small, (B, config.code_channels, self.height, 2, self.width, 2))
            small = g.Transpose(small, perm=[0, 1, 3, 5, 2, 4])  # [B, d, 2, 2, h, w]
        return g.Transpose(g.reshape(small, (B, config.bits, self.L)), perm=[2, 0, 1])

    def _angles(self, kept: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines at the tokens' original positions."""
        if kept not in self.turned:
            cos, sin = self.turned[None]
            self.turned[kept] = self._turn(cos, kept), self._turn(sin, kept)
        return self.turned[kept]

    def _turn(self, table: ir.Value, kept: ir.Value) -> ir.Value:
        """Cosines or sines [L, 1, 1, D/2] at the kept positions: [n, 1, 1, D/2] or [n, R, 1, D/2]."""
        g = self.g
        if self.is_shared():
            return g.Gather(table, kept, axis=0)
        half = self.config.head_width // 2
        return g.reshape(g.Gather(g.reshape(table, (self.L, half)), kept, axis=0), (-1, self.R, 1, half))

    def _modulated(self, layer: int) -> list[ir.Value]:
        """gamma1, gamma2, scale1, scale2, shift1, shift2 of a layer, each [1, R, C]."""
        g = self.g
        if layer not in self.packs:
            pack = g.Add(g.weight(f"layers.{layer}.ada_pack"), self.modulation)  # [6, R, C]
            self.packs[layer] = list(g.split(pack, 0, [1] * 6))
        return self.packs[layer]

    def block(self, layer: int, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        x = self._self_attention(layer, x, *self._angles(kept))
        return self._feed_forward(layer, self._cross_attention(layer, x))

    def part(self, layer: int, part: str, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        if part == "attention":
            return self._self_attention(layer, x, *self._angles(kept))
        return self._cross_attention(layer, x) if part == "cross" else self._feed_forward(layer, x)

    def _self_attention(self, layer: int, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """x with what self-attention adds to it."""
        g, config = self.g, self.config
        p = f"layers.{layer}"
        gamma1, _, scale1, _, shift1, _ = self._modulated(layer)
        qkv = g.MatMul(g.modulated_norm(x, scale1, shift1), g.weight(f"{p}.qkv"))
        operands = [qkv, g.weight(f"{p}.qkv_bias"), g.weight(f"{p}.scale_mul"), cos, sin]
        q, k, v = g.custom("RotaryHeads", operands, outputs=3, heads=[config.heads])  # each [n, R, H, D]
        o = g.reshape(self.attention(layer, q, k, v), (-1, self.R, config.width))
        return g.gated_residual(x, o, f"{p}.proj", gamma1)

    def _feed_forward(self, layer: int, x: ir.Value) -> ir.Value:
        """x with what the feed-forward layer adds to it."""
        g = self.g
        p = f"layers.{layer}"
        _, gamma2, _, scale2, _, shift2 = self._modulated(layer)
        inner = g.MatMul(g.modulated_norm(x, scale2, shift2), g.weight(f"{p}.fc1"))
        inner = g.custom("BiasGelu", [inner, g.weight(f"{p}.fc1_bias")])
        return g.gated_residual(x, inner, f"{p}.fc2", gamma2)

    def _cross_attention(self, layer: int, x: ir.Value) -> ir.Value:
        """x with what attention to the prompt adds to it. x: [n, R, C]."""
        g, config, R, T = self.g, self.config, self.R, self.options.text_tokens
        C, H, D = config.width, config.heads, config.head_width
        p = f"layers.{layer}"
        norm, shift = (g.reshape(g.weight(f"{p}.{name}"), (1, 1, C)) for name in ("cross_norm", "cross_norm_bias"))
        q = g.MatMul(g.modulated_norm(x, norm, shift), g.weight(f"{p}.cross_q"))
        q = g.reshape(g.Add(q, g.weight(f"{p}.cross_q_bias")), (-1, R, H, D))
        keys, values = (g.input(f"cross_{kind}_{layer:02d}", (T, R, H, D), self.cache_dtype) for kind in "kv")
        o = g.reshape(g.custom("MaskedAttention", [q, keys, values, self.text_mask], scale=D**-0.5), (-1, R, C))
        return g.gated_residual(x, o, f"{p}.cross_proj", g.constant(np.ones((1, 1, C), np.float32)))

    def raw_logits(self, x: ir.Value, rows: int) -> ir.Value:
        g, modulation = self.g, self.head_modulation
        if rows < self.R:
            modulation = g.Slice(modulation, [0], [rows], [1])
        scale, shift = g.split(modulation, 0, [1, 1])
        y = g.modulated_norm(x, g.Add(scale, np.float32(1)), shift, "F32")
        return g.Add(g.MatMul(y, g.weight("head")), g.weight("head_bias"))

    def draw(self, x: ir.Value, logits: ir.Value, drawn_at: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        g = self.g
        pairs = g.reshape(logits, (-1, self.B, self.config.bits, 2))
        limit = g.input("bit_limit", (1,))
        drawn = g.custom("BitSampler", [pairs, self.take_noise(drawn_at), limit])  # int32: TensorRT knows no uint8 here
        value = np.float32(self.config.code_channels**-0.5)
        return drawn, g.Where(g.Cast(drawn, to=BOOL), value, -value)

    def code_map(self, values: ir.Value) -> ir.Value:
        g, config, B = self.g, self.config, self.B
        code = g.Transpose(values, perm=[1, 2, 0])  # [B, bits, L]
        if config.patchify:
            code = g.reshape(code, (B, config.code_channels, 2, 2, self.height, self.width))
            code = g.Transpose(code, perm=[0, 1, 4, 2, 5, 3])  # [B, d, h, 2, w, 2]
        return g.reshape(code, (B, config.code_channels, *self.map))

    def contribution(self, code: ir.Value) -> ir.Value:
        return self.g.resize(code, *resize_pair("bilinear", self.map, self.full))
