"""The demo's report: one HTML page that puts measured numbers beside dense and pruned pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.calibrate.figures import (
    FULL,
    INK,
    PRUNED,
    Chart,
    heat_uri,
    label_axes,
    legend_above,
    mask_uri,
    new_axes,
    page_from_template,
    picture_uri,
    svg_from_figure,
)
from toprovar.runtime.json_files import write_bytes
from toprovar.runtime.plan import Plan

TEMPLATE = Path(__file__).with_name("demo_report.html.j2")
DIFFERENCE_GAIN = 4
PICTURE_QUALITY = 92
MIB = 2**20


@dataclass(frozen=True)
class PromptResult:
    """One prompt drawn dense and planned from the same noise.

    dense, planned:       [H, W, 3] uint8
    ssim, psnr_db:        of the planned picture to the dense one
    kept:                 per pruned scale, [h, w] bool: tokens the first gate kept
    entropy_nats:         per scale with a score source, [h, w] float
    dense_ms, planned_ms: latency per scale that runs, from scale 0
    """

    prompt: str
    seed: int
    dense: np.ndarray
    planned: np.ndarray
    ssim: float
    psnr_db: float
    kept: Mapping[int, np.ndarray]
    entropy_nats: Mapping[int, np.ndarray]
    dense_ms: Sequence[float]
    planned_ms: Sequence[float]


@dataclass(frozen=True)
class DemoReport:
    """What the page shows.

    summary: the values of summary.json: tle_speedup, wall_speedup, ssim_mean, psnr_mean, steps_ms_median {dense,
             planned}, codes_equal_torch_vs_onnxruntime, codes_compared, bundle_bytes, weights_bytes; optional: graphs
             (how many), seconds {stage: seconds}
    facts:   conditions, name to text: machine, threads, versions; "clock" (what the time covers) and "timing" (medians
             over how many runs) also stand beside the numbers
    plan:    None for a bundle without a planned variant
    calibration_link, summary_link: relative addresses, as seen from the page
    """

    results: Sequence[PromptResult]
    summary: Mapping[str, Any]
    facts: Mapping[str, str]
    plan: Plan | None = None
    calibration_link: str = "calibration/report.html"
    summary_link: str = "summary.json"


def write_demo_report(path: Path, report: DemoReport) -> None:
    """Writes the page as one self-contained HTML file; the same input gives the same bytes.

    Raises: ValueError for a report without results; KeyError for a missing summary value; ToprovarError if the place
            cannot be written.
    """
    write_bytes(path, demo_page(report))


def demo_page(report: DemoReport) -> bytes:
    """The page as UTF-8 HTML; see `write_demo_report`."""
    if not report.results:
        raise ValueError("demo report without results")
    return page_from_template(
        TEMPLATE,
        {
            "headline": headline(report),
            "summary": report.summary,
            "facts": report.facts,
            "cards": [_card(i, result) for i, result in enumerate(report.results)],
            "gain": DIFFERENCE_GAIN,
            "time_chart": time_chart(report.results),
            "times": _time_rows(report.results),
            "sizes": _sizes(report.summary),
            "stages": dict(report.summary.get("seconds", {})),
            "plan_facts": _plan_facts(report.plan) if report.plan else {},
            "calibration_link": report.calibration_link,
            "summary_link": report.summary_link,
        },
    )


def headline(report: DemoReport) -> str:
    """The measured numbers in one sentence; the same whether they flatter or not."""
    summary = report.summary
    times = summary["steps_ms_median"]
    count = len(report.results)
    clock = f" (clock: {report.facts['clock']})" if "clock" in report.facts else ""
    return (
        f"With {summary['tle_speedup']:.2f} times less token-layer work, the planned variant runs "
        f"{summary['wall_speedup']:.2f} times as fast as the dense one, {times['dense']:.0f} ms to "
        f"{times['planned']:.0f} ms per picture{clock}, at mean SSIM {summary['ssim_mean']:.3f} and PSNR "
        f"{summary['psnr_mean']:.1f} dB to the dense pictures of the same noise "
        f"({count} {'prompt' if count == 1 else 'prompts'}); {_parity(summary)}."
    )


def _parity(summary: Mapping[str, Any]) -> str:
    compared = summary["codes_compared"]
    if not compared:
        return "PyTorch and ONNX Runtime were not compared"
    verdict = "draw equal codes" if summary["codes_equal_torch_vs_onnxruntime"] else "draw different codes"
    return (
        f"PyTorch and ONNX Runtime {verdict} ({compared} dense {'picture' if compared == 1 else 'pictures'} compared)"
    )


# -- time and size -----------------------------------------------------------------------------------------------------


def median_ms(runs: Sequence[Sequence[float]]) -> np.ndarray:
    """Median latency per scale over prompts. Returns: [K] float64. Raises: ValueError if runs have different scales."""
    return np.median(np.array([list(run) for run in runs], np.float64), axis=0)


def time_chart(results: Sequence[PromptResult]) -> Chart:
    """Median time of every scale, dense and planned side by side."""
    dense, planned = (median_ms([getattr(r, name) for r in results]) for name in ("dense_ms", "planned_ms"))
    figure, axes = new_axes(8.0, 2.9)
    width = 0.4
    for values, shift, colour, name in ((dense, -0.5, FULL, "dense"), (planned, 0.5, PRUNED, "planned")):
        bars = axes.bar(
            np.arange(values.size) + shift * width,
            values,
            width,
            color=colour,
            label=f"{name}: sum {values.sum():.0f} ms",
        )
        axes.bar_label(bars, labels=[_short_ms(v) for v in values], fontsize=7, color=INK, padding=1)
    axes.set_xticks(range(max(dense.size, planned.size)))
    axes.set_ylim(0, max(float(dense.max()), float(planned.max()), 1e-3) * 1.12)
    label_axes(axes, "scale (0-based)", "time of the step graph (ms)")
    legend_above(axes)
    pruned = sorted({scale for result in results for scale in result.kept})
    where = f"tokens are pruned at scale {', '.join(map(str, pruned))}" if pruned else "no tokens are pruned"
    caption = f"Median over prompts, lower is faster; {where}."
    return Chart(svg_from_figure(figure, "times", "Time per scale, dense and planned", 560), caption, wide=True)


def _short_ms(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


@dataclass(frozen=True)
class TimeRow:
    name: str
    dense: str
    planned: str
    speedup: str


def _time_rows(results: Sequence[PromptResult]) -> list[TimeRow]:
    dense, planned = (median_ms([getattr(r, name) for r in results]) for name in ("dense_ms", "planned_ms"))
    rows = []
    for k in range(max(dense.size, planned.size)):
        pair = [float(values[k]) if k < values.size else 0.0 for values in (dense, planned)]
        rows.append(_time_row(str(k), *pair))
    return [*rows, _time_row("sum", float(dense.sum()), float(planned.sum()))]


def _time_row(name: str, dense: float, planned: float) -> TimeRow:
    speedup = f"{dense / planned:.2f}×" if dense > 0 and planned > 0 else "–"
    return TimeRow(name, f"{dense:.1f}", f"{planned:.1f}" if planned else "skipped", speedup)


def _sizes(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    bundle, weights = int(summary["bundle_bytes"]), int(summary["weights_bytes"])
    rows = [
        ("bundle, everything", _size(bundle)),
        ("weights, stored once for all graphs", _size(weights)),
        ("graphs, text data and manifest", _size(bundle - weights)),
    ]
    if "graphs" in summary:
        rows.append(("number of graphs", str(summary["graphs"])))
    return rows


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB ({size_bytes:,} bytes)"


def _plan_facts(plan: Plan) -> dict[str, str]:
    pruned = [k for k in plan.run_scales if plan.is_pruned(k)]
    detail = sum(kind == "detail" for kind in plan.layers.classes)
    facts = {
        "method": f"{plan.method} {plan.preset}".strip(),
        "schedule": " ".join(f"{h}×{w}" for h, w in plan.schedule),
        "scale depth D": "none" if plan.D.value is None else str(plan.D.value),
        "pruned scales": ", ".join(map(str, pruned)) or "none",
        "skipped scales": ", ".join(map(str, plan.skip_scales)) or "none",
    }
    if plan.layers.classes:
        facts["layers"] = f"{detail} Detail (prunable), {len(plan.layers.classes) - detail} Global (run in full)"
    return facts


# -- pictures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlay:
    """Entropy and keep mask of one scale; empty text where there is none."""

    scale: int
    size: str
    heat: str
    heat_note: str
    mask: str
    mask_note: str


@dataclass(frozen=True)
class Card:
    """One prompt as the template needs it."""

    prompt: str
    seed: int
    ssim: str
    psnr: str
    aspect: str
    dense: str
    planned: str
    planned_class: str
    difference: str
    overlays: list[Overlay]


def difference_picture(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| times the gain, clipped. a, b and result: [H, W, 3] uint8. Raises: ValueError if the shapes differ."""
    if a.shape != b.shape:
        raise ValueError(f"pictures have different shapes: {a.shape} and {b.shape}")
    difference = np.abs(a.astype(np.int32) - b.astype(np.int32)) * DIFFERENCE_GAIN
    return np.minimum(difference, 255).astype(np.uint8)


