"""VAR as ONNX graphs: the prompt's graph, and one per scale.

The arithmetic is that of transformer.py and generate.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.planned.index_step import IndexStep
from toprovar.exporter.planned.step import StepOptions
from toprovar.exporter.routes import Route
from toprovar.exporter.schedules import token_counts
from toprovar.exporter.var.config import VarConfig
from toprovar.exporter.weights_file import WeightsLayout


def prompt_graph(config: VarConfig, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
    """Classes to what the steps need; once per picture.

    Inputs:  labels [R] int64, conditional rows first; the null class is number `config.classes`
    Outputs: condition [1, R, C], head_modulation [2, R, C], modulation_## [6, R, C]
    """
    g = GraphBuilder("prompt", layout, options.compute)
    R, C = options.rows * options.images, config.width
    condition = g.Gather(g.weight("class_emb"), g.input("labels", (R,), "I64"), axis=0)  # [R, C]
    silu = g.Mul(condition, g.Sigmoid(condition))

    def pack(name: str, parts: int) -> ir.Value:
        made = g.Add(g.MatMul(silu, g.weight(name)), g.weight(f"{name}_bias"))
        return g.Transpose(g.reshape(made, (R, parts, C)), perm=[1, 0, 2])  # [parts, R, C]

    g.output(g.reshape(condition, (1, R, C)), "condition", (1, R, C))
    g.output(pack("head_ada", 2), "head_modulation", (2, R, C))
    shared = pack("ada_shared", 6) if config.shared_ada else None
    for layer in range(config.depth):
        if shared is not None:
            own = g.reshape(g.weight(f"layers.{layer}.ada_pack"), (6, 1, C))
            modulation = g.Add(own, shared)
        else:
            modulation = pack(f"layers.{layer}.ada", 6)
        g.output(modulation, f"modulation_{layer:02d}", (6, R, C))
    return g


def step_graph(config: VarConfig, route: Route, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
    """The graph of one route; that of a dense plan gives the dense step.

    Inputs:  condition [1, R, C] at scale 0, else codes [B, d, H, W]; head_modulation [2, R, C], modulation_##
             [6, R, C]; noise (and smooth_noise) [L, B, V] in [0, 1), cfg, tau [1], k_past_##, v_past_## [S, R, H, D];
             what plans need, as in docs/bundle.md
    Outputs: indices [L, B, 1] int32 (-1 where none was drawn), codes_next [B, d, H, W], k_new_##, v_new_##
             [n, R, H, D]; what plans leave
    """
    return _Step(config, route, layout, options).build()


class _Step(IndexStep):
    def __init__(self, config: VarConfig, route: Route, layout: WeightsLayout, options: StepOptions) -> None:
        super().__init__(config, route, layout, options)
        self.config = config
        self.packs: dict[int, list[ir.Value]] = {}

    def start(self) -> ir.Value:
        g, R, C = self.g, self.R, self.config.width
        first = sum(token_counts(self.schedule)[: self.scale])
        positions = g.reshape(g.weight("positions", (first, first + self.L)), (self.L, 1, C))
        self.head_modulation = g.input("head_modulation", (2, R, C))
        if self.scale == 0:
            return g.Add(g.input("condition", (1, R, C)), positions)
        embedded = g.MatMul(self.code_tokens(self.small_codes()), g.weight("word_embed"))
        return self.both(g.Add(embedded, positions))

    def _modulation(self, layer: int) -> list[ir.Value]:
        """gamma1, gamma2, 1 + scale1, 1 + scale2, shift1, shift2, each [1, R, C]."""
        if layer not in self.packs:
            pack = self.g.input(f"modulation_{layer:02d}", (6, self.R, self.config.width))
            self.packs[layer] = list(self.g.split(pack, 0, [1] * 6))
        return self.packs[layer]

    def block(self, layer: int, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        return self.part(layer, "ffn", self.part(layer, "attention", x, kept), kept)

    def part(self, layer: int, part: str, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        return self._self_attention(layer, x) if part == "attention" else self._feed_forward(layer, x)

    def _self_attention(self, layer: int, x: ir.Value) -> ir.Value:
        g, config = self.g, self.config
        p = f"layers.{layer}"
        gamma1, _, scale1, _, shift1, _ = self._modulation(layer)
        qkv = g.MatMul(g.modulated_norm(x, scale1, shift1), g.weight(f"{p}.qkv"))
        if config.cosine:
            shape = (self.route.counts[layer], 1, 1, config.head_width // 2)
            unturned = [g.full(np.float32(1), shape), g.full(np.float32(0), shape)]  # cosines and sines of no rotation
            operands = [qkv, g.weight(f"{p}.qkv_bias"), g.weight(f"{p}.scale_mul"), *unturned]
            q, k, v = g.custom("RotaryHeads", operands, outputs=3, heads=[config.heads])  # each [n, R, H, D]
        else:
            q, k, v = self.heads_of(g.Add(qkv, g.weight(f"{p}.qkv_bias")), "")
        o = g.reshape(self.attention(layer, q, k, v), (-1, self.R, config.width))
        return g.gated_residual(x, o, f"{p}.proj", gamma1)

    def _feed_forward(self, layer: int, x: ir.Value) -> ir.Value:
        g = self.g
        p = f"layers.{layer}"
        _, gamma2, _, scale2, _, shift2 = self._modulation(layer)
        inner = g.MatMul(g.modulated_norm(x, scale2, shift2), g.weight(f"{p}.fc1"))
        inner = g.custom("BiasGelu", [inner, g.weight(f"{p}.fc1_bias")])
        return g.gated_residual(x, inner, f"{p}.fc2", gamma2)

    def raw_logits(self, x: ir.Value, rows: int) -> ir.Value:
        g, modulation = self.g, self.head_modulation
        if rows < self.R:
            modulation = g.Slice(modulation, [0], [rows], [1])
        scale, shift = g.split(modulation, 0, [1, 1])
        return g.Add(g.MatMul(g.modulated_norm(x, scale, shift, "F32"), g.weight("head")), g.weight("head_bias"))
