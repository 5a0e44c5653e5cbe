"""The frontier: SSIM to dense and adherence over token-layer work saved, and over time saved."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toprovar.calibrate.figures import INK, MUTED, label_axes, style_axes, svg_from_figure
from toprovar.calibrate.methods import METHODS
from toprovar.runtime.errors import ToprovarError
from toprovar.tools.comparison.lineup import DENSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette; a marker each, so that nothing hangs on colour alone
LOOKS = {
    "toprovar": ("#D55E00", "o"),
    "fixed_exit": ("#1C2733", "s"),
    "fastvar": ("#0072B2", "^"),
    "skipvar": ("#009E73", "D"),
    "stepvar": ("#CC79A7", "v"),
    "depthvar": ("#56B4E9", "P"),
    "ld_pruning": ("#E69F00", "X"),
}
OTHER = ("#6B7785", "h")
TICKS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12)
DPI = 160

Variant = Mapping[str, Any]
Point = tuple[float, tuple[float, float]]  # value, interval

X_AXES: dict[str, Callable[[Variant], Point]] = {
    "token-layer work: dense over taken (TLE)": lambda v: (v["tle"]["taken"], v["tle"]["interval"]),
    "time of the scale steps: dense over plan": lambda v: (v["steps_ms"]["speedup"], v["steps_ms"]["interval"]),
}
Y_AXES: dict[str, Callable[[Variant], Point]] = {
    "SSIM to dense": lambda v: (v["ssim"]["mean"], v["ssim"]["interval"]),
    "adherence: share all right": lambda v: (v["adherence"]["share"], v["adherence"]["interval"]),
}


def _bars(point: Point) -> list[list[float]]:
    value, (low, high) = point
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def _draw(axes: Axes, groups: Mapping[tuple[str, str], Sequence[Variant]], x: str, y: str) -> None:
    """groups: {(method, preset): variants}; a line joins those of a group from gentle to strong."""
    at, of = X_AXES[x], Y_AXES[y]
    named = set()
    for (method, preset), variants in groups.items():
        colour, marker = LOOKS.get(method, OTHER)
        is_paper = preset == "paper"
        order = sorted(variants, key=lambda v: at(v)[0])
        line: dict[str, Any] = {
            "color": colour,
            "linewidth": 0.9,
            "alpha": 0.55,
            "linestyle": (0, (2, 2)) if is_paper else "-",
        }
        axes.plot([at(v)[0] for v in order], [of(v)[0] for v in order], **line)
        for variant in order:
            across, up = at(variant), of(variant)
            label = METHODS[method].title if method in METHODS else method
            axes.errorbar(
                [across[0]],
                [up[0]],
                xerr=_bars(across),
                yerr=_bars(up),
                fmt=marker,
                color=colour,
                markersize=5,
                markerfacecolor="white" if is_paper else colour,
                markeredgecolor=colour if is_paper else "white",
                markeredgewidth=1.0 if is_paper else 0.5,
                elinewidth=0.6,
                ecolor=(*_rgb(colour), 0.45),
                label=None if is_paper or method in named else label,
            )
            if not is_paper:
                named.add(method)


def _rgb(colour: str) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    return to_rgb(colour)


def frontier(document: Mapping[str, Any]) -> Figure:
    """Two charts, or four where adherence is known. Up and to the right is better."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    variants = document["variants"]
    dense = next(v for v in variants if v["name"] == DENSE)
    groups: dict[tuple[str, str], list[Variant]] = {}
    for variant in variants:
        if variant is not dense:
            groups.setdefault((variant["method"], variant["preset"]), []).append(variant)
    rows = [y for y in Y_AXES if y == "SSIM to dense" or all(v["adherence"] for v in variants)]
    figure = Figure(figsize=(9.6, 3.6 * len(rows) + 0.5), layout="constrained")
    for row, y in enumerate(rows):
        for column, x in enumerate(X_AXES):
            axes = figure.add_subplot(len(rows), 2, row * 2 + column + 1)
            style_axes(axes)
            _draw(axes, groups, x, y)
            value, (low, high) = Y_AXES[y](dense)
            axes.plot([1], [value], marker="*", markersize=11, color=INK, linestyle="none", label="Dense")
            if high > low:
                axes.axhspan(low, high, color=MUTED, alpha=0.08, linewidth=0)
            axes.axhline(value, color=MUTED, linewidth=0.7, linestyle=(0, (4, 3)))
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(TICKS))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:g}×"))
            label_axes(axes, x, y)
            axes.grid(axis="x", color="#E6EAEE", linewidth=0.8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if any(preset == "paper" for _, preset in groups):
        handles.append(Line2D([], [], marker="o", color=MUTED, markerfacecolor="white", linestyle=(0, (2, 2))))
        labels.append("hollow: preset paper")
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8.5, frameon=False, labelcolor=INK)
    return figure


def chart_bytes(document: Mapping[str, Any], kind: str) -> bytes:
    """kind: svg or png; the same document gives the same SVG. Raises: ToprovarError for another kind."""
    if kind not in ("svg", "png"):
        raise ToprovarError(f"charts are drawn as png or svg, not {kind or 'a file without ending'}", "name it .png")
    figure = frontier(document)
    if kind == "svg":
        return (str(svg_from_figure(figure, "frontier", "Closeness and adherence over speed-ups")) + "\n").encode()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
