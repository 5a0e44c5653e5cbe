"""HART as ONNX graphs, dense and fp32: the prompt's graph, one graph per scale.

Shapes are static. Activations are time-major [L, R, C], so that new keys and values are outputs in cache layout; text
and image angles differ from row to row and come from the host as cosines and sines. The arithmetic is that of
transformer.py, generate.py and residual.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toprovar.exporter.codebook import RESIDUAL_SHARE, smoothing_index
from toprovar.exporter.graph_builder import GraphBuilder
from toprovar.exporter.hart.config import HartConfig
from toprovar.exporter.hart.residual import RESIDUAL_FACTOR, STEPS, diffusion_tables
from toprovar.exporter.index_sampling import SMALLEST_NOISE, smooth_temperature
from toprovar.exporter.resize_matrices import resize_pair
from toprovar.exporter.weights_file import WeightsLayout

# finite, so that noise can still choose a masked index where a recording did
MASKED = np.float32(-3e38)


@dataclass(frozen=True)
class HartGraphs:
    """What the graphs of a run have in common.

    sides:       of the square maps
    top_k:       candidates per scale; 0 keeps all
    top_p:       0 keeps all
    smooth:      feeds on means of codes instead of single codes
    residual:    the last step has the residual head, of `steps` reverse steps
    text_tokens: T of every prompt
    guided:      2B rows, conditional ones first; else B
    watched:     intermediate values to add as outputs, named as in the parity files ("block0", "raw", "diff/z", ...)
    """

    config: HartConfig
    layout: WeightsLayout
    sides: tuple[int, ...]
    top_k: tuple[int, ...]
    text_tokens: int
    images: int = 1
    guided: bool = True
    residual: bool = True
    top_p: float = 0.0
    smooth: bool = False
    steps: int = STEPS
    watched: Collection[str] = ()

    @property
    def rows(self) -> int:
        return self.images * (2 if self.guided else 1)


def _rms(g: GraphBuilder, x: ir.Value, weight: str) -> ir.Value:
    square = g.ReduceMean(g.Mul(x, x), [-1], keepdims=1)
    return g.Mul(g.Div(x, g.Sqrt(g.Add(square, np.float32(1e-6)))), g.weight(weight))


def _silu(g: GraphBuilder, x: ir.Value) -> ir.Value:
    return g.Mul(x, g.Sigmoid(x))


def prompt_graph(graphs: HartGraphs) -> GraphBuilder:
    """Text rows to what the steps need; once per prompt.

    Inputs:  text_rows [R, T, text width] (unconditional rows are zeros), text_valid [R, T] float32, 1 on the prompt's
             own tokens (of an unconditional row the first)
    Outputs: embedded [T, R, C], modulation [1, R, C], head_modulation [2, R, C]
    """
    g = GraphBuilder("prompt", graphs.layout)
    R, T, C = graphs.rows, graphs.text_tokens, graphs.config.width
    rows = g.input("text_rows", (R, T, graphs.config.text_width))
    valid = g.reshape(g.input("text_valid", (R, T)), (R, T, 1))
    embedded = g.linear(_rms(g, rows, "context_norm"), "context_embed", "context_embed_bias")
    total = g.ReduceSum(g.Mul(embedded, valid), [1], keepdims=0)
    mean = g.Div(total, g.ReduceSum(valid, [1], keepdims=0))  # [R, C]
    largest = g.ReduceMax(embedded, [1], keepdims=0)
    head = g.linear(_silu(g, largest), "head_ada", "head_ada_bias")
    g.output(g.Transpose(embedded, perm=[1, 0, 2]), "embedded", (T, R, C))
    g.output(g.reshape(mean, (1, R, C)), "modulation", (1, R, C))
    g.output(g.Transpose(g.reshape(head, (R, 2, C)), perm=[1, 0, 2]), "head_modulation", (2, R, C))
    return g


def step_graph(graphs: HartGraphs, scale: int) -> GraphBuilder:
    """One scale; the first runs the text, the last the residual head behind its map.

    Inputs:  embedded [T, R, C] at scale 0, else latent [B, d, H, H]; modulation [1, R, C]; head_modulation [2, R, C];
             cos, sin [L, R, 1, D]; noise, for the smooth variant smooth_noise [n*n, B, V] uniform in [0, 1);
             guidance [1], the scale's t; k_past_##, v_past_## [S, R, heads, D]; at the last scale residual_start
             [n*n, B, d] and residual_noise [steps - 1, n*n, B, d], standard normal
    Outputs: indices [n*n, B] int32, latent_next [B, d, H, H], before the last scale k_new_##, v_new_## [L, R, heads, D]
    """
    return _Step(graphs, scale).build()


class _Step:
    def __init__(self, graphs: HartGraphs, scale: int) -> None:
        self.graphs, self.config, self.scale = graphs, graphs.config, scale
        self.sides, self.side, self.last_side = graphs.sides, graphs.sides[scale], graphs.sides[-1]
        self.is_last = scale == len(graphs.sides) - 1
        self.N = self.side**2  # tokens drawn
        self.L = graphs.text_tokens if scale == 0 else self.N  # tokens that run
        self.past = 0 if scale == 0 else graphs.text_tokens + sum(n * n for n in graphs.sides[1:scale])
        self.B, self.R = graphs.images, graphs.rows
        self.g = GraphBuilder(f"step_{scale:02d}", graphs.layout)

    def build(self) -> GraphBuilder:
        g, C, L, R, B = self.g, self.config.width, self.L, self.R, self.B
        latent_shape = (B, self.config.code_channels, self.last_side, self.last_side)
        if self.scale == 0:
            x = g.Add(g.input("embedded", (L, R, C)), g.weight("lvl_bias", (0, 1)))
        else:
            self.latent = g.input("latent", latent_shape)
            x = self._embed(self.latent)
        self.modulation = g.input("modulation", (1, R, C))
        head = g.input("head_modulation", (2, R, C))
        shape = (L, R, 1, self.config.head_width)
        self.cos, self.sin = g.input("cos", shape), g.input("sin", shape)
        noise = g.input("noise", (self.N, B, self.config.vocabulary))
        if self.graphs.guided:
            self.t = g.input("guidance", (1,))
        for layer in range(self.config.depth):
            x = self._block(layer, x)
            self._watch(f"block{layer}", x, (L, R, C))
        masked = self._masked_logits(x, head)
        indices = g.ArgMax(g.Add(masked, self._gumbel(noise)), axis=2, keepdims=0)  # [N, B] int64
        g.output(g.Cast(indices, to=ir.DataType.INT32.value), "indices", (self.N, B), "I32")
        codes = g.Gather(g.weight("codebook"), indices, axis=0)  # [N, B, d]
        tokens = self._soft(masked) if self.graphs.smooth else codes
        if self.is_last and self.graphs.residual:
            tokens = g.Add(tokens, self._residual(x, codes))
        grid = g.reshape(g.Transpose(tokens, perm=[1, 2, 0]), (*latent_shape[:2], self.side, self.side))
        if not self.is_last:
            grid = self._smoothed(g.resize(grid, *resize_pair("bicubic", (self.side,) * 2, (self.last_side,) * 2)))
        g.output(grid if self.scale == 0 else g.Add(self.latent, grid), "latent_next", latent_shape)
        return g

    def _watch(self, name: str, value: ir.Value, shape: tuple[int, ...]) -> None:
        if name in self.graphs.watched:
            self.g.output(value, f"watch_{name}", shape)

    def _embed(self, latent: ir.Value) -> ir.Value:
        """[B, d, H, H] -> [L, R, C]."""
        g, B, d = self.g, self.B, self.config.code_channels
        small = g.resize(latent, *resize_pair("area", (self.last_side,) * 2, (self.side,) * 2))
        self._watch("next", small, (B, d, self.side, self.side))
        tokens = g.Transpose(g.reshape(small, (B, d, self.L)), perm=[2, 0, 1])  # [L, B, d]
        level = g.weight("lvl_bias", (self.scale, self.scale + 1))
        x = g.Add(g.MatMul(tokens, g.weight("word_embed")), level)
        return self._both(x)

    def _both(self, x: ir.Value) -> ir.Value:
        """[L, B, ...] for conditional rows, then the same for unconditional ones."""
        return self.g.Concat(x, x, axis=1) if self.graphs.guided else x

    def _mix(self, x: ir.Value) -> ir.Value:
        """(1 + t) * conditional - t * unconditional. x: [L, R, ...] -> [L, B, ...]."""
        g = self.g
        if not self.graphs.guided:
            return x
        conditional, unconditional = g.split(x, 1, [self.B, self.B])
        return g.Sub(g.Mul(conditional, g.Add(self.t, np.float32(1))), g.Mul(unconditional, self.t))

    def _block(self, layer: int, x: ir.Value) -> ir.Value:
        """x: [L, R, C]."""
        g, p, C = self.g, f"layers.{layer}", self.config.width
        pack = g.Add(g.weight(f"{p}.ada_pack"), self.modulation)  # [6, R, C]
        gamma1, gamma2, scale1, scale2, shift1, shift2 = g.split(pack, 0, [1] * 6)
        o = g.reshape(self._attention(layer, self._modulated(x, f"{p}.norm", scale1, shift1)), (self.L, self.R, C))
        x = g.gated_residual(x, o, f"{p}.proj", gamma1)
        y = self._modulated(x, f"{p}.norm", scale2, shift2)
        inner = g.Mul(_silu(g, g.linear(y, f"{p}.gate")), g.linear(y, f"{p}.up"))
        return g.Add(x, g.Mul(g.linear(inner, f"{p}.down"), gamma2))

    def _modulated(self, x: ir.Value, weight: str, scale: ir.Value, shift: ir.Value) -> ir.Value:
        g = self.g
        return g.Add(g.Mul(_rms(g, x, weight), g.Add(scale, np.float32(1))), shift)

    def _attention(self, layer: int, x: ir.Value) -> ir.Value:
        """Over cache and new keys; the new ones are outputs in cache layout. Returns: [L, R, heads, D]."""
        g, config, p = self.g, self.config, f"layers.{layer}"
        shape = (self.R, config.heads, config.head_width)
        qkv = g.reshape(g.linear(x, f"{p}.qkv", f"{p}.qkv_bias"), (self.L, self.R, 3 * config.heads, config.head_width))
        q, k, v = g.split(qkv, 2, [config.heads] * 3)
        if config.cosine:
            q, k = g.Mul(self._unit(q), g.weight(f"{p}.scale_mul")), self._unit(k)
        q, k = self._rotated(q), self._rotated(k)
        k_past = g.input(f"k_past_{layer:02d}", (self.past, *shape))
        v_past = g.input(f"v_past_{layer:02d}", (self.past, *shape))
        o = g.custom(
            "CachedAttention",
            [q, k, v, k_past, v_past],
            scale=1.0 if config.cosine else 0.25 / config.head_width**0.5,
        )
        if not self.is_last:
            g.output(k, f"k_new_{layer:02d}", (self.L, *shape))
            g.output(v, f"v_new_{layer:02d}", (self.L, *shape))
        return o

    def _unit(self, x: ir.Value) -> ir.Value:
        g = self.g
        return g.Div(x, g.Max(g.Sqrt(g.ReduceSum(g.Mul(x, x), [-1], keepdims=1)), np.float32(1e-12)))

    def _rotated(self, x: ir.Value) -> ir.Value:
        """x: [L, R, heads, D]."""
        g, half = self.g, self.config.head_width // 2
        first, second = g.split(x, 3, [half, half])
        return g.Add(g.Mul(x, self.cos), g.Mul(g.Concat(g.Neg(second), first, axis=3), self.sin))

    def _masked_logits(self, x: ir.Value, head: ir.Value) -> ir.Value:
        """Head, guidance, top-k, top-p. Returns: [N, B, V]."""
        g, V = self.g, self.config.vocabulary
        scale, shift = g.split(head, 0, [1, 1])
        raw = g.linear(self._modulated(x, "head_norm", scale, shift), "head", "head_bias")  # [L, R, V]
        self._watch("raw", raw, (self.L, self.R, V))
        logits = self._mix(g.Slice(raw, [self.L - self.N], [self.L], [0]))  # of the text only the last token
        self._watch("logits", logits, (self.N, self.B, V))
        top_k = self.graphs.top_k[self.scale]
        if 0 < top_k < V:
            values, _ = g.TopK(logits, [top_k], outputs=2, axis=-1)
            smallest = g.Slice(values, [top_k - 1], [top_k], [2])
            logits = g.Where(g.Less(logits, smallest), MASKED, logits)
        if self.graphs.top_p > 0:
            logits = g.Where(g.Less(logits, self._smallest_of_top_p(logits)), MASKED, logits)
        return logits

    def _smallest_of_top_p(self, logits: ir.Value) -> ir.Value:
        """The least logit that top-p keeps: chances from it downwards sum to more than 1 - p. Returns: [N, B, 1]."""
        g, V = self.g, self.config.vocabulary
        values, _ = g.TopK(logits, [V], outputs=2, axis=-1)  # descending
        below = g.CumSum(g.Softmax(values, axis=-1), np.int64(2), reverse=1)
        kept = g.Greater(below, np.float32(1 - self.graphs.top_p))
        smallest = g.ReduceMin(g.Where(kept, values, -MASKED), [2], keepdims=1)
        return g.Min(smallest, g.Slice(values, [0], [1], [2]))  # the largest always stays

    def _gumbel(self, noise: ir.Value) -> ir.Value:
        g = self.g
        return g.Neg(g.Log(g.Neg(g.Log(g.Max(noise, np.float32(SMALLEST_NOISE))))))

    def _soft(self, masked: ir.Value) -> ir.Value:
        """The smooth variant's tokens, means of codes. Returns: [N, B, d]."""
        g, place = self.g, self.scale / (len(self.sides) - 1)
        noise = g.input("smooth_noise", (self.N, self.B, self.config.vocabulary))
        sharpened = g.Add(g.Mul(masked, np.float32(1 + place)), self._gumbel(noise))
        weights = g.Softmax(g.Div(sharpened, np.float32(smooth_temperature(place))), axis=-1)
        return g.MatMul(weights, g.weight("codebook"))

    def _smoothed(self, grid: ir.Value) -> ir.Value:
        g, name = self.g, f"smoothing.{smoothing_index(self.scale, len(self.sides))}"
        convolved = g.Conv(grid, g.weight(name), g.weight(f"{name}_bias"), kernel_shape=[3, 3], pads=[1] * 4)
        share = np.float32(RESIDUAL_SHARE)
        return g.Add(g.Mul(grid, np.float32(1) - share), g.Mul(convolved, share))

    # -- residual head -------------------------------------------------------------------------------------------------

    def _residual(self, x: ir.Value, tokens: ir.Value) -> ir.Value:
        """All reverse steps for the conditional rows; the unconditional ones only lend their noise prediction.

        x: [N, R, C] behind the last block; tokens: [N, B, d] drawn codes. Returns: [N, B, d].
        """
        g, B, d, N = self.g, self.B, self.config.code_channels, self.N
        embedded = g.linear(self._both(tokens), "word_embed", "word_embed_bias")
        z = _rms(g, g.Add(x, embedded), "decoder_norm")
        self._watch("diff/z", z, (N, self.R, self.config.width))
        condition = g.linear(z, "residual.cond", "residual.cond_bias")  # [N, R, W]
        state = g.input("residual_start", (N, B, d))
        steps = self.graphs.steps
        noises = g.split(g.input("residual_noise", (steps - 1, N, B, d)), 0, [1] * (steps - 1))
        tables = diffusion_tables(steps)
        for used, step in enumerate(reversed(range(steps))):
            y = _silu(g, g.Add(condition, g.weight("residual.times", (step, step + 1))))
            out = self._network(self._both(state), y)  # [N, R, 2d]
            predicted, variance = g.split(out, 2, [d, d])
            predicted = self._mix(predicted)
            x0 = g.Sub(g.Mul(state, np.float32(tables.x0_x[step])), g.Mul(predicted, np.float32(tables.x0_noise[step])))
            x0 = g.Clip(x0, np.float32(-1), np.float32(1))
            state = g.Add(g.Mul(x0, np.float32(tables.mean_x0[step])), g.Mul(state, np.float32(tables.mean_x[step])))
            if step:
                if self.graphs.guided:
                    variance, _ = g.split(variance, 1, [B, B])
                share = g.Mul(g.Add(variance, np.float32(1)), np.float32(0.5))
                rest = g.Sub(np.float32(1), share)
                log_variance = g.Add(
                    g.Mul(share, np.float32(tables.log_high[step])), g.Mul(rest, np.float32(tables.log_low[step]))
                )
                deviation = g.Exp(g.Mul(log_variance, np.float32(0.5)))
                state = g.Add(state, g.Mul(deviation, g.reshape(noises[used], (N, B, d))))
        result = g.Mul(state, np.float32(RESIDUAL_FACTOR))
        self._watch("diff/out", result, (N, B, d))
        return result

    def _network(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x: [N, R, d]; y: [N, R, W] behind SiLU. Returns: [N, R, 2d]."""
        g, W = self.g, self.config.residual_width
        ones, zeros = np.ones(W, np.float32), np.zeros(W, np.float32)
        h = g.linear(x, "residual.input", "residual.input_bias")
        for j in range(self.config.residual_depth):
            p = f"residual.blocks.{j}"
            shift, scale, gate = g.split(g.linear(y, f"{p}.ada", f"{p}.ada_bias"), 2, [W] * 3)
            normal = g.LayerNormalization(h, g.weight(f"{p}.norm"), g.weight(f"{p}.norm_bias"), epsilon=1e-6)
            inner = g.Add(g.Mul(normal, g.Add(scale, np.float32(1))), shift)
            inner = _silu(g, g.linear(inner, f"{p}.mlp.0", f"{p}.mlp.0_bias"))
            h = g.Add(h, g.Mul(gate, g.linear(inner, f"{p}.mlp.2", f"{p}.mlp.2_bias")))
        shift, scale = g.split(g.linear(y, "residual.ada", "residual.ada_bias"), 2, [W] * 2)
        normal = g.LayerNormalization(h, ones, zeros, epsilon=1e-6)
        h = g.Add(g.Mul(normal, g.Add(scale, np.float32(1))), shift)
        return g.linear(h, "residual.output", "residual.output_bias")
