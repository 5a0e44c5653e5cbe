"""How many objects a picture shows: the arrangement of the grammar that explains its foreground.

Foreground is what differs from the picture's own background. An arrangement is possible if something stands in each of
its places, and costs the share of foreground outside of them; a small price on its area decides between one that fits
and a larger one around it (a big object covers the places of two small ones).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from toprovar.tools.evaluation.background import CELL, Background, lab_from_rgb, render
from toprovar.tools.evaluation.classifier import places_of
from toprovar.tools.train_demo.data import IMAGE_SIZE

# arrangement -> objects; "pair" also stands for "two", and "four" for "grid"
OBJECTS = {"single": 1, "pair": 2, "above": 2, "three": 3, "four": 4}
SAME_PLACES = {"two": "pair", "grid": "four"}
DIFFERENCE = 12.0  # CIELAB distance from which a pixel is foreground
FILLED = 0.01  # of a place's area, the least that counts as something
AREA_PRICE = 0.02
MARGIN = 4  # pixels around a place that belong to it, since drawn edges are soft; places are 16 apart


def arrangement_of(layout: str) -> str:
    return SAME_PLACES.get(layout, layout)


@lru_cache(maxsize=2)
def _regions(margin: int = 0) -> dict[str, Tensor]:
    """arrangement -> [places, 256, 256] bool."""
    regions = {}
    for name in OBJECTS:
        masks = torch.zeros(len(places_of(name)), IMAGE_SIZE, IMAGE_SIZE, dtype=torch.bool)
        for mask, (y, x, size) in zip(masks, places_of(name), strict=True):
            mask[y - margin : y + size + margin, x - margin : x + size + margin] = True
        regions[name] = masks
    return regions


@lru_cache(maxsize=1)
def _border() -> Tensor:
    """[256, 256] bool: the frame that no layout reaches."""
    inside = torch.zeros(IMAGE_SIZE, IMAGE_SIZE, dtype=torch.bool)
    inside[CELL:-CELL, CELL:-CELL] = True
    return ~inside


def objects_mask(layout: str) -> Tensor:
    """Where a layout's objects stand. Returns: [256, 256] bool."""
    return _regions()[arrangement_of(layout)].any(0)


def foreground(rgb: Tensor, background: Background) -> Tensor:
    """Pixels that differ from the background, single specks left out.

    The background is taken as the border shows it: a drawn "red" that is off as a whole makes no foreground.
    rgb: [3, 256, 256] in [0, 1]. Returns: [256, 256] bool.
    """
    residual = lab_from_rgb(rgb.float().cpu()[None])[0] - lab_from_rgb(render(background)[None])[0]  # [3, 256, 256]
    shift = residual[:, _border()].median(1).values
    distance = (residual - shift[:, None, None]).square().sum(0, keepdim=True).sqrt()  # [1, 256, 256]
    differs = (distance > DIFFERENCE).float()
    return (F.avg_pool2d(differs[None], 3, stride=1, padding=1)[0, 0] > 0.5) & (differs[0] > 0)


def find_arrangement(mask: Tensor) -> str:
    """The arrangement that explains a foreground. mask: [256, 256] bool. Returns: its name, or "none"."""
    total = max(float(mask.sum()), 1.0)
    best, least = "none", float("inf")
    for name, places in _regions().items():
        if any(float((mask & place).sum()) < FILLED * float(place.sum()) for place in places):
            continue
        region = _regions(MARGIN)[name].any(0)
        cost = float((mask & ~region).sum()) / total + AREA_PRICE * float(region.float().mean())
        if cost < least:
            best, least = name, cost
    return best