def _card(index: int, result: PromptResult) -> Card:
    height, width = result.dense.shape[:2]
    overlays = []
    for scale in sorted(result.kept.keys() | result.entropy_nats.keys()):
        entropy, kept = result.entropy_nats.get(scale), result.kept.get(scale)
        shape = (entropy if kept is None else kept).shape  # type: ignore[union-attr]
        overlays.append(
            Overlay(
                scale=scale,
                size=f"{shape[0]}×{shape[1]}",
                heat="" if entropy is None else heat_uri(entropy),
                heat_note="" if entropy is None else f"entropy {entropy.min():.2f} to {entropy.max():.2f} nats",
                mask="" if kept is None else mask_uri(kept),
                mask_note="" if kept is None else f"kept {int(kept.sum())} of {kept.size} tokens",
            )
        )
    return Card(
        prompt=result.prompt,
        seed=result.seed,
        ssim=f"{result.ssim:.3f}",
        psnr=f"{result.psnr_db:.1f}",
        aspect=f"{width} / {height}",
        dense=picture_uri(result.dense, PICTURE_QUALITY),
        planned=picture_uri(result.planned, PICTURE_QUALITY),
        planned_class=f"planned-{index}",
        difference=picture_uri(difference_picture(result.dense, result.planned), PICTURE_QUALITY),
        overlays=overlays,
    )
