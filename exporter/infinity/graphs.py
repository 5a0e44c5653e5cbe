"""Infinity as ONNX graphs: prompt, one step per scale, decoder.

A step is a pure function with static shapes. Activations are time-major [L, R, C], so that new keys and values are
outputs in cache layout and a token gate is one gather. The block is written once, in `_block`; dense, gated and skipped
layers differ in what they pass to it. The arithmetic is that of transformer.py, generate.py and tokenizer.py; inputs
and outputs are described in docs/bundle.md.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.infinity.config import InfinityConfig
from toprovar.exporter.infinity.tokenizer import TokenizerConfig
from toprovar.exporter.resize_matrices import resize_pair
from toprovar.exporter.schedules import Schedule
from toprovar.exporter.weights_file import WeightsLayout
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.plan import Plan

INT32 = ir.DataType.INT32.value
DTYPE_NAME = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}


@dataclass(frozen=True)
class StepOptions:
    """How step graphs are built.

    rows:              2 with guidance (conditional, unconditional), 1 without
    text_tokens:       T, the length prompts are padded to
    compute:           fp32, fp16 or bf16
    mixes_logits:      guidance on logits
    mixed_layers:      layers whose outputs are mixed (guidance inside layers)
    watched:           names of intermediate values to add as outputs, as in the parity files ("block0", "raw", ...)
    gate_whole_layers: also sends gated layers that keep every token through gather and scatter (a test of that path)
    """

    rows: int = 2
    text_tokens: int = 64
    compute: str = "fp32"
    mixes_logits: bool = True
    mixed_layers: frozenset[int] = frozenset()
    watched: Collection[str] = ()
    gate_whole_layers: bool = False
    images: int = 1

    @classmethod
    def for_guidance(cls, guidance: Guidance, depth: int, text_tokens: int, compute: str = "fp32") -> StepOptions:
        """Options of a bundle that runs with this guidance: rows, and where they are mixed."""
        return cls(
            rows=2 if guidance.uses_unconditional_row else 1,
            text_tokens=text_tokens,
            compute=compute,
            mixes_logits=guidance.mixes_logits,
            mixed_layers=guidance.mixed_layers(depth),
        )


class _Step:
    """Builds the graph of one scale."""

    def __init__(
        self, config: InfinityConfig, plan: Plan, scale: int, layout: WeightsLayout, options: StepOptions
    ) -> None:
        self.config, self.plan, self.scale, self.options = config, plan, scale, options
        self.schedule: Schedule = plan.schedule
        self.height, self.width = self.schedule[scale]
        self.L = self.height * self.width
        self.R = options.rows * options.images
        self.B = options.images
        self.g = GraphBuilder(f"step_{scale:02d}", layout, options.compute)
        self.cache_dtype = DTYPE_NAME[self.g.compute]
        self.past = plan.cached_tokens(scale)
        patch = config.patch
        self.full = (self.schedule[-1][0] * patch, self.schedule[-1][1] * patch)
        self.map = (self.height * patch, self.width * patch)
        self.gates: dict[tuple[int, int], ir.Value] = {}
        self.entropy: dict[int, ir.Value] = {}

    def build(self) -> GraphBuilder:
        g, config, L, R, B = self.g, self.config, self.L, self.R, self.B
        C, bits = config.width, config.bits
        if self.scale == 0:
            start = g.input("pooled_text", (R, C))
            x = g.Add(g.reshape(start, (1, R, C)), g.weight("lvl_bias", (0, 1)))
        else:
            self.codes = g.input("codes", (B, config.code_channels, *self.full))
            x = self._embed(self.codes)
        self._watch("in", x, (L, R, C))
        self.modulation = g.input("modulation", (6, R, C))
        self.text_mask = g.input("text_mask", (R, 1, 1, self.options.text_tokens))
        head_modulation = g.input("head_modulation", (2, R, C))
        noise = g.input("noise", (L, B, bits))
        self.cfg, tau, limit = g.input("cfg", (1,)), g.input("tau", (1,)), g.input("bit_limit", (1,))
        self.cos = g.reshape(g.weight("rope_cos", self._positions()), (L, 1, 1, -1))
        self.sin = g.reshape(g.weight("rope_sin", self._positions()), (L, 1, 1, -1))
        for layer in range(config.depth):
            x = self._layer(layer, x)
        self._watch("blockN", x, (L, R, C))
        logits = self._logits(x, head_modulation, tau)
        drawn = self._draw(logits, noise, limit)  # [L, B, bits] bool
        g.output(g.Cast(drawn, to=INT32), "bits", (L, B, bits), "I32")  # TensorRT knows no uint8 here
        code = self._latent(drawn)
        summed = code if self.scale == 0 else g.Add(self.codes, code)
        g.output(summed, "codes_next", (B, config.code_channels, *self.full))
        for layer in self.plan.source_layers(self.scale):
            g.output(self.entropy[layer], f"entropy_{layer:02d}", (L,))
        for (source, count), indices in self.gates.items():
            g.output(g.Cast(indices, to=INT32), gate_name(source, count), (count,), "I32")
        return g

    def _positions(self) -> tuple[int, int]:
        start = sum(h * w for h, w in self.schedule[: self.scale])
        return start, start + self.L

    def _watch(self, name: str, value: ir.Value, shape: tuple[int, ...]) -> None:
        if name in self.options.watched:
            self.g.output(value, f"watch_{name}", shape)

    def _embed(self, codes: ir.Value) -> ir.Value:
        """Accumulated codes -> [L, R, C]."""
        g, config, B = self.g, self.config, self.B
        small = g.resize(codes, *resize_pair("bilinear", self.full, self.map))  # [B, d, h*patch, w*patch]
        self._watch("next", small, (B, config.code_channels, *self.map))
        if config.patchify:
            small = g.reshape(small, (B, config.code_channels, self.height, 2, self.width, 2))
            small = g.Transpose(small, perm=[0, 1, 3, 5, 2, 4])  # [B, d, 2, 2, h, w]
        tokens = g.reshape(small, (B, config.bits, self.L))
        tokens = g.Transpose(tokens, perm=[2, 0, 1])  # [L, B, bits]
        x = g.Add(g.MatMul(tokens, g.weight("word_embed")), g.weight("lvl_bias", (self.scale, self.scale + 1)))
        return g.Concat(x, x, axis=1) if self.options.rows == 2 else x

    def _layer(self, layer: int, x: ir.Value) -> ir.Value:
        """Whole, gated or skipped, as the plan says."""
        g, plan, scale = self.g, self.plan, self.scale
        R, C = self.R, self.config.width
        count = plan.counts(scale)[layer]
        sources = plan.score.source_layer.get(scale, {})
        before = x
        if count < self.L:
            x = self._restored(layer, x)
        if 0 < count < self.L or (count == self.L and layer in sources and self.options.gate_whole_layers):
            kept = self._gate(sources[layer], count)
            y = self._block(layer, g.Gather(before, kept, axis=0), g.Gather(self.cos, kept), g.Gather(self.sin, kept))
            x = g.ScatterND(x, g.reshape(kept, (count, 1)), y)
        elif count == self.L:
            x = self._block(layer, x, self.cos, self.sin)
        if layer in plan.residual_layers(scale):
            g.output(g.Sub(x, before), f"residual_{layer:02d}", (self.L, R, C))
        self._watch(f"block{layer}", x, (self.L, R, C))
        if layer in self.options.mixed_layers:
            mixed = self._mix(x)
            # cfg 1 leaves both rows as they are: the unconditional one goes on into the cache
            x = g.Where(g.Equal(self.cfg, np.ones(1, np.float32)), x, g.Concat(mixed, mixed, axis=1))
        return x

    def _gate(self, source: int, count: int) -> ir.Value:
        """Positions that run; one gate per source and count."""
        if (source, count) not in self.gates:
            self.gates[source, count] = self.g.custom("TokenGate", [self.entropy[source]], count=[count])
        return self.gates[source, count]

    def _restored(self, layer: int, x: ir.Value) -> ir.Value:
        """x with the reference scale's block residual, resampled to this map, where the plan asks for it."""
        g, plan, R, C = self.g, self.plan, self.R, self.config.width
        if plan.restore.kind == "identity":
            return x
        assert plan.restore.ref_scale is not None
        height, width = self.schedule[plan.restore.ref_scale]
        residual = g.input(f"residual_{layer:02d}", (height * width, R, C))
        rows, columns = resize_pair(plan.restore.resample, (height, width), (self.height, self.width))
        if columns is not None:  # along x: [h] batches of [w', w] @ [w, R*C]
            residual = g.MatMul(g.constant(columns), g.reshape(residual, (height, width, R * C)))
        if rows is not None:  # along y: [h', h] @ [h, w'*R*C]
            residual = g.MatMul(g.constant(rows), g.reshape(residual, (height, self.width * R * C)))
        return g.Add(x, g.reshape(residual, (self.L, R, C)))

    def _block(self, layer: int, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """One transformer block on n tokens. x: [n, R, C]; cos, sin: [n, 1, 1, D/2]."""
        g, config, R = self.g, self.config, self.R
        C, H, D = config.width, config.heads, config.head_width
        p = f"layers.{layer}"
        pack = g.Add(g.weight(f"{p}.ada_pack"), self.modulation)  # [6, R, C]
        gamma1, gamma2, scale1, scale2, shift1, shift2 = g.split(pack, 0, [1] * 6)
        y = g.Add(g.Mul(g.layer_norm(x, C), scale1), shift1)
        qkv = g.linear(y, f"{p}.qkv", f"{p}.qkv_bias")
        q, k, v = g.split(g.reshape(qkv, (-1, R, 3 * H, D)), 2, [H, H, H])  # each [n, R, H, D]
        q = g.Mul(self._unit(q), g.weight(f"{p}.scale_mul"))
        q, k = self._rotate(q, cos, sin), self._rotate(self._unit(k), cos, sin)
        o = self._attention(layer, g.narrow(q), g.narrow(k), v)
        o = g.linear(g.reshape(o, (-1, R, C)), f"{p}.proj", f"{p}.proj_bias")
        x = g.Add(x, g.Mul(g.f32(o), gamma1))
        y = g.LayerNormalization(
            x, g.weight(f"{p}.cross_norm"), g.weight(f"{p}.cross_norm_bias"), axis=-1, epsilon=1e-6
        )
        x = g.Add(x, g.f32(self._cross_attention(layer, y)))
        y = g.Add(g.Mul(g.layer_norm(x, C), scale2), shift2)
        y = g.Gelu(g.linear(y, f"{p}.fc1", f"{p}.fc1_bias"), approximate="tanh")
        return g.Add(x, g.Mul(g.f32(g.linear(y, f"{p}.fc2", f"{p}.fc2_bias")), gamma2))

    def _unit(self, x: ir.Value) -> ir.Value:
        """fp32 x / max(|x|, 1e-12) over the head width."""
        g = self.g
        x = g.f32(x)
        return g.Div(x, g.Max(g.ReduceL2(x, [-1], keepdims=1), np.float32(1e-12)))

    def _rotate(self, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        g, half = self.g, self.config.head_width // 2
        a, b = g.split(x, -1, [half, half])
        return g.Concat(g.Sub(g.Mul(a, cos), g.Mul(b, sin)), g.Add(g.Mul(a, sin), g.Mul(b, cos)), axis=-1)

    def _attention(self, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        """Self-attention over cache and new keys; the new ones are outputs in cache layout."""
        g, config, R = self.g, self.config, self.R
        count = self.plan.counts(self.scale)[layer]
        shape = (R, config.heads, config.head_width)
        k_past = g.input(f"k_past_{layer:02d}", (self.past[layer], *shape), self.cache_dtype)
        v_past = g.input(f"v_past_{layer:02d}", (self.past[layer], *shape), self.cache_dtype)
        inputs = [q, k, v, k_past, v_past]
        if layer in self.plan.source_layers(self.scale):
            o, entropy = g.custom("EntropyAttention", inputs, outputs=2, scale=1.0)
            self.entropy[layer] = g.reshape(g.Slice(entropy, [0], [1], [1]), (self.L,))  # conditional row
        else:
            o = g.custom("CachedAttention", inputs, scale=1.0)
        if self.scale < self.plan.run_scales[-1]:  # the last scale's keys are never read again
            g.output(k, f"k_new_{layer:02d}", (count, *shape), self.cache_dtype)
            g.output(v, f"v_new_{layer:02d}", (count, *shape), self.cache_dtype)
        return o

    def _cross_attention(self, layer: int, y: ir.Value) -> ir.Value:
        """Attention to the prompt. y: [n, R, C] -> [n, R, C]."""
        g, config, R, T = self.g, self.config, self.R, self.options.text_tokens
        C, H, D = config.width, config.heads, config.head_width
        p = f"layers.{layer}"
        keys = g.input(f"cross_k_{layer:02d}", (R, H, D, T), self.cache_dtype)
        values = g.input(f"cross_v_{layer:02d}", (R, H, T, D), self.cache_dtype)
        q = g.reshape(g.linear(y, f"{p}.cross_q", f"{p}.cross_q_bias"), (-1, R, H, D))
        q = g.Transpose(q, perm=[1, 2, 0, 3])  # [R, H, n, D]
        scores = g.Mul(g.f32(g.MatMul(q, keys)), np.float32(D**-0.5))
        weights = g.narrow(g.Softmax(g.Add(scores, self.text_mask), axis=-1))
        o = g.Transpose(g.MatMul(weights, values), perm=[2, 0, 1, 3])  # [n, R, H, D]
        return g.linear(g.reshape(o, (-1, R, C)), f"{p}.cross_proj", f"{p}.cross_proj_bias")

    def _mix(self, x: ir.Value) -> ir.Value:
        """cfg * conditional + (1 - cfg) * unconditional. x: [L, R, ...] -> [L, B, ...]."""
        g = self.g
        conditional, unconditional = g.split(x, 1, [self.B, self.B])
        rest = g.Sub(np.ones(1, np.float32), self.cfg)
        return g.Add(g.Mul(conditional, self.cfg), g.Mul(unconditional, rest))

    def _logits(self, x: ir.Value, modulation: ir.Value, tau: ir.Value) -> ir.Value:
        """Head in fp32, temperature, guidance. Returns: [L, B, 2*bits]."""
        g, config = self.g, self.config
        mixes = self.options.rows == 2 and self.options.mixes_logits
        rows = self.R if mixes else self.B
        if rows < self.R:  # mixed inside layers: only the conditional rows reach the head
            x = g.Slice(x, [0], [rows], [1])
            modulation = g.Slice(modulation, [0], [rows], [1])
        scale, shift = g.split(modulation, 0, [1, 1])
        y = g.Add(g.Mul(g.layer_norm(x, config.width), g.Add(scale, np.float32(1))), shift)
        raw = g.Add(g.MatMul(y, g.weight("head")), g.weight("head_bias"))
        self._watch("raw", raw, (self.L, rows, 2 * config.bits))
        logits = g.Div(raw, tau)
        if mixes:
            logits = self._mix(logits)
        self._watch("logits", logits, (self.L, self.B, 2 * config.bits))
        return logits

    def _draw(self, logits: ir.Value, noise: ir.Value, limit: ir.Value) -> ir.Value:
        """Bits in closed form: certain beyond the limit, else noise < sigmoid(odds)."""
        g = self.g
        zero, one = g.split(g.reshape(logits, (self.L, self.B, self.config.bits, 2)), -1, [1, 1])
        odds = g.reshape(g.Sub(one, zero), (self.L, self.B, self.config.bits))
        certain_zero = g.LessOrEqual(odds, g.Neg(limit))
        certain_one = g.GreaterOrEqual(odds, limit)
        chance = g.Where(certain_zero, np.float32(0), g.Sigmoid(odds))
        chance = g.Where(certain_one, np.float32(1), chance)
        return g.Less(noise, chance)

    def _latent(self, drawn: ir.Value) -> ir.Value:
        """Bits to codes on the full grid. drawn: [L, B, bits] bool -> [B, d, H, W]."""
        g, config, B = self.g, self.config, self.B
        value = np.float32(config.code_channels**-0.5)
        code = g.Where(drawn, value, -value)
        code = g.Transpose(code, perm=[1, 2, 0])  # [B, bits, L]
        if config.patchify:
            code = g.reshape(code, (B, config.code_channels, 2, 2, self.height, self.width))
            code = g.Transpose(code, perm=[0, 1, 4, 2, 5, 3])  # [B, d, h, 2, w, 2]
        code = g.reshape(code, (B, config.code_channels, *self.map))
        return g.resize(code, *resize_pair("bilinear", self.map, self.full))


def gate_name(source: int, count: int) -> str:
    """Output that holds the kept positions of all layers gated by `source` at this count."""
    return f"kept_{source:02d}_{count}"


def step_graph(
    config: InfinityConfig, plan: Plan, scale: int, layout: WeightsLayout, options: StepOptions
) -> GraphBuilder:
    """The graph of one scale under a plan; a dense plan gives the dense step.

    Inputs:  codes [B, d, H, W] (pooled_text [R, C] at scale 0), modulation [6, R, C], head_modulation [2, R, C],
             text_mask [R, 1, 1, T], cross_k_## [R, H, D, T], cross_v_## [R, H, T, D], noise [L, B, bits] in [0, 1),
             cfg, tau, bit_limit [1], k_past_##, v_past_## [S, R, H, D], residual_## [N_ref, R, C] where restored
    Outputs: bits [L, B, bits] int32, codes_next [B, d, H, W], k_new_##, v_new_## [n, R, H, D],
             entropy_## [L], kept_##_n [n] int32, residual_## [L, R, C] at the reference scale
    Raises:  ToprovarError for a pruned step of several images
    """
    if options.images > 1 and plan.is_pruned(scale):
        raise ToprovarError(
            f"a pruned step takes one image at a time; {options.images} were asked for at scale {scale}",
            "each image chooses its own tokens: export with one image and run the images in turn",
        )
    return _Step(config, plan, scale, layout, options).build()


def prompt_graph(config: InfinityConfig, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
    """Text rows to what the steps need; once per prompt.

    Inputs:  text_rows [R, T, text width] (conditional rows first), text_valid [R, T] float32, 1 on text, 0 on padding
    Outputs: pooled_text, modulation, head_modulation, text_mask, cross_k_##, cross_v_## as `step_graph` takes them
    """
    g = GraphBuilder("prompt", layout, options.compute)
    R, T, C = options.rows * options.images, options.text_tokens, config.width
    H, D, heads = config.heads, config.head_width, config.pool_heads
    rows = g.input("text_rows", (R, T, config.text_width))
    valid = g.input("text_valid", (R, T))
    mask = g.reshape(g.Mul(g.Sub(np.float32(1), valid), np.float32(-1e4)), (R, 1, 1, T))
    square = g.ReduceMean(g.Mul(rows, rows), [-1], keepdims=1)
    text = g.Mul(g.Div(rows, g.Sqrt(g.Add(square, np.float32(1e-6)))), g.weight("text_norm"))
    k = g.reshape(g.MatMul(text, g.weight("pool_k")), (R, T, heads, -1))
    v = g.reshape(g.Add(g.MatMul(text, g.weight("pool_v")), g.weight("pool_v_bias")), (R, T, heads, -1))
    q = g.reshape(g.weight("pool_q"), (1, heads, 1, -1))
    scores = g.Add(g.MatMul(q, g.Transpose(k, perm=[0, 2, 3, 1])), mask)  # [R, heads, 1, T]
    mixed = g.MatMul(g.Softmax(scores, axis=-1), g.Transpose(v, perm=[0, 2, 1, 3]))  # [R, heads, 1, C/heads]
    pooled = g.Add(g.MatMul(g.reshape(mixed, (R, C)), g.weight("pool_proj")), g.weight("pool_proj_bias"))
    silu = g.Mul(pooled, g.Sigmoid(pooled))
    pack = g.Add(g.MatMul(silu, g.weight("ada_shared")), g.weight("ada_shared_bias"))
    head = g.Add(g.MatMul(silu, g.weight("head_ada")), g.weight("head_ada_bias"))
    g.output(pooled, "pooled_text", (R, C))
    g.output(g.Transpose(g.reshape(pack, (R, 6, C)), perm=[1, 0, 2]), "modulation", (6, R, C))
    g.output(g.Transpose(g.reshape(head, (R, 2, C)), perm=[1, 0, 2]), "head_modulation", (2, R, C))
    g.output(mask, "text_mask", (R, 1, 1, T))
    hidden = g.Gelu(g.linear(text, "cross_text.0", "cross_text.0_bias"), approximate="tanh")
    cross = g.linear(hidden, "cross_text.2", "cross_text.2_bias")  # [R, T, C]
    for layer in range(config.depth):
        p = f"layers.{layer}"
        keys = g.reshape(g.linear(cross, f"{p}.cross_k"), (R, T, H, D))
        values = g.reshape(g.linear(cross, f"{p}.cross_v", f"{p}.cross_v_bias"), (R, T, H, D))
        dtype = DTYPE_NAME[g.compute]
        g.output(g.Transpose(keys, perm=[0, 2, 3, 1]), f"cross_k_{layer:02d}", (R, H, D, T), dtype)
        g.output(g.Transpose(values, perm=[0, 2, 1, 3]), f"cross_v_{layer:02d}", (R, H, T, D), dtype)
    return g


def decoder_graph(
    config: TokenizerConfig, size: tuple[int, int], layout: WeightsLayout, images: int = 1
) -> GraphBuilder:
    """Codes to picture, fp32. Input: codes [B, d, h, w]; output: image [B, 3, h*stride, w*stride] in [-1, 1]."""
    g = GraphBuilder("decoder", layout)
    height, width = size
    z = g.input("codes", (images, config.channels, height, width))

    def conv(x: ir.Value, name: str, kernel: int = 3) -> ir.Value:
        pad = kernel // 2
        return g.Conv(
            x,
            g.weight(f"{name}.conv.weight"),
            g.weight(f"{name}.conv.bias"),
            kernel_shape=[kernel, kernel],
            pads=[pad] * 4,
        )

    def norm_swish(x: ir.Value, name: str, channels: int, h: int, w: int) -> ir.Value:
        ones, zeros = np.ones(32, np.float32), np.zeros(32, np.float32)
        y = g.InstanceNormalization(g.reshape(x, (images, 32, -1)), ones, zeros, epsilon=1e-6)
        y = g.reshape(y, (images, channels, h, w))
        y = g.Add(g.Mul(y, g.weight(f"{name}.norm.weight")), g.weight(f"{name}.norm.bias"))
        return g.Mul(y, g.Sigmoid(y))

    def res_block(x: ir.Value, name: str, inputs: int, outputs: int, h: int, w: int) -> ir.Value:
        y = conv(norm_swish(x, f"{name}.norm1", inputs, h, w), f"{name}.conv1")
        y = conv(norm_swish(y, f"{name}.norm2", outputs, h, w), f"{name}.conv2")
        return g.Add(y, x if inputs == outputs else conv(x, f"{name}.nin_shortcut", 1))

    top = config.widths[-1]
    x = conv(z, "decoder.conv_in")
    for block in ("block_1", "block_2"):
        x = res_block(x, f"decoder.mid.{block}", top, top, height, width)
    current = top
    for level in reversed(range(len(config.widths))):
        for j in range(config.res_blocks + 1):
            x = res_block(x, f"decoder.up.{level}.block.{j}", current, config.widths[level], height, width)
            current = config.widths[level]
        if level > 0:
            x = g.reshape(x, (images, current, height, 1, width, 1))
            x = g.Expand(x, [images, current, height, 2, width, 2])
            height, width = 2 * height, 2 * width
            x = conv(g.reshape(x, (images, current, height, width)), f"decoder.up.{level}.upsample.conv")
    x = conv(norm_swish(x, "decoder.norm_out", current, height, width), "decoder.conv_out")
    if config.rgb_shortcut:
        colour = g.Conv(z, g.weight("rgb_shortcut.decode.weight"), kernel_shape=[1, 1])
        x = g.Add(x, g.resize(colour, *resize_pair("bilinear", size, (height, width))))
    g.output(g.Clip(x, np.float32(-1), np.float32(1)), "image", (images, 3, height, width))
    return g
