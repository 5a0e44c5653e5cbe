"""HART as ONNX graphs: the prompt's graph, one graph per scale; the last has the residual head behind its map.

Text and image angles differ from row to row, because image positions start at the prompt's last text position. The
arithmetic is that of transformer.py, generate.py and residual.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.hart.config import STEPS, HartConfig
from toprovar.exporter.hart.residual import RESIDUAL_FACTOR, diffusion_tables
from toprovar.exporter.hart.rope import BASE
from toprovar.exporter.planned.index_step import IndexStep
from toprovar.exporter.planned.step import StepOptions
from toprovar.exporter.routes import Route
from toprovar.exporter.weights_file import WeightsLayout


def _rms(g: GraphBuilder, x: ir.Value, weight: str) -> ir.Value:
    x = g.f32(x)
    square = g.ReduceMean(g.Mul(x, x), [-1], keepdims=1)
    return g.Mul(g.Div(x, g.Sqrt(g.Add(square, np.float32(1e-6)))), g.weight(weight))


def _wide(g: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    """x @ W + b in fp32."""
    return g.Add(g.MatMul(x, g.weight(name)), g.weight(f"{name}_bias"))


def _silu(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.Mul(x, g.Sigmoid(x))


def prompt_graph(config: HartConfig, layout: WeightsLayout, options: StepOptions) -> GraphBuilder:
    """Text rows to what the steps need; once per prompt.

    Inputs:  text_rows [R, T, text width] (unconditional rows are zeros), text_valid [R, T] float32, 1 on the prompt's
             own tokens (of an unconditional row the first), text_positions [R, T] float32
    Outputs: embedded, text_cos, text_sin [T, R, C or D], modulation [1, R, C], head_modulation [2, R, C],
             last_position [1, R]
    """
    g = GraphBuilder("prompt", layout, options.compute)
    R, T, C, D = options.rows * options.images, options.text_tokens, config.width, config.head_width
    rows = g.input("text_rows", (R, T, config.text_width))
    valid = g.reshape(g.input("text_valid", (R, T)), (R, T, 1))
    positions = g.Transpose(g.input("text_positions", (R, T)), perm=[1, 0])  # [T, R]
    embedded = _wide(g, _rms(g, rows, "context_norm"), "context_embed")
    total = g.ReduceSum(g.Mul(embedded, valid), [1], keepdims=0)
    mean = g.Div(total, g.ReduceSum(valid, [1], keepdims=0))  # [R, C]
    largest = g.ReduceMax(embedded, [1], keepdims=0)
    head = _wide(g, _silu(g, largest), "head_ada")
    frequencies = 1.0 / BASE ** (np.arange(0, D, 2, dtype=np.float32) / D)
    angles = g.Mul(g.reshape(positions, (T, R, 1)), g.constant(np.tile(frequencies, 2)))
    g.output(g.Transpose(embedded, perm=[1, 0, 2]), "embedded", (T, R, C))
    g.output(g.Cos(angles), "text_cos", (T, R, D))
    g.output(g.Sin(angles), "text_sin", (T, R, D))
    g.output(g.reshape(mean, (1, R, C)), "modulation", (1, R, C))
    g.output(g.Transpose(g.reshape(head, (R, 2, C)), perm=[1, 0, 2]), "head_modulation", (2, R, C))
    g.output(g.Slice(positions, [T - 1], [T], [0]), "last_position", (1, R))
    return g


def step_graph(
    config: HartConfig,
    route: Route,
    layout: WeightsLayout,
    options: StepOptions,
    residual: bool = True,
    steps: int = STEPS,
) -> GraphBuilder:
    """The graph of one route; the first scale runs the text along, the last one the residual head.

    residual: whether there is a residual head; steps: its reverse steps
    Inputs:  embedded, text_cos, text_sin [T, R, ...] at scale 0, else codes [B, d, H, H] and last_position [1, R];
             modulation [1, R, C], head_modulation [2, R, C]; noise (and smooth_noise) [N, B, V] in [0, 1); cfg,
             tau [1]; k_past_##, v_past_## [S, R, heads, D]; at the last scale residual_start [N, B, d] and
             residual_noise [steps - 1, N, B, d], standard normal; what plans need, as in docs/bundle.md
    Outputs: indices [N, B, 1] int32 (-1 where none was drawn), codes_next [B, d, H, H], k_new_##, v_new_##
             [n, R, heads, D]; what plans leave
    """
    return _Step(config, route, layout, options, residual, steps).build()


class _Step(IndexStep):
    def __init__(
        self,
        config: HartConfig,
        route: Route,
        layout: WeightsLayout,
        options: StepOptions,
        residual: bool,
        steps: int,
    ) -> None:
        super().__init__(config, route, layout, options)
        self.config, self.has_residual, self.steps = config, residual, steps
        self.along = options.text_tokens - 1 if self.scale == 0 else 0  # the last text token draws the first map
        self.turned: dict[ir.Value | None, tuple[ir.Value, ir.Value]] = {}

    def start(self) -> ir.Value:
        g, C, R, D = self.g, self.config.width, self.R, self.config.head_width
        self.modulation = g.input("modulation", (1, R, C))
        self.head_modulation = g.input("head_modulation", (2, R, C))
        if self.scale == 0:
            T = self.options.text_tokens
            cos, sin = (g.reshape(g.input(f"text_{part}", (T, R, D)), (T, R, 1, D)) for part in ("cos", "sin"))
            self.turned[None] = cos, sin
            return g.Add(g.input("embedded", (T, R, C)), g.weight("lvl_bias", (0, 1)))
        self.turned[None] = self._image_angles(g.input("last_position", (1, R)))
        tokens = g.MatMul(self.code_tokens(self.small_codes()), g.weight("word_embed"))
        return self.both(g.Add(tokens, g.weight("lvl_bias", (self.scale, self.scale + 1))))

    def _image_angles(self, last_position: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines [L, R, 1, D]: the first half of a head takes the row, the second the column."""
        g, D, side, last = self.g, self.config.head_width, self.height, self.full[0]
        steps = np.arange(side, dtype=np.float32) / np.float32(side) * np.float32(last)
        frequencies = 1.0 / BASE ** (np.arange(0, D, 4, dtype=np.float32) / D)  # [D/4]
        places = g.Add(g.constant(steps.reshape(side, 1)), last_position)  # [side, R]
        angles = g.Mul(g.reshape(places, (side, self.R, 1)), g.constant(frequencies))  # [side, R, D/4]

        def spread(part: ir.Value) -> ir.Value:
            shape = [side, side, self.R, D // 4]
            rows = g.Expand(g.reshape(part, (side, 1, self.R, D // 4)), shape)
            columns = g.Expand(g.reshape(part, (1, side, self.R, D // 4)), shape)
            return g.reshape(g.Concat(rows, rows, columns, columns, axis=3), (self.L, self.R, 1, D))

        return spread(g.Cos(angles)), spread(g.Sin(angles))

    def _angles(self, kept: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """At the tokens' original positions, [n, R, 1, D]."""
        if kept not in self.turned:
            cos, sin = self.turned[None]
            self.turned[kept] = self._turn(cos, kept), self._turn(sin, kept)
        return self.turned[kept]

    def _turn(self, table: ir.Value, kept: ir.Value) -> ir.Value:
        """table: [L, R, 1, D]."""
        g, R, D = self.g, self.R, self.config.head_width
        return g.reshape(self.take(g.reshape(table, (self.L, R, D)), kept, D), (-1, R, 1, D))

    def block(self, layer: int, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        return self.part(layer, "ffn", self.part(layer, "attention", x, kept), kept)

    def part(self, layer: int, part: str, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        g, p = self.g, f"layers.{layer}"
        pack = g.Add(g.weight(f"{p}.ada_pack"), self.modulation)  # [6, R, C]
        gamma1, gamma2, scale1, scale2, shift1, shift2 = g.split(pack, 0, [1] * 6)
        if part == "attention":
            y = self._modulated(x, f"{p}.norm", scale1, shift1)
            q, k, v = self.heads_of(g.linear(y, f"{p}.qkv", f"{p}.qkv_bias"), f"{p}.scale_mul")
            q, k = (g.narrow(self._rotated(each, *self._angles(kept))) for each in (q, k))
            o = g.reshape(self.attention(layer, q, k, v), (-1, self.R, self.config.width))
            return g.gated_residual(x, o, f"{p}.proj", gamma1)
        y = self._modulated(x, f"{p}.norm", scale2, shift2)
        inner = g.Mul(_silu(g, g.linear(y, f"{p}.gate")), g.linear(y, f"{p}.up"))
        return g.Add(x, g.Mul(g.f32(g.linear(inner, f"{p}.down")), gamma2))

    def _modulated(self, x: ir.Value, weight: str, scale: ir.Value, shift: ir.Value) -> ir.Value:
        g = self.g
        return g.Add(g.Mul(_rms(g, x, weight), g.Add(scale, np.float32(1))), shift)

    def _rotated(self, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """x: [n, R, heads, D]; element i is paired with i + D/2."""
        g, half = self.g, self.config.head_width // 2
        first, second = g.split(x, 3, [half, half])
        return g.Add(g.Mul(x, cos), g.Mul(g.Concat(g.Neg(second), first, axis=3), sin))

    def raw_logits(self, x: ir.Value, rows: int) -> ir.Value:
        g, modulation = self.g, self.head_modulation
        if rows < self.R:
            modulation = g.Slice(modulation, [0], [rows], [1])
        scale, shift = g.split(modulation, 0, [1, 1])
        return _wide(g, self._modulated(x, "head_norm", scale, shift), "head")

    def draw(self, x: ir.Value, logits: ir.Value, drawn_at: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        drawn, values = super().draw(x, logits, drawn_at)
        if self.is_last_scale and self.has_residual:
            indices = self.g.Squeeze(drawn, [2])
            codes = self.g.Gather(self.g.weight("codebook"), indices, axis=0)
            values = self.g.Add(values, self._residual(x, codes, drawn_at))
        return drawn, values

    def contribution(self, code: ir.Value) -> ir.Value:
        """The last map is taken as it is."""
        return code if self.is_last_scale else super().contribution(code)

    # -- residual head -------------------------------------------------------------------------------------------------

    def _residual(self, x: ir.Value, tokens: ir.Value, drawn_at: ir.Value | None) -> ir.Value:
        """All reverse steps for the conditional rows; the unconditional ones only lend their noise prediction.

        x: [n, R, C] behind the last block; tokens: [n, B, d] drawn codes, at the positions `drawn_at`.
        Returns: [n, B, d].
        """
        g, B, d, N, R = self.g, self.B, self.config.code_channels, self.L, self.R
        embedded = _wide(g, self.both(tokens), "word_embed")
        z = _rms(g, g.Add(x, embedded), "decoder_norm")
        self.watch("diff/z", z, (N, R, self.config.width))
        condition = _wide(g, z, "residual.cond")  # [N, R, W]
        state = g.input("residual_start", (N, B, d))
        steps = self.steps
        noises = [
            g.reshape(noise, (N, B, d))
            for noise in g.split(g.input("residual_noise", (steps - 1, N, B, d)), 0, [1] * (steps - 1))
        ]
        if drawn_at is not None:
            kept = self.of_images(drawn_at)
            state, noises = self.take(state, kept, d, B), [self.take(noise, kept, d, B) for noise in noises]
        tables = diffusion_tables(steps)
        for used, step in enumerate(reversed(range(steps))):
            y = _silu(g, g.Add(condition, g.weight("residual.times", (step, step + 1))))
            out = self._network(self.both(state), y)  # [N, R, 2d]
            predicted, variance = g.split(out, 2, [d, d])
            predicted = self._mixed(predicted)
            x0 = g.Sub(g.Mul(state, np.float32(tables.x0_x[step])), g.Mul(predicted, np.float32(tables.x0_noise[step])))
            x0 = g.Clip(x0, np.float32(-1), np.float32(1))
            state = g.Add(g.Mul(x0, np.float32(tables.mean_x0[step])), g.Mul(state, np.float32(tables.mean_x[step])))
            if step:
                if self.route.guided:
                    variance, _ = g.split(variance, 1, [B, B])
                share = g.Mul(g.Add(variance, np.float32(1)), np.float32(0.5))
                rest = g.Sub(np.float32(1), share)
                log_variance = g.Add(
                    g.Mul(share, np.float32(tables.log_high[step])), g.Mul(rest, np.float32(tables.log_low[step]))
                )
                deviation = g.Exp(g.Mul(log_variance, np.float32(0.5)))
                state = g.Add(state, g.Mul(deviation, noises[used]))
        result = g.Mul(state, np.float32(RESIDUAL_FACTOR))
        self.watch("diff/out", result, (N, B, d))
        return result

    def _mixed(self, x: ir.Value) -> ir.Value:
        return self.mix(x) if self.route.guided else x

    def _network(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x: [N, R, d]; y: [N, R, W] behind SiLU. Returns: [N, R, 2d]."""
        g, W = self.g, self.config.residual_width
        ones, zeros = np.ones(W, np.float32), np.zeros(W, np.float32)
        h = _wide(g, x, "residual.input")
        for j in range(self.config.residual_depth):
            p = f"residual.blocks.{j}"
            shift, scale, gate = g.split(_wide(g, y, f"{p}.ada"), 2, [W] * 3)
            normal = g.LayerNormalization(h, g.weight(f"{p}.norm"), g.weight(f"{p}.norm_bias"), epsilon=1e-6)
            inner = g.Add(g.Mul(normal, g.Add(scale, np.float32(1))), shift)
            inner = _silu(g, _wide(g, inner, f"{p}.mlp.0"))
            h = g.Add(h, g.Mul(gate, _wide(g, inner, f"{p}.mlp.2")))
        shift, scale = g.split(_wide(g, y, "residual.ada"), 2, [W] * 2)
        normal = g.LayerNormalization(h, ones, zeros, epsilon=1e-6)
        h = g.Add(g.Mul(normal, g.Add(scale, np.float32(1))), shift)
        return _wide(g, h, "residual.output")
