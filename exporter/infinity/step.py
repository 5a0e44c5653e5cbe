"""One scale of Infinity as an ONNX graph: a pure function of codes, cache, prompt and noise.

Shapes are static but for a cache length that decisions leave open. Activations are time-major [L, R, C], so that new
keys and values are outputs in cache layout and a token gate is one gather. A block is written once, as three parts;
dense, gated and skipped layers differ in what they pass to them. The arithmetic is that of generate.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import DTYPE_NAMES, GraphBuilder
from toprovar.exporter.infinity.config import InfinityConfig
from toprovar.exporter.infinity.graphs import StepOptions
from toprovar.exporter.planned import score_graphs
from toprovar.exporter.resize_matrices import nearest_index, resize_pair
from toprovar.exporter.routes import Route, residual_names
from toprovar.exporter.schedules import Schedule
from toprovar.exporter.weights_file import WeightsLayout
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import CARRIED_SCORES, SUBLAYERS

INT32 = ir.DataType.INT32.value
BOOL = ir.DataType.BOOL.value
# an earlier scale's residual [h * w, R, C], and the matrices [h', h], [w', w] that resample it; None: that side stays
Residual = tuple[ir.Value, np.ndarray | None, np.ndarray | None]


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
    if route.plan.measures_gap(route.scale) and route.guided and not options.mixes_logits:
        raise ToprovarError(
            "the plan decides by the gap of conditional and unconditional logits; this guidance mixes inside layers",
            "export with guidance on logits, or calibrate a plan without the decision sats",
        )
    return _Step(config, route, layout, options).build()


def gate_outputs(route: Route, gate_whole_layers: bool = False) -> dict[int, str]:
    """{layer: output with its kept positions}."""
    plan, counts = route.plan, route.counts
    sources = plan.score.source_layer.get(route.scale, {})
    shared = plan.score.granularity == "scale" or plan.score.kind == "change"
    return {
        layer: _gate_name(sources[layer] if sources else 0 if shared else layer, counts[layer])
        for layer in plan.gated_layers(route.scale, counts, gate_whole_layers)
    }


def _gate_name(layer: int, count: int) -> str:
    """Output with the kept positions of all layers that one score ranks at one count."""
    return f"kept_{layer:02d}_{count}"


class _Step:
    """Builds the graph of one scale."""

    def __init__(self, config: InfinityConfig, route: Route, layout: WeightsLayout, options: StepOptions) -> None:
        self.config, self.route, self.options = config, route, options
        self.plan, self.scale = route.plan, route.scale
        self.schedule: Schedule = self.plan.schedule
        self.size = self.schedule[self.scale]
        self.height, self.width = self.size
        self.L = self.height * self.width
        self.B = options.images
        self.R = (2 if route.guided else 1) * self.B
        self.g = GraphBuilder(f"step_{self.scale:02d}", layout, options.compute)
        self.cache_dtype = DTYPE_NAMES[self.g.compute]
        patch = config.patch
        self.full = (self.schedule[-1][0] * patch, self.schedule[-1][1] * patch)
        self.map = (self.height * patch, self.width * patch)
        self.gate_names = gate_outputs(route, options.gate_whole_layers)
        self.gates: dict[str, ir.Value] = {}
        self.entropy: dict[int, ir.Value] = {}  # [B, L]
        self.places: ir.Value | None = None
        self.moved: ir.Value | None = None
        self.packs: dict[int, list[ir.Value]] = {}

    def build(self) -> GraphBuilder:
        g, config, plan, L, R, B = self.g, self.config, self.plan, self.L, self.R, self.B
        C, bits, scale = config.width, config.bits, self.scale
        if scale == 0:
            start = g.input("pooled_text", (R, C))
            x = g.Add(g.reshape(start, (1, R, C)), g.weight("lvl_bias", (0, 1)))
        else:
            self.codes = g.input("codes", (B, config.code_channels, *self.full))
            x = self._embed(self.codes)
        self._watch("in", x, (L, R, C))
        self.modulation = g.input("modulation", (6, R, C))
        self.text_mask = g.input("text_mask", (R, self.options.text_tokens))
        head_modulation = g.input("head_modulation", (2, R, C))
        noise = g.input("noise", (L, B, bits))
        self.cfg, tau, limit = g.input("cfg", (1,)), g.input("tau", (1,)), g.input("bit_limit", (1,))
        if self.gate_names and plan.score.kind in CARRIED_SCORES:
            self.carried = g.input("score", (B, L))
        self.cos = g.reshape(g.weight("rope_cos", self._positions()), (L, 1, 1, -1))
        self.sin = g.reshape(g.weight("rope_sin", self._positions()), (L, 1, 1, -1))
        if plan.carries_score(scale) and plan.score.kind == "change":
            self.moved = g.full(np.float32(0), (L, B))
        kept = None
        embedded = x
        if plan.score.granularity == "scale" and self.gate_names:
            kept = self._gate(0, x)
            x, self.cos, self.sin = self._take(x, kept, C), self._turn(self.cos, kept), self._turn(self.sin, kept)
        for layer in range(config.depth):
            x = self._layer(layer, x, kept)
        drawn_at = None
        if kept is not None:
            if plan.restore.kind in ("prev_code", "zero_code"):
                drawn_at = kept
            elif plan.restore.kind == "nn_kept":
                x = self._take(x, self._nearest(kept), C)
            else:
                x = self._put(embedded, kept, x, C)
        self._watch("blockN", x, (L, R, C))
        logits = self._logits(x, head_modulation, tau)
        if drawn_at is not None:
            noise = self._take(noise, self._of_images(drawn_at), bits, B)
        drawn = self._draw(logits, noise, limit)  # [L, B, bits] int32
        self._output_codes(drawn, drawn_at)
        self._output_statistics()
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
        tokens = self._tokens(small)
        x = g.Add(g.MatMul(tokens, g.weight("word_embed")), g.weight("lvl_bias", (self.scale, self.scale + 1)))
        return g.Concat(x, x, axis=1) if self.route.guided else x

    def _tokens(self, small: ir.Value) -> ir.Value:
        """[B, d, h*patch, w*patch] -> [L, B, bits]."""
        g, config, B = self.g, self.config, self.B
        if config.patchify:
            small = g.reshape(small, (B, config.code_channels, self.height, 2, self.width, 2))
            small = g.Transpose(small, perm=[0, 1, 3, 5, 2, 4])  # [B, d, 2, 2, h, w]
        return g.Transpose(g.reshape(small, (B, config.bits, self.L)), perm=[2, 0, 1])

    # -- choosing tokens -------------------------------------------------------------------------------------------

    def _conditional(self, x: ir.Value) -> ir.Value:
        """[L, R, ...] -> [L, B, ...]."""
        return self.g.Slice(x, [0], [self.B], [1]) if self.R > self.B else x

    def _gate(self, layer: int, x: ir.Value, part: str = "") -> ir.Value:
        """Positions that run in a layer: [n], or [n, R] where rows differ. x: [L, R, C] input of the gated part."""
        g, plan, count = self.g, self.plan, self.route.counts[layer]
        name, score = self.gate_names[layer], plan.score
        shared = score.kind == "entropy" or score.kind in CARRIED_SCORES or score.granularity == "scale"
        if shared and name in self.gates:
            return self._by_row(self.gates[name])
        by_row = score.row == "each" and self.R > 1
        rows = self.R if by_row else self.B
        if score.kind == "entropy":
            ranked = self.entropy[score.source_layer[self.scale][layer]]  # [B, L]
        elif score.kind == "variance":
            ranked = g.Transpose(
                score_graphs.variance_score(g, x if by_row else self._conditional(x)), perm=[1, 0]
            )  # [B, L]
        elif score.kind == "structure":
            found = score_graphs.structure_score(
                g, self._conditional(x), self.size, self.B, self.config.width, score.structure_weight, score.iterations
            )
            ranked = g.Transpose(found, perm=[1, 0])
        elif score.kind == "change":
            ranked = g.Neg(self._places())
        else:
            ranked = g.Neg(self.carried)
        if rows == 1:
            ranked = g.reshape(ranked, (self.L,))
        if score.stratified:
            ranked = score_graphs.stratified(g, ranked, self.size, count, rows)
        kept = g.custom("TokenGate", [ranked], count=[count])  # [n], or [B, n] or [R, n]
        self.gates[name] = kept
        return kept if rows == 1 else g.Transpose(kept, perm=[1, 0]) if by_row else self._by_row(kept)

    def _by_row(self, kept: ir.Value) -> ir.Value:
        """A gate's positions for every row: [n] stays, [B, n] becomes [n, R]."""
        if self.B == 1:
            return kept
        across = self.g.Transpose(kept, perm=[1, 0])
        return self.g.Concat(across, across, axis=1) if self.R > self.B else across

    def _of_images(self, kept: ir.Value) -> ir.Value:
        """[n] stays, [n, R] becomes [n, B]."""
        return kept if self.B == 1 else self._conditional(kept)

    def _places(self) -> ir.Value:
        if self.places is None:
            rotation = self.plan.score.rotation.get(self.scale, 0.0)
            self.places = score_graphs.rotated_order(self.g, self.carried, self.B, self.L, rotation)
        return self.places

    def _is_shared(self) -> bool:
        """Whether all rows run the same positions, [n]."""
        return self.B == 1 and not (self.plan.score.row == "each" and self.R > 1)

    def _expanded(self, kept: ir.Value, rows: int, width: int) -> ir.Value:
        """[n, rows] -> [n, rows, width]."""
        g = self.g
        kept = g.reshape(kept, (-1, rows, 1))
        return g.Expand(kept, [1, rows, width])

    def _take(self, x: ir.Value, kept: ir.Value, width: int, rows: int = 0) -> ir.Value:
        """x at the kept positions. x: [L, rows, width]; rows: R unless given."""
        if self._is_shared():
            return self.g.Gather(x, kept, axis=0)
        return self.g.GatherElements(x, self._expanded(kept, rows or self.R, width), axis=0)

    def _put(self, x: ir.Value, kept: ir.Value, y: ir.Value, width: int, rows: int = 0) -> ir.Value:
        """x with y at the kept positions. x: [L, rows, width]; rows: R unless given."""
        if self._is_shared():
            return self.g.ScatterND(x, self.g.reshape(kept, (-1, 1)), y)
        return self.g.ScatterElements(x, self._expanded(kept, rows or self.R, width), y, axis=0)

    def _turn(self, table: ir.Value, kept: ir.Value) -> ir.Value:
        """Cosines or sines [L, 1, 1, D/2] at the kept positions: [n, 1, 1, D/2] or [n, R, 1, D/2]."""
        g = self.g
        if self._is_shared():
            return g.Gather(table, kept, axis=0)
        half = self.config.head_width // 2
        return g.reshape(g.Gather(g.reshape(table, (self.L, half)), kept, axis=0), (-1, self.R, 1, half))

    def _nearest(self, kept: ir.Value) -> ir.Value:
        """For every position the index of the nearest kept one, ties to the smaller: [L], or [L, R]."""
        g, n = self.g, self.route.counts[0]
        y, x = np.divmod(np.arange(self.L), self.width)
        rows = 1 if self._is_shared() else self.R

        def squared(line: np.ndarray) -> ir.Value:
            there = g.reshape(g.Gather(g.constant(line), kept), (1, n, rows))
            away = g.Sub(g.constant(line.reshape(self.L, 1, 1)), there)  # [L, n, rows]
            return g.Mul(away, away)

        distance = g.Cast(g.Add(squared(y), squared(x)), to=score_graphs.FLOAT)  # whole numbers, exact
        nearest = g.ArgMin(distance, axis=1, keepdims=0, select_last_index=0)
        return g.reshape(nearest, (self.L,)) if rows == 1 else nearest

    # -- layers ----------------------------------------------------------------------------------------------------

    def _layer(self, layer: int, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        """Whole, gated or skipped, as the plan says. kept: where the scale was gathered before block 0."""
        g, plan, R, C = self.g, self.plan, self.R, self.config.width
        count, before = self.route.counts[layer], x
        is_gated = layer in self.gate_names and kept is None
        if plan.score.granularity == "sublayer" and count:
            x = self._sublayers(layer, x, is_gated)
        else:
            if is_gated:
                own = self._gate(layer, before)
                inside = self._take(before, own, C)
                y = self._block(layer, inside, self._turn(self.cos, own), self._turn(self.sin, own))
                x = self._put_back(layer, before, own, y)
                self._move(inside, y, own)
            elif not count and kept is None:
                x = self._restored(x, self._residuals(layer))
            elif count:
                x = self._block(layer, x, self.cos, self.sin)
                self._move(before, x, kept)
            if layer in plan.residual_layers(self.scale):
                for name in residual_names(plan, self.scale, layer):
                    g.output(g.Sub(x, before), name, (self.L, R, C))
        self._watch(f"block{layer}", x, (self.L if kept is None else count, R, C))
        if layer in self.options.mixed_layers and self.route.guided:
            mixed = self._mix(x)
            # cfg 1 leaves both rows as they are: the unconditional one goes on into the cache
            x = g.Where(g.Equal(self.cfg, np.ones(1, np.float32)), x, g.Concat(mixed, mixed, axis=1))
        return x

    def _sublayers(self, layer: int, x: ir.Value, is_gated: bool) -> ir.Value:
        """The three parts of a block, each with tokens of its own choice."""
        g, plan, C = self.g, self.plan, self.config.width
        names = dict(zip(SUBLAYERS, residual_names(plan, self.scale, layer), strict=False))
        for part in SUBLAYERS:
            before, y, cos, sin = x, x, self.cos, self.sin
            if is_gated:
                kept = self._gate(layer, x, part)
                y = self._take(x, kept, C)
                cos, sin = self._turn(cos, kept), self._turn(sin, kept)
            if part == "attention":
                y = self._self_attention(layer, y, cos, sin)
            elif part == "cross":
                y = self._cross_attention(layer, y)
            else:
                y = self._feed_forward(layer, y)
            x = self._put_back(layer, x, kept, y, part) if is_gated else y
            if layer in plan.residual_layers(self.scale):
                g.output(g.Sub(x, before), names[part], (self.L, self.R, C))
        return x

    def _put_back(self, layer: int, x: ir.Value, kept: ir.Value, y: ir.Value, part: str = "") -> ir.Value:
        """y at the kept positions, elsewhere x with the restored residual. x: [L, R, C]; y: [n, R, C]."""
        g, C = self.g, self.config.width
        if self.route.counts[layer] == self.L:
            return self._put(x, kept, y, C)
        residuals = self._residuals(layer, part)
        if len(residuals) == 1 and self._is_shared():
            residual, rows, columns = residuals[0]
            if rows is not None and columns is not None:
                return g.custom("TokenRestore", [x, residual, g.constant(rows), g.constant(columns), kept, y])
        return self._put(self._restored(x, residuals), kept, y, C)

    def _residuals(self, layer: int, part: str = "") -> list[Residual]:
        """An earlier scale's residuals of a layer, where the plan asks for them."""
        g, plan = self.g, self.plan
        source = plan.residual_scale(self.scale)
        if source is None:
            return []
        height, width = self.schedule[source]
        names = [name for name in residual_names(plan, self.scale, layer, source) if not part or name.endswith(part)]
        matrices = resize_pair(plan.restore.resample, (height, width), self.size)
        return [(g.input(name, (height * width, self.R, self.config.width)), *matrices) for name in names]

    def _restored(self, x: ir.Value, residuals: list[Residual]) -> ir.Value:
        """x with what `_residuals` found, resampled to this map."""
        g, R, C = self.g, self.R, self.config.width
        for residual, rows, columns in residuals:
            height, width = self.schedule[self.plan.residual_scale(self.scale) or 0]
            if columns is not None:  # along x: [h] batches of [w', w] @ [w, R*C]
                residual = g.MatMul(g.constant(columns), g.reshape(residual, (height, width, R * C)))
            if rows is not None:  # along y: [h', h] @ [h, w'*R*C]
                residual = g.MatMul(g.constant(rows), g.reshape(residual, (height, self.width * R * C)))
            x = g.Add(x, g.reshape(residual, (self.L, R, C)))
        return x

    def _move(self, before: ir.Value, after: ir.Value, kept: ir.Value | None) -> None:
        """Adds what a layer changed, mean over channels of the conditional rows, where it ran."""
        if self.moved is None:
            return
        g = self.g
        change = g.Abs(g.Sub(self._conditional(after), self._conditional(before)))
        change = g.ReduceMean(change, [2], keepdims=0)  # [L or n, B]
        if kept is None:
            self.moved = g.Add(self.moved, change)
            return
        index = g.reshape(self._of_images(kept), (-1, self.B))
        summed = g.Add(g.GatherElements(self.moved, index, axis=0), change)
        self.moved = g.ScatterElements(self.moved, index, summed, axis=0)

    def _modulated(self, layer: int) -> list[ir.Value]:
        """gamma1, gamma2, scale1, scale2, shift1, shift2 of a layer, each [1, R, C]."""
        g = self.g
        if layer not in self.packs:
            pack = g.Add(g.weight(f"layers.{layer}.ada_pack"), self.modulation)  # [6, R, C]
            self.packs[layer] = list(g.split(pack, 0, [1] * 6))
        return self.packs[layer]

    def _block(self, layer: int, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """One transformer block on n tokens. x: [n, R, C]; cos, sin: [n, 1 or R, 1, D/2]."""
        x = self._self_attention(layer, x, cos, sin)
        return self._feed_forward(layer, self._cross_attention(layer, x))

    def _self_attention(self, layer: int, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """x with what self-attention adds to it."""
        g, config = self.g, self.config
        p = f"layers.{layer}"
        gamma1, _, scale1, _, shift1, _ = self._modulated(layer)
        qkv = g.MatMul(g.modulated_norm(x, scale1, shift1), g.weight(f"{p}.qkv"))
        operands = [qkv, g.weight(f"{p}.qkv_bias"), g.weight(f"{p}.scale_mul"), cos, sin]
        q, k, v = g.custom("RotaryHeads", operands, outputs=3, heads=[config.heads])  # each [n, R, H, D]
        o = g.reshape(self._attention(layer, q, k, v), (-1, self.R, config.width))
        return g.gated_residual(x, o, f"{p}.proj", gamma1)

    def _feed_forward(self, layer: int, x: ir.Value) -> ir.Value:
        """x with what the feed-forward layer adds to it."""
        g = self.g
        p = f"layers.{layer}"
        _, gamma2, _, scale2, _, shift2 = self._modulated(layer)
        inner = g.MatMul(g.modulated_norm(x, scale2, shift2), g.weight(f"{p}.fc1"))
        inner = g.custom("BiasGelu", [inner, g.weight(f"{p}.fc1_bias")])
        return g.gated_residual(x, inner, f"{p}.fc2", gamma2)

    def _attention(self, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        """Self-attention over cache and new keys; the new ones are outputs in cache layout."""
        g, config, R, route = self.g, self.config, self.R, self.route
        count = route.counts[layer]
        shape = (R, config.heads, config.head_width)
        past = (route.past[layer], *shape)
        k_past = g.input(f"k_past_{layer:02d}", past, self.cache_dtype, route.open_past)
        v_past = g.input(f"v_past_{layer:02d}", past, self.cache_dtype, route.open_past)
        inputs = [q, k, v, k_past, v_past]
        if layer in self.plan.source_layers(self.scale) or layer in self.plan.rho_layers(self.scale):
            o, entropy = g.custom("EntropyAttention", inputs, outputs=2, scale=1.0)
            self.entropy[layer] = g.Transpose(self._conditional(entropy), perm=[1, 0])  # [B, L]
        else:
            o = g.custom("CachedAttention", inputs, scale=1.0)
        if not route.is_last:  # the last scale's keys are never read again
            g.output(k, f"k_new_{layer:02d}", (count, *shape), self.cache_dtype)
            g.output(v, f"v_new_{layer:02d}", (count, *shape), self.cache_dtype)
        return o

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

    # -- codes -----------------------------------------------------------------------------------------------------

    def _mix(self, x: ir.Value) -> ir.Value:
        """cfg * conditional + (1 - cfg) * unconditional. x: [L, R, ...] -> [L, B, ...]."""
        g = self.g
        conditional, unconditional = g.split(x, 1, [self.B, self.B])
        rest = g.Sub(np.ones(1, np.float32), self.cfg)
        return g.Add(g.Mul(conditional, self.cfg), g.Mul(unconditional, rest))

    def _logits(self, x: ir.Value, modulation: ir.Value, tau: ir.Value) -> ir.Value:
        """Head in fp32, temperature, guidance. Returns: [L, B, 2*bits]."""
        g, config, B = self.g, self.config, self.B
        mixes = self.route.guided and self.options.mixes_logits
        rows = self.R if mixes else B
        if rows < self.R:  # mixed inside layers: only the conditional rows reach the head
            x = g.Slice(x, [0], [rows], [1])
            modulation = g.Slice(modulation, [0], [rows], [1])
        scale, shift = g.split(modulation, 0, [1, 1])
        y = g.modulated_norm(x, g.Add(scale, np.float32(1)), shift, "F32")
        raw = g.Add(g.MatMul(y, g.weight("head")), g.weight("head_bias"))
        self._watch("raw", raw, (self.L, rows, 2 * config.bits))
        if mixes and self.plan.measures_gap(self.scale):
            conditional, unconditional = g.split(raw, 1, [B, B])
            away = g.Sub(conditional, unconditional)
            g.output(g.Sqrt(g.ReduceMean(g.Mul(away, away), [0, 2], keepdims=0)), "guidance_gap", (B,))
        logits = g.Div(raw, tau)
        if mixes:
            logits = self._mix(logits)
        self._watch("logits", logits, (self.L, B, 2 * config.bits))
        return logits

    def _draw(self, logits: ir.Value, noise: ir.Value, limit: ir.Value) -> ir.Value:
        """Bits [L or n, B, bits] int32 from logits [L or n, B, 2*bits] and noise."""
        g = self.g
        pairs = g.reshape(logits, (-1, self.B, self.config.bits, 2))
        return g.custom("BitSampler", [pairs, noise, limit])  # int32, since TensorRT knows no uint8 here

    def _output_codes(self, drawn: ir.Value, drawn_at: ir.Value | None) -> None:
        """bits, codes_next and own_codes. drawn: [L or n, B, bits] int32, at the positions `drawn_at`."""
        g, config, L, B = self.g, self.config, self.L, self.B
        bits = config.bits
        value = np.float32(config.code_channels**-0.5)
        values = g.Where(g.Cast(drawn, to=BOOL), value, -value)
        if drawn_at is not None:
            kept = self._of_images(drawn_at)
            none = g.full(np.int32(-1), (L, B, bits))
            drawn = self._put(none, kept, drawn, bits, B)
            if self.plan.restore.kind == "prev_code":
                base = self._tokens(self._previous_codes())
            else:
                base = g.full(np.float32(0), (L, B, bits))
            values = self._put(base, kept, values, bits, B)
        ramp = self.plan.code_weight.ramp.get(self.scale)
        if ramp is not None and self.gate_names:
            weight = score_graphs.depth_weight(g, self._places(), L, ramp)  # [B, L]
            values = g.Mul(values, g.reshape(g.Transpose(weight, perm=[1, 0]), (L, B, 1)))
        g.output(drawn, "bits", (L, B, bits), "I32")
        code = g.Transpose(values, perm=[1, 2, 0])  # [B, bits, L]
        if config.patchify:
            code = g.reshape(code, (B, config.code_channels, 2, 2, self.height, self.width))
            code = g.Transpose(code, perm=[0, 1, 4, 2, 5, 3])  # [B, d, h, 2, w, 2]
        code = g.reshape(code, (B, config.code_channels, *self.map))
        if self.plan.carries_codes(self.scale):
            g.output(code, "own_codes", (B, config.code_channels, *self.map))
        if self.plan.carries_score(self.scale):
            self._output_score(code)
        code = g.resize(code, *resize_pair("bilinear", self.map, self.full))
        summed = code if self.scale == 0 else g.Add(self.codes, code)
        g.output(summed, "codes_next", (B, config.code_channels, *self.full))

    def _previous_codes(self) -> ir.Value:
        """Codes of the scale before on this scale's map, nearest neighbour. Returns: [B, d, h*patch, w*patch]."""
        g, patch = self.g, self.config.patch
        height, width = self.schedule[self.scale - 1]
        before = g.input("codes_before", (self.B, self.config.code_channels, height * patch, width * patch))
        rows = g.constant(nearest_index(height * patch, self.map[0]))
        columns = g.constant(nearest_index(width * patch, self.map[1]))
        return g.Gather(g.Gather(before, rows, axis=2), columns, axis=3)

    def _output_score(self, code: ir.Value) -> None:
        """The score of the next scale, on its map."""
        g, B = self.g, self.B
        height, width = self.schedule[self.scale + 1]
        if self.moved is not None:
            moved = g.reshape(g.Transpose(self.moved, perm=[1, 0]), (B, self.height, self.width))
            moved = g.resize(moved, *resize_pair("bilinear", self.size, (height, width)))
            score = g.reshape(moved, (B, height * width))
        else:
            score = score_graphs.code_energy(g, code, B, self.map, (height, width))
        g.output(score, "score_next", (B, height * width))

    def _output_statistics(self) -> None:
        g, B, L = self.g, self.B, self.L
        shape = (L,) if B == 1 else (B, L)
        for layer in self.plan.source_layers(self.scale):
            g.output(g.reshape(self.entropy[layer], shape), f"entropy_{layer:02d}", shape)
        averaged = self.plan.rho_layers(self.scale)
        if averaged:
            total = self.entropy[averaged[0]]
            for layer in averaged[1:]:
                total = g.Add(total, self.entropy[layer])
            g.output(g.Div(total, np.float32(len(averaged))), "entropy_mean", (B, L))
        for name, kept in self.gates.items():
            by_row = self.plan.score.row == "each" and self.R > 1
            count = int(name.rsplit("_", 1)[1])
            shape = (self.R, count) if by_row else (count,) if B == 1 else (B, count)
            g.output(g.Cast(kept, to=INT32), name, shape, "I32")
