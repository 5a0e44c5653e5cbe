"""One scale of a model as an ONNX graph: a pure function of codes, cache, prompt and noise.

Shapes are static but for a cache length that decisions leave open. Activations are time-major [L, R, C], so that new
keys and values are outputs in cache layout and a token gate is one gather. What a plan does to a scale is written here
once; a family says in a subclass how its map is embedded, what a block is and how codes are drawn. The arithmetic is
that of loop.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from toprovar.exporter.graph_builder import DTYPE_NAMES, GraphBuilder
from toprovar.exporter.planned import score_graphs
from toprovar.exporter.resize_matrices import nearest_index, resize_pair
from toprovar.exporter.routes import Route, residual_names
from toprovar.exporter.schedules import Schedule
from toprovar.exporter.weights_file import WeightsLayout
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance, Projection
from toprovar.runtime.plan import CARRIED_SCORES

INT32 = ir.DataType.INT32.value
# an earlier scale's residual [h * w, R, C], and the matrices [h', h], [w', w] that resample it; None: that side stays
Residual = tuple[ir.Value, np.ndarray | None, np.ndarray | None]


@dataclass(frozen=True)
class StepOptions:
    """How step graphs are built.

    rows:              2 with guidance (conditional, unconditional), 1 without
    text_tokens:       T, the length prompts are padded to
    compute:           fp32, fp16 or bf16
    mixes_logits:      guidance on logits
    projection:        of guidance on logits; None for the plain mix
    mixed_layers:      layers whose outputs are mixed (guidance inside layers)
    watched:           names of intermediate values to add as outputs, as in the parity files ("block0", "raw", ...)
    top_k:             candidates per scale of families that draw indices; none, or 0, keeps all
    top_p:             probability that stays among their candidates; 0 keeps all
    smooth:            they feed on means of codes instead of single codes
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
    projection: Projection | None = None
    top_k: tuple[int, ...] = ()
    top_p: float = 0.0
    smooth: bool = False

    @classmethod
    def for_guidance(cls, guidance: Guidance, depth: int, text_tokens: int, compute: str = "fp32") -> StepOptions:
        """Options of a bundle that runs with this guidance: rows, and where they are mixed."""
        return cls(
            rows=2 if guidance.uses_unconditional_row else 1,
            text_tokens=text_tokens,
            compute=compute,
            mixes_logits=guidance.mixes_logits,
            mixed_layers=guidance.mixed_layers(depth),
            projection=guidance.projection,
            top_k=guidance.top_k,
            top_p=guidance.top_p,
            smooth=guidance.smooth,
        )

    def candidates(self, scale: int) -> int:
        """top_k of a scale; 0 keeps all."""
        return self.top_k[scale] if self.top_k else 0


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


