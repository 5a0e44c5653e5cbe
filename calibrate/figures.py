"""The look shared by the HTML reports: colours, page style, curves as inline SVG, overlays on pictures.

Pages hold no script and no link to another host, and the same input gives the same bytes.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart under every common colour blindness. One meaning per colour on all pages.
FULL = "#0072B2"  # runs in full: Global layers, the dense variant
PRUNED = "#E69F00"  # may be pruned: Detail layers, the planned variant
THRESHOLD = "#B8460B"  # tau and the SSIM threshold
CHOSEN = "#007A5A"  # the scale depth D
INK = "#1C2733"
MUTED = "#6B7785"
FAINT = "#B4BCC6"

HEAT_MAP = "viridis"
HEAT_OPACITY = 0.62
PICTURE_SIDE = 256  # longer side of an embedded picture, pixels
OVERLAY_SIDE = 384  # of a keep mask: several pixels per token, so that hatching shows

PAGE_STYLE = """
:root { color-scheme: light; --ink: #1C2733; --muted: #5B6673; --line: #DCE1E7; --full: #0072B2; --pruned: #E69F00; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 20px 56px; max-width: 1140px; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; }
h2 { font-size: 19px; margin: 40px 0 12px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 26px 0 8px; overflow-wrap: anywhere; }
p { margin: 8px 0; max-width: 80ch; }
a { color: #005A8E; }
.lead { font-size: 17px; max-width: 75ch; }
.muted, figcaption, .note { color: var(--muted); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; margin: 18px 0;
padding: 0; }
.tiles div { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tiles dt { font-size: 12.5px; color: var(--muted); }
.tiles dd { margin: 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tiles dd small { display: block; font-size: 12px; line-height: 1.35; font-weight: 400; color: var(--muted); }
.warnings { background: #FFF6E0; border: 1px solid var(--pruned); border-left-width: 6px; border-radius: 8px;
  padding: 10px 16px; margin: 18px 0; }
.warnings strong { display: block; }
.warnings ul { margin: 4px 0; padding-left: 20px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 26px 32px; }
figure { margin: 0; min-width: 0; }
.figures .wide { grid-column: 1 / -1; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { font-size: 13px; line-height: 1.4; margin-top: 6px; }
.columns { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(46%, 180px), 1fr)); gap: 16px 14px; }
.columns h4 { margin: 0 0 6px; font-size: 13.5px; }
.columns figure + figure { margin-top: 8px; }
.columns figcaption { font-size: 12px; margin-top: 3px; min-height: 2.8em; }
.blocks { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 4px 40px; }
.blocks .columns { grid-template-columns: repeat(auto-fill, minmax(min(46%, 145px), 1fr)); }
.stack { position: relative; border-radius: 4px; overflow: hidden; background: #EEF1F4; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.stack > * { position: absolute; inset: 0; width: 100%; height: 100%; display: block; }
.base { background-size: 100% 100%; }
.grey { filter: grayscale(1); }
.empty { border: 1px dashed #B4BCC6; display: flex; align-items: center; justify-content: center; text-align: center;
  font-size: 12.5px; color: var(--muted); padding: 8px; border-radius: 4px; }
.heat { display: inline-block; width: 90px; height: 10px; border-radius: 2px; vertical-align: -1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line);
  font-weight: 400; overflow-wrap: anywhere; }
th { color: var(--muted); white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
@media (max-width: 560px) { body { padding: 18px 14px 40px; } h1 { font-size: 21px; } .lead { font-size: 16px; }
  th { white-space: normal; } }
"""


@dataclass(frozen=True)
class Chart:
    """A drawn figure and the sentence that says how to read it; wide ones take the page's whole width."""

    svg: Markup
    caption: str
    wide: bool = False


def new_axes(width_in: float = 4.8, height_in: float = 2.8) -> tuple[Figure, Axes]:
    """An empty figure in the reports' style, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """The reports' style: no frame, faint lines, small numbers."""
    axes.tick_params(labelsize=8.5, colors=INK, length=3, color=FAINT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.set_axisbelow(True)


def label_axes(axes: Axes, x: str, y: str, grid: bool = True) -> None:
    """Axis labels, and faint horizontal lines."""
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    if grid:
        axes.grid(axis="y", color="#E6EAEE", linewidth=0.8)


def scale_ticks(axes: Axes, scales: int) -> None:
    """One tick per scale, counted from 0."""
    axes.set_xticks(range(scales))
    axes.set_xlim(-0.6, scales - 0.4)


def legend_above(axes: Axes, columns: int = 3) -> None:
    """A legend above the plot, where it hides no data."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        fontsize=8,
        frameon=False,
        borderaxespad=0.2,
        columnspacing=1.3,
        handlelength=1.6,
        labelcolor=INK,
    )


def svg_from_figure(figure: Figure, name: str, label: str, min_width_px: int = 0) -> Markup:
    """The figure as an SVG element to stand in HTML.

    name:         prefix of its ids, which must be unique on the page
    label:        read aloud instead of the picture
    min_width_px: below this width the page scrolls sideways instead of shrinking the text
    """
    import matplotlib as mpl
    from markupsafe import Markup, escape

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        nameless = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # no version, no date
        figure.savefig(buffer, format="svg", metadata=nameless, bbox_inches="tight", pad_inches=0.04)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]  # without XML declaration and document type
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    head, body = text.split(">", 1)
    view = re.search(r'viewBox="[^"]+"', head)
    if view is None:
        raise ValueError(f"figure {name} has no viewBox")
    style = f' style="min-width:{min_width_px}px"' if min_width_px else ""
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return Markup(f'<svg {namespaces} {view[0]} role="img" aria-label="{escape(label)}"{style}>{body.strip()}')


def picture_uri(picture: np.ndarray, quality: int = 85) -> str:
    """[H, W, 3] uint8 -> WebP data URI, made smaller where a side exceeds 256 pixels."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(picture))
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=6)
    return _data_uri("image/webp", buffer.getvalue())


def heat_uri(entropy_nats: np.ndarray) -> str:
    """[h, w] nats -> translucent PNG, one pixel per token, from the map's minimum to its maximum.

    Raises: ValueError for non-finite entropy.
    """
    from matplotlib import colormaps

    if not np.isfinite(entropy_nats).all():
        raise ValueError("entropy map holds non-finite values")
    low, high = float(entropy_nats.min()), float(entropy_nats.max())
    shades = np.round((entropy_nats.astype(np.float64) - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    colours = (colormaps[HEAT_MAP](np.arange(256))[:, :3] * 255).round().astype(np.uint8)
    return _palette_uri(shades, colours, np.full(256, round(HEAT_OPACITY * 255), np.uint8))


def mask_uri(keep: np.ndarray) -> str:
    """[h, w] bool -> PNG that leaves kept tokens clear and darkens and hatches pruned ones."""
    size = max(OVERLAY_SIDE // max(keep.shape), 4)
    pruned = np.kron(~keep, np.ones((size, size), bool))
    y, x = np.indices(pruned.shape)
    hatched = (x + y) % 12 < 2
    shades = np.where(pruned, np.where(hatched, 2, 1), 0).astype(np.uint8)
    colours = np.array([[0, 0, 0], [12, 18, 26], [230, 159, 0]], np.uint8)
    return _palette_uri(shades, colours, np.array([0, 165, 200], np.uint8))


def _palette_uri(shades: np.ndarray, colours: np.ndarray, alpha: np.ndarray) -> str:
    """shades: [h, w] uint8 index into colours [n, 3] uint8 and alpha [n] uint8."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(shades), "L")
    image = Image.frombytes("P", image.size, image.tobytes())
    image.putpalette(colours.tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True, transparency=alpha.tobytes())
    return _data_uri("image/png", buffer.getvalue())


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def heat_gradient() -> str:
    """CSS gradient of the heat overlay, low to high, for its legend."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    stops: Sequence[str] = [to_hex(colormaps[HEAT_MAP](t)) for t in np.linspace(0, 1, 6)]
    return f"linear-gradient(90deg, {', '.join(stops)})"


def page_from_template(template: Path, values: Mapping[str, Any]) -> bytes:
    """Renders a page; everything is escaped except what these modules drew themselves.

    template: a file beside the module that calls; sees `style` and `heat_gradient` besides `values`.
    Raises:   jinja2.UndefinedError if the template asks for a value it was not given.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template(template.name).render(style=PAGE_STYLE, heat_gradient=heat_gradient(), **values)
    return page.encode("utf-8", "replace")  # a prompt from a command line may hold lone surrogates
