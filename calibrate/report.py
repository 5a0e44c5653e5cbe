"""The calibration report: one HTML file that shows what a plan was made from and what it decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toprovar.calibrate.figures import (
    CHOSEN,
    FAINT,
    FULL,
    INK,
    MUTED,
    PRUNED,
    THRESHOLD,
    Chart,
    heat_uri,
    label_axes,
    legend_above,
    mask_uri,
    new_axes,
    page_from_template,
    picture_uri,
    scale_ticks,
    svg_from_figure,
)
from toprovar.calibrate.methods import METHODS
from toprovar.plugins.token_gate.reference import lowest_scores
from toprovar.runtime.json_files import write_bytes
from toprovar.runtime.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from toprovar.calibrate.statistics import Statistics

TEMPLATE = Path(__file__).with_name("report.html.j2")
SCALE_AXIS = "scale (0-based)"
LAYER_AXIS = "layer (0-based)"
PRINTED_COUNTS = 12  # up to this many layers cells show token counts; beyond, whole percent


def write_report(
    path: Path, stats: Statistics, plan: Plan, depth_per_prompt: Sequence[int | None], facts: Mapping[str, str]
) -> None:
    """Writes the report as one self-contained HTML file; the same input gives the same bytes.

    depth_per_prompt: D of every prompt, None where rho never crosses tau
    facts:            what else a reader should know, name to text; "model" also stands in the title; wins over a fact
                      of the plan of the same name
    Raises:           ValueError if stats, plan and depths disagree; ToprovarError if the place cannot be written.
    """
    write_bytes(path, report_page(stats, plan, depth_per_prompt, facts))


def report_page(
    stats: Statistics, plan: Plan, depth_per_prompt: Sequence[int | None], facts: Mapping[str, str]
) -> bytes:
    """The report as UTF-8 HTML; see `write_report`."""
    if len(depth_per_prompt) != len(stats.prompts):
        raise ValueError(f"{len(depth_per_prompt)} depths for {len(stats.prompts)} prompts")
    if tuple(stats.schedule) != plan.schedule or stats.layers != plan.backbone.layers:
        raise ValueError("statistics and plan are of different models or schedules")
    backbone = plan.backbone
    return page_from_template(
        TEMPLATE,
        {
            "method": METHODS[plan.method].title if plan.method in METHODS else plan.method,
            "model": facts.get("model", backbone.family),
            "shape": f"{backbone.layers} layers, width {backbone.width}, {plan.scales} scales",
            "plan": plan,
            "prompts": len(stats.prompts),
            "crossing": sum(depth is not None for depth in depth_per_prompt),
            "guard": stats.guard_scale,
            "scale_charts": [
                rho_chart(stats, plan),
                entropy_chart(stats, plan),
                depth_chart(depth_per_prompt, plan),
                ssim_chart(stats, plan),
            ],
            "layer_charts": [layer_chart(stats, plan), keep_chart(plan)],
            "shown": shown_prompts(stats, plan),
            "facts": {**facts, **_plan_facts(plan), **facts},
        },
    )


# -- curves ------------------------------------------------------------------------------------------------------------


def rho_chart(stats: Statistics, plan: Plan) -> Chart:
    """Share of low-entropy tokens per scale, with tau, guard scale and D."""
    figure, axes = new_axes()
    _curves(axes, stats.rho)
    _mark_scales(axes, stats, plan)
    if plan.D.tau is not None:
        sign = {"le": "≤", "ge": "≥"}.get(plan.D.direction or "", "")
        axes.axhline(plan.D.tau, color=THRESHOLD, linewidth=1.4, linestyle=(0, (5, 3)), label=f"τ = {plan.D.tau:.3f}")
        crossing = f"; a prompt's D is its first scale from the guard scale on where ρ {sign} τ"
    else:
        crossing = ""
    axes.set_ylim(0, max(0.7, float(stats.rho.max()) * 1.05))
    label_axes(axes, SCALE_AXIS, "ρ: low-entropy share (0–1)")
    legend_above(axes, 3)
    caption = f"ρ is the share of tokens whose attention entropy is below the scale's mean{crossing}."
    return Chart(svg_from_figure(figure, "rho", "Share of low-entropy tokens per scale"), caption)


def entropy_chart(stats: Statistics, plan: Plan) -> Chart:
    """Mean attention entropy per scale, mean over tokens and layers."""
    figure, axes = new_axes()
    _curves(axes, stats.mean_entropy.mean(2))
    _mark_scales(axes, stats, plan)
    axes.set_ylim(bottom=0)
    label_axes(axes, SCALE_AXIS, "mean attention entropy (nats)")
    legend_above(axes, 3)
    caption = "Higher means that a token spreads its attention over more keys; mean over tokens and layers."
    return Chart(svg_from_figure(figure, "entropy", "Mean attention entropy per scale"), caption)


def depth_chart(depth_per_prompt: Sequence[int | None], plan: Plan) -> Chart:
    """How many prompts have which scale depth D."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_axes()
    counts = [sum(depth == k for depth in depth_per_prompt) for k in range(plan.scales)]
    never = sum(depth is None for depth in depth_per_prompt)
    colours = [CHOSEN if k == plan.D.value else FAINT for k in range(plan.scales)]
    places = [*range(plan.scales), plan.scales + 0.5]
    values = [*counts, never]
    bars = axes.bar(places, values, width=0.72, color=[*colours, FAINT])
    axes.bar_label(bars, labels=[str(v) if v else "" for v in values], fontsize=8, color=INK, padding=1)
    axes.set_xticks(places, [*map(str, range(plan.scales)), "none"])
    axes.set_ylim(0, max(*values, 1) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    label_axes(axes, "scale depth D (0-based scale; none: ρ never crosses τ)", "prompts (count)")
    chosen = f"the plan uses D = {plan.D.value} (green)" if plan.D.value is not None else "the plan uses no depth"
    caption = f"Every prompt alone would start pruning one scale after its own D; {chosen}."
    return Chart(svg_from_figure(figure, "depth", "Histogram of the scale depth D over prompts"), caption)


def ssim_chart(stats: Statistics, plan: Plan) -> Chart:
    """SSIM of the picture truncated after each scale to the full picture."""
    figure, axes = new_axes()
    _curves(axes, stats.truncated_ssim)
    _mark_scales(axes, stats, plan)
    threshold = plan.calib.ssim_threshold
    settled = ""
    if threshold is not None:
        axes.axhline(
            threshold, color=THRESHOLD, linewidth=1.4, linestyle=(0, (5, 3)), label=f"threshold = {threshold:.2f}"
        )
        settled = " above the threshold the scale counts as settled and its ρ helps to fit τ;"
    axes.set_ylim(min(0.0, float(np.nanmin(stats.truncated_ssim)) - 0.03), 1.03)
    label_axes(axes, SCALE_AXIS, "SSIM to the full picture")
    legend_above(axes, 3)
    caption = f"The picture is decoded without any code after the scale;{settled} 1 at the last scale by definition."
    return Chart(svg_from_figure(figure, "ssim", "SSIM of the truncated picture per scale"), caption)


def _curves(axes: Axes, values: np.ndarray) -> None:
    """values: [P, K]. One thin line per prompt, their mean, and the band between the quartiles."""
    prompts, scales = values.shape
    x = np.arange(scales)
    for row in values:
        axes.plot(x, row, color=MUTED, linewidth=0.6, alpha=max(0.12, min(0.5, 4 / prompts)))
    known = ~np.isnan(values).any(0)
    low, high = np.percentile(values[:, known], [25, 75], axis=0)
    axes.fill_between(x[known], low, high, color=FULL, alpha=0.2, linewidth=0, label="quartiles")
    axes.plot(x, values.mean(0), color=FULL, linewidth=2, marker="o", markersize=3.5, label=f"mean of {prompts}")
    scale_ticks(axes, scales)


def _mark_scales(axes: Axes, stats: Statistics, plan: Plan) -> None:
    axes.axvline(
        stats.guard_scale, color=MUTED, linewidth=1.2, linestyle=":", label=f"guard scale {stats.guard_scale}", zorder=1
    )
    if plan.D.value is not None:
        axes.axvline(plan.D.value, color=CHOSEN, linewidth=1.6, label=f"D = {plan.D.value}", zorder=1)


# -- layers and tokens -------------------------------------------------------------------------------------------------


def layer_chart(stats: Statistics, plan: Plan) -> Chart:
    """R per layer in the colour of its class, labelled with sigma1/sigma2; without scores, sigma1/sigma2 alone."""
    layers = stats.layers
    ratio = np.median(stats.singular_ratio, axis=0)
    figure, axes = new_axes(max(4.8, 0.3 * layers))
    x = np.arange(layers)
    labels = [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in ratio]
    if plan.layers.R:
        for name, colour in (("global", FULL), ("detail", PRUNED)):
            chosen = np.array([kind == name for kind in plan.layers.classes])
            heights = np.where(chosen, plan.layers.R, 0)
            count = int(chosen.sum())
            axes.bar(x[chosen], heights[chosen], width=0.72, color=colour, label=f"{name.capitalize()} ({count})")
        axes.axhline(0.5, color=MUTED, linewidth=1, linestyle=":", label="boundary R = 0.5")
        tops: np.ndarray = np.asarray(plan.layers.R)
        axes.set_ylim(0, max(1.0, float(tops.max())) * 1.2)
        axes.set_yticks(np.linspace(0, 1, 6))
        label_axes(axes, LAYER_AXIS, "layer score R (0–1)")
        legend_above(axes, 3)
        caption = (
            "R near 1 (Detail, orange) may be pruned, R near 0 (Global, blue) always runs in full; "
            "a layer whose class differs between prompts counts as Global; "
            "the number on a bar is the median σ₁/σ₂ of the layer's entropy map."
        )
    else:
        tops = ratio
        axes.bar(x, tops, width=0.72, color=FAINT, edgecolor=MUTED, linewidth=0.5)
        axes.set_ylim(0, float(tops.max()) * 1.2)
        label_axes(axes, LAYER_AXIS, "median σ₁/σ₂ (ratio)")
        caption = "The plan scores no layer; the bars show the median σ₁/σ₂ of each layer's entropy map."
    rotation = 90 if layers > PRINTED_COUNTS else 0
    for layer, (top, label) in enumerate(zip(tops, labels, strict=True)):
        axes.annotate(
            label, (layer, top), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=7.5,
            color=INK, rotation=rotation,
        )  # fmt: skip
    axes.set_xticks(x)
    axes.set_xlim(-0.6, layers - 0.4)
    wide = layers > 20
    svg = svg_from_figure(figure, "layers", "Layer score R per layer", 26 * layers if wide else 0)
    return Chart(svg, caption, wide)


def keep_chart(plan: Plan) -> Chart:
    """Tokens that run per scale and layer, as a heat map with the numbers in the cells."""
    layers, scales = plan.backbone.layers, plan.scales
    counts = np.array([plan.counts(k) for k in range(scales)])
    shares = counts / np.array([plan.tokens(k) for k in range(scales)])[:, None]
    in_counts = layers <= PRINTED_COUNTS
    figure, axes = new_axes(max(4.8, 1.0 + 0.3 * layers), 0.9 + 0.24 * scales)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.3, aspect="auto", interpolation="nearest")
    for k in range(scales):
        for layer in range(layers):
            share = float(shares[k, layer])
            text = str(counts[k, layer]) if in_counts else f"{share * 100:.0f}"
            axes.text(
                layer, k, text, ha="center", va="center", fontsize=7.5,
                color="white" if share > 0.75 else INK,
                fontweight="bold" if share < 1 else "normal",
            )  # fmt: skip
    axes.set_xticks(range(layers))
    names = [f"{k} ({h}×{w}){' skipped' if k in plan.skip_scales else ''}" for k, (h, w) in enumerate(plan.schedule)]
    axes.set_yticks(range(scales), names)
    axes.set_xticks(np.arange(layers + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(scales + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    label_axes(axes, LAYER_AXIS, SCALE_AXIS + ", map size in tokens", grid=False)
    unit = "tokens (count)" if in_counts else "percent of the scale's tokens"
    caption = f"Cells give the {unit} that run in a layer at a scale; paler and bold means pruned."
    wide = layers > 20
    svg = svg_from_figure(figure, "keep", "Tokens kept per scale and layer", 26 * layers + 90 if wide else 0)
    return Chart(svg, caption, wide)


# -- pictures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownScale:
    """One column of the picture grid; `mask` is empty where the gate has nothing to choose, and `note` says why."""

    scale: int
    size: str
    picture_class: str
    picture: str
    heat: str
    heat_note: str
    mask: str
    note: str


@dataclass(frozen=True)
class ShownPrompt:
    prompt: str
    seed: int
    aspect: str
    scales: list[ShownScale]


def shown_prompts(stats: Statistics, plan: Plan) -> list[ShownPrompt]:
    """Pictures, entropy and keep masks from the guard scale on, for the prompts whose maps were kept."""
    prompts = []
    for i, found in enumerate(stats.shown):
        columns = []
        for k in range(stats.guard_scale, plan.scales):
            height, width = plan.schedule[k]
            maps = found[f"entropy_{k}"]  # [L, h, w]
            gated = typical_gate(plan, k)
            if gated is not None and plan.score.kind != "entropy":  # ranked by what the report holds no map of
                count = plan.counts(k)[gated]
                entropy, source, mask = maps.mean(0), "mean over layers", ""
                note = f"{count} of {height * width} tokens by {plan.score.kind.replace('_', ' ')}"
            elif gated is None:
                entropy, source = maps.mean(0), "mean over layers"
                mask, note = "", _why_no_gate(plan, k)
            else:
                layer = plan.score.source_layer[k][gated]
                entropy, source = maps[layer], f"layer {layer}"
                count = plan.counts(k)[gated]
                mask = mask_uri(keep_mask(entropy, count))
                note = f"layer {gated} keeps {count} of {height * width} tokens ({count / (height * width):.0%})"
            columns.append(
                ShownScale(
                    scale=k,
                    size=f"{height}×{width}",
                    picture_class=f"p{i}-{k}",
                    picture=picture_uri(found[f"picture_{k}"]),
                    heat=heat_uri(entropy),
                    heat_note=f"entropy, {source}: {entropy.min():.2f} to {entropy.max():.2f} nats",
                    mask=mask,
                    note=note,
                )
            )
        rows, across = found[f"picture_{plan.scales - 1}"].shape[:2]
        prompts.append(ShownPrompt(stats.prompts[i], stats.seeds[i], f"{across} / {rows}", columns))
    return prompts


def typical_gate(plan: Plan, scale: int) -> int | None:
    """The layer with the median count among those that rank tokens at this scale; None if there are none."""
    counts = plan.counts(scale)
    gated = [layer for layer, count in enumerate(counts) if 0 < count < plan.tokens(scale)]
    return sorted(gated, key=lambda layer: (counts[layer], layer))[len(gated) // 2] if gated else None


def keep_mask(entropy_nats: np.ndarray, count: int) -> np.ndarray:
    """[h, w] nats -> [h, w] bool: True for the `count` tokens of lowest entropy, as the token gate picks them."""
    mask = np.zeros(entropy_nats.size, bool)
    mask[lowest_scores(entropy_nats.ravel(), count)] = True
    return mask.reshape(entropy_nats.shape)


def _why_no_gate(plan: Plan, scale: int) -> str:
    if scale in plan.skip_scales:
        return "the plan skips this scale"
    if plan.is_pruned(scale):
        return "no token choice: layers run in full or not at all"
    return f"dense: all {plan.tokens(scale)} tokens run in all layers"


def _plan_facts(plan: Plan) -> dict[str, str]:
    """What the plan says beside the figures, in words."""
    first = next((k for k in plan.run_scales if plan.is_pruned(k)), None)
    facts = {
        "schedule": " ".join(f"{h}×{w}" for h, w in plan.schedule),
        "work": f"{plan.token_layer_equivalents:.0f} of {sum(plan.tokens(k) for k in range(plan.scales))} tokens "
        "through the whole depth (token-layer equivalents)",
        "first pruned scale": "none" if first is None else str(first),
        "skipped scales": ", ".join(map(str, plan.skip_scales)) or "none",
        "restore": plan.restore.kind.replace("_", " ")
        + (
            f" of scale {plan.restore.ref_scale}, {plan.restore.resample}" if plan.restore.ref_scale is not None else ""
        ),
    }
    if plan.calib.alpha is not None:
        facts["α_min, α_max"] = f"{plan.calib.alpha[0]:g}, {plan.calib.alpha[1]:g}"
    if plan.calib.beta is not None:
        facts["β"] = f"{plan.calib.beta:.4g}"
    if plan.tool_version:
        facts["toprovar"] = plan.tool_version
    return facts
