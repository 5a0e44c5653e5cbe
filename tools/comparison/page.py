"""compare.html: table, frontier and pictures of a comparison on one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toprovar.calibrate.figures import Chart, page_from_template, picture_uri, svg_from_figure
from toprovar.tools.comparison.charts import frontier
from toprovar.tools.comparison.table import HEADER, conditions, row_of
from toprovar.tools.comparison.winners import counted, sentence

TEMPLATE = Path(__file__).with_name("compare.html.j2")
CAPTION = (
    "Up and to the right is better. One colour and marker per method, a line from its gentlest to its strongest plan; "
    "hollow markers leave out the last two scales (preset paper). Bars: 95 % intervals over prompts. The star and the "
    "dashed line are dense."
)


def compare_page(document: Mapping[str, Any], pictures: Mapping[str, Sequence[np.ndarray]]) -> bytes:
    """UTF-8 HTML. pictures: per variant those of the first prompts, [H, W, 3] uint8, in the order of the prompts."""
    variants = document["variants"]
    shown = len(next(iter(pictures.values()), []))
    prompts = document["prompts"]["list"][:shown]
    rows = []
    for variant in variants:
        marks = variant["raw"]["right"]
        rows.append(
            {
                "name": variant["name"],
                "speed": f"TLE {variant['tle']['taken']:.2f}, wall-clock {variant['steps_ms']['speedup']:.2f}",
                "pictures": [
                    {
                        "uri": picture_uri(picture, 88),
                        "note": f"SSIM {variant['raw']['ssim'][i]:.3f}",
                        "verdict": {"1": "right", "0": "wrong: " + ", ".join(variant["raw"]["wrong_aspects"][i])}.get(
                            marks[i], ""
                        ),
                    }
                    for i, picture in enumerate(pictures[variant["name"]])
                ],
            }
        )
    title = f"{counted(len(variants) - 1, 'plan')} against dense, {counted(document['prompts']['count'], 'prompt')}"
    svg = svg_from_figure(frontier(document), "frontier", "Closeness and adherence over speed-ups", 760)
    return page_from_template(
        TEMPLATE,
        {
            "title": title,
            "sentences": [sentence(entry) for entry in document["winners"]],
            "chart": Chart(svg, CAPTION, wide=True),
            "header": HEADER,
            "table": [row_of(variant) for variant in variants],
            "left_out": document["left_out"],
            "prompts": prompts,
            "rows": rows,
            "conditions": conditions(document),
            "intervals": document["intervals"],
        },
    )
