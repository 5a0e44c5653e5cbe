"""The first prompts of a split, in their fixed order, with what the judge found: failures are shown like the rest."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw

from toprovar.tools.evaluation.scoring import ASPECTS

CELL = 128
INITIALS = {"concept": "C", "style": "S", "background": "B", "pattern": "P", "count": "N", "relation": "R"}
TEXT_HEIGHT, MARK_HEIGHT, GAP = 40, 14, 6
RIGHT, WRONG = (20, 120, 60), (190, 30, 30)


def _marks(pen: ImageDraw.ImageDraw, x: int, y: int, right: Mapping[str, bool]) -> None:
    """One box per aspect asked for: filled if right, crossed out if wrong; told apart without colour too."""
    for i, aspect in enumerate(aspect for aspect in ASPECTS if aspect in right):
        left = x + 20 * i
        box = (left, y, left + 17, y + MARK_HEIGHT - 2)
        if right[aspect]:
            pen.rectangle(box, fill=RIGHT)
            pen.text((left + 5, y - 1), INITIALS[aspect], fill="white", font_size=11)
        else:
            pen.rectangle(box, outline=WRONG)
            pen.text((left + 5, y - 1), INITIALS[aspect], fill=WRONG, font_size=11)
            pen.line((left, y + MARK_HEIGHT - 2, left + 17, y), fill=WRONG)


def contact_sheet(
    texts: Sequence[str],
    pictures: Sequence[Mapping[str, np.ndarray]],
    right: Sequence[Mapping[str, Mapping[str, bool]]],
    columns: int = 6,
) -> Image.Image:
    """Per prompt its text, and per variant a picture over its marks (one letter per aspect).

    pictures, right: per prompt {variant: [256, 256, 3] uint8} and {variant: {aspect: right}}, in one order
    """
    variants = list(pictures[0])
    block = TEXT_HEIGHT + len(variants) * (CELL + MARK_HEIGHT)
    rows = -(-len(texts) // columns)
    legend = f"rows of a block: {', '.join(variants)}; filled: right, crossed: wrong; " + ", ".join(
        f"{INITIALS[aspect]} {aspect}" for aspect in ASPECTS
    )
    sheet = Image.new("RGB", (columns * (CELL + GAP) - GAP, 18 + rows * (block + GAP)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((2, 2), legend, fill="black", font_size=11)
    for i, text in enumerate(texts):
        x, y = i % columns * (CELL + GAP), 18 + i // columns * (block + GAP)
        pen.text((x, y), "\n".join(textwrap.wrap(text, 26)[:3]), fill="black", font_size=9)
        y += TEXT_HEIGHT
        for variant in variants:
            picture = Image.fromarray(pictures[i][variant]).resize((CELL, CELL), Image.Resampling.BOX)
            sheet.paste(picture, (x, y))
            _marks(pen, x, y + CELL + 1, right[i][variant])
            y += CELL + MARK_HEIGHT
    return sheet
