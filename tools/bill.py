"""`toprovar inspect NAME --bill`: what a published model's arithmetic costs, scale by scale, from its sizes alone.

Counted, in bf16: matrix products with weights, attention over cache and text, and the bytes of weights, keys and values
that are read or written once per pass. A roofline time is the longer of computing and moving at a GPU's peaks, a floor
and no forecast. Activations are told apart: what flows into and out of products and attention if everything else is
fused. Left out: norms, sampling, the text encoder and the tokenizer's decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from toprovar.exporter.hart.config import PUBLISHED as HART
from toprovar.exporter.hart.config import PUBLISHED_SIDES, STEPS, TEXT_TOKENS, HartConfig
from toprovar.exporter.infinity.config import PUBLISHED as INFINITY
from toprovar.exporter.infinity.config import InfinityConfig
from toprovar.exporter.infinitystar.config import PUBLISHED as INFINITYSTAR
from toprovar.exporter.infinitystar.config import InfinityStarConfig
from toprovar.exporter.infinitystar.schedule import nearest_template as nearest_video_template
from toprovar.exporter.infinitystar.schedule import video_schedule
from toprovar.exporter.schedules import nearest_template, schedule_for, square
from toprovar.exporter.var.config import PUBLISHED as VAR
from toprovar.exporter.var.config import VarConfig
from toprovar.runtime.errors import ToprovarError
from toprovar.tools import console
from toprovar.tools.gpu_peaks import GPUS, GpuPeaks
from toprovar.tools.roofline import Work

Matrix = tuple[int, int]  # in, out

ITEM_BYTES = 2  # bf16
ROWS = 2  # with guidance
TEXT = 128  # tokens of a prompt where a family reads any number
VIDEO_FRAMES = 81
VIDEO_BUDGETS = {"infinitystar-8b-480p": "0.40M", "infinitystar-8b-720p": "0.90M"}
NAMES = (*INFINITY, *VAR, *HART, *VIDEO_BUDGETS)


@dataclass(frozen=True)
class Pass:
    """One run over one map, or several equal ones.

    tokens: that run, per row; keys: that each sees, text in the sequence among them
    own:    matrices outside the blocks that every token passes
    """

    what: str
    map: tuple[int, ...]
    tokens: int
    keys: int
    own: tuple[Matrix, ...]
    repetitions: int = 1


@dataclass(frozen=True)
class Refinement:
    """HART's residual head: a small network that every token of a map passes several times.

    per_step: matrices that see no token but the step
    """

    what: str
    map: tuple[int, ...]
    tokens: int
    network: tuple[Matrix, ...]
    per_step: tuple[Matrix, ...]
    steps: int

    def work(self) -> dict[str, int]:
        """Of all steps, both rows."""
        flow = ROWS * self.tokens * sum(map(sum, self.network)) + sum(map(sum, self.per_step))
        return {
            "linear_flops": 2 * self.steps * (ROWS * self.tokens * _weights(self.network) + _weights(self.per_step)),
            "attention_flops": 0,
            "weight_bytes": self.steps * (_weights(self.network) + _weights(self.per_step)) * ITEM_BYTES,
            "kv_bytes": 0,
            "activation_bytes": self.steps * flow * ITEM_BYTES,
        }


@dataclass(frozen=True)
class Costs:
    """What of a model decides its costs.

    block:      matrices of one layer that every token passes
    kv_width:   of keys, and of values
    cross_text: tokens of text that every layer attends to apart from its cache
    prompt:     (matrices, rows that pass them per batch row) once per prompt
    parameters: of all matrices
    template:   height over width, where there are several
    context_tokens: that the cache holds at most, per row
    """

    depth: int
    width: int
    attention_width: int
    kv_width: int
    block: tuple[Matrix, ...]
    passes: tuple[Pass, ...]
    prompt: tuple[tuple[tuple[Matrix, ...], int], ...]
    context_tokens: int
    parameters: int
    cross_text: int = 0
    template: str | None = None
    refinement: Refinement | None = None

    def work(self, step: Pass) -> dict[str, int]:
        """Of one run of a pass, both rows."""
        weights = self.depth * _weights(self.block) + _weights(step.own)
        attention = 4 * ROWS * step.tokens * (step.keys + self.cross_text) * self.attention_width * self.depth
        kv = 2 * ROWS * (step.keys + self.cross_text) * self.kv_width * self.depth * ITEM_BYTES
        # products read and write a row each; attention reads queries and writes what it mixed
        sites = 2 if self.cross_text else 1
        per_token = self.depth * (sum(map(sum, self.block)) + 2 * sites * self.attention_width)
        activations = ROWS * step.tokens * (per_token + sum(map(sum, step.own))) * ITEM_BYTES
        return {
            "linear_flops": 2 * ROWS * step.tokens * weights,
            "attention_flops": attention,
            "weight_bytes": weights * ITEM_BYTES,
            "kv_bytes": kv,
            "activation_bytes": activations,
        }


def _weights(matrices: Iterable[Matrix]) -> int:
    return sum(map(prod, matrices))


def _repeated(matrices: Sequence[Matrix], count: int) -> tuple[Matrix, ...]:
    return tuple(matrices) * count


def _growing(maps: Sequence[tuple[int, int]], own: tuple[Matrix, ...]) -> tuple[Pass, ...]:
    """Every map sees itself and all maps before it."""
    found, keys = [], 0
    for scale, (height, width) in enumerate(maps):
        keys += height * width
        found.append(Pass(f"{scale}", (height, width), height * width, keys, own))
    return tuple(found)


def _infinity(config: InfinityConfig, aspect: float, budget: str, text: int) -> Costs:
    C, F, W = config.width, config.ffn_width, config.text_width
    block = ((C, 3 * C), (C, C), (C, C), (C, C), (C, F), (F, C))  # qkv, out; cross query, out; feed-forward
    own = ((config.bits, C), (C, 2 * config.bits))
    passes = _growing(schedule_for(aspect, budget), own)
    rows = ((W, 2 * C), (W, C), (C, C), *_repeated([(C, 2 * C)], config.depth))  # pooling; rows; keys, values per layer
    pooled = ((C, C), (C, 6 * C), (C, 2 * C))
    return Costs(
        config.depth, C, C, C, block, passes, ((rows, text), (pooled, 1)),
        context_tokens=passes[-1].keys, parameters=_weights((*_repeated(block, config.depth), *own, *rows, *pooled)),
        cross_text=text, template=nearest_template(aspect),
    )  # fmt: skip


def _var(config: VarConfig) -> Costs:
    C, F = config.width, config.ffn_width
    assert config.published_sides is not None
    block, own = ((C, 3 * C), (C, C), (C, F), (F, C)), ((config.code_channels, C), (C, config.vocabulary))
    passes = _growing(square(config.published_sides), own)
    pooled = (*_repeated([(C, 6 * C)], 1 if config.shared_ada else config.depth), (C, 2 * C))
    return Costs(
        config.depth, C, C, C, block, passes, ((pooled, 1),), context_tokens=passes[-1].keys,
        parameters=_weights((*_repeated(block, config.depth), *own, *pooled)),
    )  # fmt: skip


def _hart(config: HartConfig) -> Costs:
    """The text runs as scale 0; the residual head follows the last map."""
    C, F, R = config.width, config.ffn_width, config.residual_width
    block, out = ((C, 3 * C), (C, C), (C, F), (C, F), (F, C)), (C, config.vocabulary)
    own = ((config.code_channels, C), out)
    passes = [Pass("0", (1, 1), TEXT_TOKENS, TEXT_TOKENS, (out,))]
    for scale, side in enumerate(PUBLISHED_SIDES[1:], 1):
        tokens = side * side
        passes.append(Pass(f"{scale}", (side, side), tokens, passes[-1].keys + tokens, own))
    d, last = config.code_channels, passes[-1]
    layers = _repeated([(R, R), (R, R), (R, 3 * R)], config.residual_depth)
    refinement = Refinement(
        "residual head", last.map, last.tokens, ((d, R), (C, R), *layers, (R, 2 * R), (R, 2 * d)),
        ((config.time_width, R), (R, R)), STEPS,
    )  # fmt: skip
    rows, pooled = ((config.text_width, C),), ((C, 2 * C),)
    outside = (*own, *rows, *pooled, *refinement.network, *refinement.per_step)
    return Costs(
        config.depth, C, C, C, block, tuple(passes), ((rows, TEXT_TOKENS), (pooled, 1)), context_tokens=last.keys,
        parameters=_weights((*_repeated(block, config.depth), *outside)), refinement=refinement,
    )  # fmt: skip


def _infinitystar(config: InfinityStarConfig, aspect: float, budget: str, text: int) -> Costs:
    """A pass sees the text, itself and the last map of the clip before."""
    C, F, Q, KV = config.width, config.ffn_width, config.heads * config.head_width, config.kv_heads * config.head_width
    block = ((C, Q), (C, KV), (C, KV), (Q, C), (C, F), (C, F), (F, C))
    schedule = video_schedule(aspect, budget, VIDEO_FRAMES)
    steps = schedule.passes()
    sizes = [prod(entry) for entry in schedule.entries]
    passes = []
    for step in steps:
        if step.repetition:
            continue
        context = 0 if step.context is None else sizes[step.context]
        bits = config.bits(step.is_semantic)
        own = ((config.detail_bits, C), (C, 2 * bits))
        count = sum(other.entry == step.entry for other in steps)
        passes.append(
            Pass(
                f"clip {step.clip}, {step.scale}", (step.frames, *step.size), step.tokens,
                text + context + step.tokens, own, count,
            )
        )  # fmt: skip
    kept = max((sizes[step.entry] for step in steps if step.keeps), default=0)
    blocks, d = _repeated(block, config.depth), config.detail_bits
    outside = ((config.text_width, C), (d, C), (C, 2 * d), (C, 2 * config.semantic_bits))
    return Costs(
        config.depth, C, Q, KV, block, tuple(passes), ((((config.text_width, C), *blocks), text),),
        context_tokens=text + kept, parameters=_weights((*blocks, *outside)), template=nearest_video_template(aspect),
    )  # fmt: skip


def published_config(name: str) -> Any:
    """Raises: ToprovarError for an unknown name, with the known ones."""
    if name in VIDEO_BUDGETS:
        return INFINITYSTAR["infinitystar-8b"]
    for table in (INFINITY, VAR, HART):
        if name in table:
            return table[name]
    raise ToprovarError(f"unknown model {name}", f"--bill knows {', '.join(NAMES)}")


def costs_of(name: str, aspect: float | None = None, budget: str | None = None, text: int | None = None) -> Costs:
    """Raises: ToprovarError for an unknown name, or a choice that the family does not have."""
    config = published_config(name)
    given = {"--aspect": aspect, "--budget": budget, "--text-tokens": text}
    if isinstance(config, InfinityConfig):
        return _infinity(config, aspect or 1.0, budget or "1M", text or TEXT)
    if isinstance(config, InfinityStarConfig):
        if budget is not None:
            raise ToprovarError(f"{name} has its own pixel budget; --budget {budget} was given", "leave --budget out")
        return _infinitystar(config, aspect or 0.5625, VIDEO_BUDGETS[name], text or TEXT)
    for option, value in given.items():
        if value is not None:
            raise ToprovarError(f"{name} has one size; {option} {value} was given", f"leave {option} out")
    return _hart(config) if isinstance(config, HartConfig) else _var(config)


def bill_of(
    name: str,
    aspect: float | None = None,
    budget: str | None = None,
    gpu: str = "h200",
    text: int | None = None,
    peaks: GpuPeaks | None = None,
) -> dict[str, Any]:
    """The bill as JSON-ready data: rows of prompt and passes, and their sums.

    aspect: height over width; budget: of Infinity's pixels; text: tokens of a prompt
    peaks:  instead of a known GPU's
    Raises: as `costs_of`, and for an unknown GPU.
    """
    if peaks is None and gpu not in GPUS:
        raise ToprovarError(f"unknown GPU {gpu}", f"give one of {', '.join(GPUS)}")
    peaks = peaks or GPUS[gpu]
    costs = costs_of(name, aspect, budget, text)
    rows = [_prompt_row(costs, peaks)]
    for step in costs.passes:
        one = costs.work(step)
        row: dict[str, Any] = {
            "what": step.what,
            "map": list(step.map),
            "passes": step.repetitions,
            "tokens": step.tokens,
            "keys": step.keys,
        }
        row |= {key: value * step.repetitions for key, value in one.items()}
        rows.append(row | _times(one, step.repetitions, peaks))
    if costs.refinement is not None:
        head, one = costs.refinement, costs.refinement.work()
        row = {"what": head.what, "map": list(head.map), "passes": head.steps, "tokens": 0, "keys": 0}
        rows.append(row | one | _times(one, 1, peaks))
    summed = (
        "passes", "linear_flops", "attention_flops", "weight_bytes", "kv_bytes", "activation_bytes", "roofline_ms",
    )  # fmt: skip
    return {
        "kind": "bill",
        "name": name,
        "config": asdict(published_config(name)),
        "template": costs.template,
        "gpu": {"name": gpu, **asdict(peaks)},
        "number_format": "bf16",
        "rows": ROWS,
        "text_tokens": costs.cross_text or None,
        "matrix_parameters": costs.parameters,
        "weight_bytes": costs.parameters * ITEM_BYTES,
        "cache_bytes": 2 * ROWS * costs.context_tokens * costs.kv_width * costs.depth * ITEM_BYTES,
        "scales": rows,
        "total": {key: sum(row[key] for row in rows) for key in summed}
        | {"tokens": sum(row["tokens"] * row["passes"] for row in rows[1:])},
    }


def _prompt_row(costs: Costs, peaks: GpuPeaks) -> dict[str, Any]:
    """What is computed once per prompt, of its rows and of what is pooled from them."""
    flops = sum(2 * ROWS * rows * _weights(part) for part, rows in costs.prompt)
    work = {
        "linear_flops": flops,
        "attention_flops": 0,
        "weight_bytes": sum(_weights(part) for part, _ in costs.prompt) * ITEM_BYTES,
        "kv_bytes": 0,
        "activation_bytes": sum(ROWS * rows * sum(map(sum, part)) for part, rows in costs.prompt) * ITEM_BYTES,
    }
    tokens = max(rows for _, rows in costs.prompt)
    return {"what": "prompt", "map": [], "passes": 1, "tokens": tokens, "keys": 0, **work, **_times(work, 1, peaks)}


def _times(work: dict[str, int], count: int, peaks: GpuPeaks) -> dict[str, Any]:
    """Roofline of `count` equal runs, and what bounds it."""
    moved = work["weight_bytes"] + work["kv_bytes"]
    needed = Work(work["linear_flops"] + work["attention_flops"], moved)
    is_memory = moved / (peaks.gbps * 1e6) > needed.flops / (peaks.tflops * 1e9)
    return {
        "roofline_ms": count * needed.floor_ms(peaks.tflops, peaks.gbps),
        "bound": "memory" if is_memory else "compute",
    }


def print_bill(facts: dict[str, Any]) -> None:
    """As a table; the JSON has exact numbers."""
    gpu, total = facts["gpu"], facts["total"]
    template = f", template {facts['template']} (height over width)" if facts["template"] else ""
    console.out.print(
        f"{facts['name']}{template}: {facts['matrix_parameters'] / 1e6:.1f} M parameters in matrices, "
        f"{facts['weight_bytes'] / 1e9:.2f} GB in bf16; keys and values of {facts['rows']} rows "
        f"{facts['cache_bytes'] / 1e9:.2f} GB at most",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.out.print(
        f"{gpu['label']}: {gpu['tflops']:g} TFLOP/s bf16, {gpu['gbps']:g} GB/s, {gpu['memory_gb']:g} GB; published "
        "peaks, so times are floors",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("scale", lambda row: row["what"]),
        ("map", lambda row: "x".join(map(str, row["map"]))),
        ("passes", lambda row: str(row["passes"])),
        ("tokens", lambda row: str(row["tokens"])),
        ("keys", lambda row: str(row["keys"])),
        ("TFLOP linear", lambda row: f"{row['linear_flops'] / 1e12:.3f}"),
        ("attention", lambda row: f"{row['attention_flops'] / 1e12:.3f}"),
        ("GB weights", lambda row: f"{row['weight_bytes'] / 1e9:.2f}"),
        ("K/V", lambda row: f"{row['kv_bytes'] / 1e9:.2f}"),
        ("activations", lambda row: f"{row['activation_bytes'] / 1e9:.2f}"),
        ("ms", lambda row: f"{row['roofline_ms']:.2f}"),
        ("bound", lambda row: row["bound"]),
    ]
    # plain lines: a table that is squeezed into a narrow terminal loses its numbers
    rows = [*facts["scales"], {"what": "sum", "map": [], "keys": "", "bound": "", **total}]
    cells = [[name for name, _ in columns], *([text(row) for _, text in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        padded = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        console.out.print("  ".join(padded), markup=False, highlight=False, soft_wrap=True)