class Sizes(Protocol):
    """What a step needs of a model's configuration."""

    @property
    def depth(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def head_width(self) -> int: ...

    @property
    def code_channels(self) -> int: ...


class PlannedStep(ABC):
    """Builds the graph of one scale.

    drawn_name: output with what was drawn; columns: numbers per token; noise_columns: uniform numbers per token
    patch:      cells of the code map along a token's side
    along:      tokens that run along at this scale, in front of the drawn ones: text
    """

    drawn_name = "indices"
    columns = 1
    patch = 1
    sublayers: tuple[str, ...] = ("attention", "ffn")
    attention_scale = 1.0

    def __init__(self, config: Sizes, route: Route, layout: WeightsLayout, options: StepOptions) -> None:
        if route.plan.measures_gap(route.scale) and route.guided and not options.mixes_logits:
            raise ToprovarError(
                "the plan decides by the gap of conditional and unconditional logits; this guidance mixes inside "
                "layers",
                "export with guidance on logits, or calibrate a plan without the decision sats",
            )
        self.sizes, self.route, self.options = config, route, options
        self.plan, self.scale = route.plan, route.scale
        self.schedule: Schedule = self.plan.schedule
        self.size = self.schedule[self.scale]
        self.height, self.width = self.size
        self.L = self.height * self.width
        self.B = options.images
        self.R = (2 if route.guided else 1) * self.B
        self.g = GraphBuilder(f"step_{self.scale:02d}", layout, options.compute)
        self.cache_dtype = DTYPE_NAMES[self.g.compute]
        self.along = 0
        self.full = (self.schedule[-1][0] * self.patch, self.schedule[-1][1] * self.patch)
        self.map = (self.height * self.patch, self.width * self.patch)
        self.gate_names = gate_outputs(route, options.gate_whole_layers)
        self.gates: dict[str, ir.Value] = {}
        self.entropy: dict[int, ir.Value] = {}  # [B, L]
        self.places: ir.Value | None = None
        self.moved: ir.Value | None = None

    # -- what a family says ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def noise_columns(self) -> int: ...

    @abstractmethod
    def start(self) -> ir.Value:
        """Declares the prompt's inputs. Returns: the input of block 0, [along + L, R, C]."""

    @abstractmethod
    def block(self, layer: int, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        """One transformer block on n tokens. x: [n, R, C]; kept: their positions as `gate` gives them, None for all."""

    @abstractmethod
    def part(self, layer: int, part: str, x: ir.Value, kept: ir.Value | None) -> ir.Value:
        """x with what one sub-layer adds to it; arguments as of `block`."""

    @abstractmethod
    def raw_logits(self, x: ir.Value, rows: int) -> ir.Value:
        """Head in fp32. x: [n, rows, C]. Returns: [n, rows, V]."""

    @abstractmethod
    def draw(self, x: ir.Value, logits: ir.Value, drawn_at: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """What is drawn, [n, B, columns] int32, and the codes it stands for, [n, B, values].

        x: [n, R, C] behind the last block; logits: [n, B, V], mixed; drawn_at: positions where not all are drawn.
        """

    @property
    @abstractmethod
    def value_columns(self) -> int:
        """Codes per token."""

    @abstractmethod
    def code_map(self, values: ir.Value) -> ir.Value:
        """Codes of this scale on its own map. values: [L, B, value_columns]. Returns: [B, d, h, w]."""

    @abstractmethod
    def contribution(self, code: ir.Value) -> ir.Value:
        """What this scale adds to the accumulated codes. code: [B, d, h, w]. Returns: [B, d, H, W]."""

    @abstractmethod
    def code_tokens(self, small: ir.Value) -> ir.Value:
        """[B, d, h, w] of this scale's map -> [L, B, value_columns]."""

    # -- the step ----------------------------------------------------------------------------------------------------

    def codes(self) -> ir.Value:
        """The input with the accumulated codes, [B, d, H, W]."""
        if self.accumulated is None:
            self.accumulated = self.g.input("codes", (self.B, self.sizes.code_channels, *self.full))
        return self.accumulated

    accumulated: ir.Value | None = None

    def build(self) -> GraphBuilder:
        g, plan, L, R, B = self.g, self.plan, self.L, self.R, self.B
        C, scale = self.sizes.width, self.scale
        x = self.start()
        self.watch("in", x, (self.along + L, R, C))
        self.noise = g.input("noise", (L, B, self.noise_columns))
        self.cfg, self.tau = g.input("cfg", (1,)), g.input("tau", (1,))
        if self.gate_names and plan.score.kind in CARRIED_SCORES:
            self.carried = g.input("score", (B, L))
        if plan.carries_score(scale) and plan.score.kind == "change":
            self.moved = g.full(np.float32(0), (L, B))
        kept = None
        embedded = x
        if plan.score.granularity == "scale" and self.gate_names:
            kept = self._gate(0, x)
            x = self.take(x, kept, C)
        for layer in range(self.sizes.depth):
            x = self._layer(layer, x, kept)
        drawn_at = None
        if kept is not None:
            if plan.restore.kind in ("prev_code", "zero_code"):
                drawn_at = kept
            elif plan.restore.kind == "nn_kept":
                x = self.take(x, self._nearest(kept), C)
            else:
                x = self._put(embedded, kept, x, C)
        self.watch("blockN", x, (self.along + L, R, C))
        drawn, values = self.draw(x, self._logits(x), drawn_at)
        self._output_codes(drawn, values, drawn_at)
        self._output_statistics()
        return g

    def watch(self, name: str, value: ir.Value, shape: tuple[int, ...]) -> None:
        if name in self.options.watched:
            self.g.output(value, f"watch_{name}", shape)

    def both(self, x: ir.Value) -> ir.Value:
        """[L, B, ...] for the conditional rows, then the same for the unconditional ones where they run."""
        return self.g.Concat(x, x, axis=1) if self.route.guided else x

    def _drawn_tokens(self, x: ir.Value) -> ir.Value:
        """Without text tokens that run along. x: [along + L, ...]."""
        return self.g.Slice(x, [self.along], [self.along + self.L], [0]) if self.along else x

    # -- choosing tokens -------------------------------------------------------------------------------------------

    def conditional(self, x: ir.Value) -> ir.Value:
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
                score_graphs.variance_score(g, x if by_row else self.conditional(x)), perm=[1, 0]
            )  # [B, L]
        elif score.kind == "structure":
            found = score_graphs.structure_score(
                g, self.conditional(x), self.size, self.B, self.sizes.width, score.structure_weight, score.iterations
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

    def of_images(self, kept: ir.Value) -> ir.Value:
        """[n] stays, [n, R] becomes [n, B]."""
        return kept if self.B == 1 else self.conditional(kept)

    def _places(self) -> ir.Value:
        if self.places is None:
            rotation = self.plan.score.rotation.get(self.scale, 0.0)
            self.places = score_graphs.rotated_order(self.g, self.carried, self.B, self.L, rotation)
        return self.places

    def is_shared(self) -> bool:
        """Whether all rows run the same positions, [n]."""
        return self.B == 1 and not (self.plan.score.row == "each" and self.R > 1)

    def _expanded(self, kept: ir.Value, rows: int, width: int) -> ir.Value:
        """[n, rows] -> [n, rows, width]."""
        g = self.g
        kept = g.reshape(kept, (-1, rows, 1))
        return g.Expand(kept, [1, rows, width])

    def take(self, x: ir.Value, kept: ir.Value, width: int, rows: int = 0) -> ir.Value:
        """x at the kept positions. x: [L, rows, width]; rows: R unless given."""
        if self.is_shared():
            return self.g.Gather(x, kept, axis=0)
        return self.g.GatherElements(x, self._expanded(kept, rows or self.R, width), axis=0)

    def _put(self, x: ir.Value, kept: ir.Value, y: ir.Value, width: int, rows: int = 0) -> ir.Value:
        """x with y at the kept positions. x: [L, rows, width]; rows: R unless given."""
        if self.is_shared():
            return self.g.ScatterND(x, self.g.reshape(kept, (-1, 1)), y)
        return self.g.ScatterElements(x, self._expanded(kept, rows or self.R, width), y, axis=0)

    def _nearest(self, kept: ir.Value) -> ir.Value:
        """For every position the index of the nearest kept one, ties to the smaller: [L], or [L, R]."""
        g, n = self.g, self.route.counts[0]
        y, x = np.divmod(np.arange(self.L), self.width)
        rows = 1 if self.is_shared() else self.R

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
        g, plan, R, C = self.g, self.plan, self.R, self.sizes.width
        count, before = self.route.counts[layer], x
        is_gated = layer in self.gate_names and kept is None
        if plan.score.granularity == "sublayer" and count:
            x = self._sublayers(layer, x, is_gated)
        else:
            if is_gated:
                own = self._gate(layer, before)
                inside = self.take(before, own, C)
                y = self.block(layer, inside, own)
                x = self._put_back(layer, before, own, y)
                self._move(inside, y, own)
            elif not count and kept is None:
                x = self._restored(x, self._residuals(layer))
            elif count:
                x = self.block(layer, x, kept)
                self._move(before, x, kept)
            if layer in plan.residual_layers(self.scale):
                for name in residual_names(plan, self.scale, layer):
                    g.output(self._drawn_tokens(g.Sub(x, before)), name, (self.L, R, C))
        self.watch(f"block{layer}", x, (self.along + self.L if kept is None else count, R, C))
        if layer in self.options.mixed_layers and self.route.guided:
            mixed = self.mix(x)
            # cfg 1 leaves both rows as they are: the unconditional one goes on into the cache
            x = g.Where(g.Equal(self.cfg, np.ones(1, np.float32)), x, g.Concat(mixed, mixed, axis=1))
        return x

    def _sublayers(self, layer: int, x: ir.Value, is_gated: bool) -> ir.Value:
        """The parts of a block, each with tokens of its own choice."""
        g, plan, C = self.g, self.plan, self.sizes.width
        names = dict(zip(self.sublayers, residual_names(plan, self.scale, layer), strict=False))
        for part in self.sublayers:
            before, y, kept = x, x, None
            if is_gated:
                kept = self._gate(layer, x, part)
                y = self.take(x, kept, C)
            y = self.part(layer, part, y, kept)
            x = self._put_back(layer, x, kept, y, part) if kept is not None else y
            if layer in plan.residual_layers(self.scale):
                g.output(self._drawn_tokens(g.Sub(x, before)), names[part], (self.L, self.R, C))
        return x

    def _put_back(self, layer: int, x: ir.Value, kept: ir.Value, y: ir.Value, part: str = "") -> ir.Value:
        """y at the kept positions, elsewhere x with the restored residual. x: [L, R, C]; y: [n, R, C]."""
        g, C = self.g, self.sizes.width
        if self.route.counts[layer] == self.L:
            return self._put(x, kept, y, C)
        residuals = self._residuals(layer, part)
        if len(residuals) == 1 and self.is_shared():
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
        return [(g.input(name, (height * width, self.R, self.sizes.width)), *matrices) for name in names]

    def _restored(self, x: ir.Value, residuals: list[Residual]) -> ir.Value:
        """x with what `_residuals` found, resampled to this map."""
        g, R, C = self.g, self.R, self.sizes.width
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
        change = g.Abs(g.Sub(self.conditional(after), self.conditional(before)))
        change = g.ReduceMean(change, [2], keepdims=0)  # [L or n, B]
        if kept is None:
            self.moved = g.Add(self.moved, self._drawn_tokens(change))
            return
        index = g.reshape(self.of_images(kept), (-1, self.B))
        summed = g.Add(g.GatherElements(self.moved, index, axis=0), change)
        self.moved = g.ScatterElements(self.moved, index, summed, axis=0)

    def attention(self, layer: int, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        """Self-attention over cache and new keys; the new ones are outputs in cache layout. All [n, R, H, D]."""
        g, sizes, R, route = self.g, self.sizes, self.R, self.route
        count = route.counts[layer] + self.along
        shape = (R, sizes.heads, sizes.head_width)
        past = (route.past[layer], *shape)
        k_past = g.input(f"k_past_{layer:02d}", past, self.cache_dtype, route.open_past)
        v_past = g.input(f"v_past_{layer:02d}", past, self.cache_dtype, route.open_past)
        inputs = [q, k, v, k_past, v_past]
        if layer in self.plan.source_layers(self.scale) or layer in self.plan.rho_layers(self.scale):
            o, entropy = g.custom("EntropyAttention", inputs, outputs=2, scale=self.attention_scale)
            entropy = self._drawn_tokens(self.conditional(entropy))
            self.entropy[layer] = g.Transpose(entropy, perm=[1, 0])  # [B, L]
        else:
            o = g.custom("CachedAttention", inputs, scale=self.attention_scale)
        if not route.is_last:  # the last scale's keys are never read again
            g.output(k, f"k_new_{layer:02d}", (count, *shape), self.cache_dtype)
            g.output(v, f"v_new_{layer:02d}", (count, *shape), self.cache_dtype)
        return o

    # -- codes -----------------------------------------------------------------------------------------------------

    def mix(self, x: ir.Value) -> ir.Value:
        """cfg * conditional + (1 - cfg) * unconditional. x: [L, R, ...] -> [L, B, ...]."""
        g = self.g
        conditional, unconditional = g.split(x, 1, [self.B, self.B])
        rest = g.Sub(np.ones(1, np.float32), self.cfg)
        return g.Add(g.Mul(conditional, self.cfg), g.Mul(unconditional, rest))

    def mixed_logits(self, logits: ir.Value) -> ir.Value:
        """Guidance on logits behind the temperature. logits: [n, R, V] -> [n, B, V]."""
        return self.mix(logits)

    def _logits(self, x: ir.Value) -> ir.Value:
        """Temperature and guidance. Returns: [L or n, B, V]."""
        g, B = self.g, self.B
        mixes = self.route.guided and self.options.mixes_logits
        rows = self.R if mixes else B
        if rows < self.R:  # mixed inside layers: only the conditional rows reach the head
            x = g.Slice(x, [0], [rows], [1])
        raw = self.raw_logits(x, rows)
        self.watch("raw", raw, (self.along + self.L, rows, self.logit_columns))
        raw = self._drawn_tokens(raw)
        if mixes and self.plan.measures_gap(self.scale):
            conditional, unconditional = g.split(raw, 1, [B, B])
            away = g.Sub(conditional, unconditional)
            g.output(g.Sqrt(g.ReduceMean(g.Mul(away, away), [0, 2], keepdims=0)), "guidance_gap", (B,))
        logits = g.Div(raw, self.tau)
        if mixes:
            logits = self.mixed_logits(logits)
        self.watch("logits", logits, (self.L, B, self.logit_columns))
        return logits

    @property
    def logit_columns(self) -> int:
        return self.noise_columns

    def take_noise(self, drawn_at: ir.Value | None) -> ir.Value:
        """Noise of the tokens that are drawn, [L or n, B, noise_columns]."""
        if drawn_at is None:
            return self.noise
        return self.take(self.noise, self.of_images(drawn_at), self.noise_columns, self.B)

    def _output_codes(self, drawn: ir.Value, values: ir.Value, drawn_at: ir.Value | None) -> None:
        """What was drawn, codes_next and own_codes, at the positions `drawn_at`."""
        g, L, B, width, channels = self.g, self.L, self.B, self.value_columns, self.sizes.code_channels
        if drawn_at is not None:
            kept = self.of_images(drawn_at)
            drawn = self._put(g.full(np.int32(-1), (L, B, self.columns)), kept, drawn, self.columns, B)
            base = self.previous_values() if self.plan.restore.kind == "prev_code" else None
            if base is None:
                base = g.full(np.float32(0), (L, B, width))
            values = self._put(base, kept, values, width, B)
        ramp = self.plan.code_weight.ramp.get(self.scale)
        if ramp is not None and self.gate_names:
            weight = score_graphs.depth_weight(g, self._places(), L, ramp)  # [B, L]
            values = g.Mul(values, g.reshape(g.Transpose(weight, perm=[1, 0]), (L, B, 1)))
        g.output(drawn, self.drawn_name, (L, B, self.columns), "I32")
        code = self.code_map(values)
        if self.plan.carries_codes(self.scale):
            g.output(code, "own_codes", (B, self.map_channels, *self.map))
        if self.plan.carries_score(self.scale):
            self._output_score(code)
        added = self.contribution(code)
        summed = added if self.scale == 0 else g.Add(self.codes(), added)
        g.output(summed, "codes_next", (B, channels, *self.full))

    @property
    def map_channels(self) -> int:
        """Channels of this scale's codes on their own map."""
        return self.sizes.code_channels

    def previous_values(self) -> ir.Value | None:
        """Codes of the scale before at this scale's tokens, nearest neighbour [L, B, value_columns]; None: zeros."""
        g, patch = self.g, self.patch
        height, width = self.schedule[self.scale - 1]
        before = g.input("codes_before", (self.B, self.map_channels, height * patch, width * patch))
        rows = g.constant(nearest_index(height * patch, self.map[0]))
        columns = g.constant(nearest_index(width * patch, self.map[1]))
        return self.code_tokens(g.Gather(g.Gather(before, rows, axis=2), columns, axis=3))

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
