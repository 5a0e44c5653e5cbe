"""Which background a picture has: every one the grammar knows is compared with the picture's border.

The border is a frame that no layout puts an object in: 16 pixels of a picture with one object, 8 of the others. It is
averaged over cells of 8 x 8 pixels, and the nearest of all backgrounds in CIELAB wins: 13 plain ones, and three
patterns of every ordered pair of colours. Distances are cut off, so that a smudge does not decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from toprovar.tools.train_demo.captions import COLOUR_NAMES, COLOURS, PATTERNS, Scene
from toprovar.tools.train_demo.data import IMAGE_SIZE, pattern_masks

CELL = 8
CUT = 30.0  # of a cell's distance: white to pink is 37, the nearest two named colours (black, navy) are 26 apart
_WHITE_POINT = (0.95047, 1.0, 1.08883)  # D65


def lab_from_rgb(rgb: Tensor) -> Tensor:
    """CIELAB (D65) of sRGB. rgb: [B, 3, H, W] in [0, 1] -> [B, 3, H, W] with lightness 0..100."""
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb.clamp_min(0) + 0.055) / 1.055) ** 2.4)
    matrix = torch.tensor(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    ).to(rgb)
    xyz = torch.einsum("ij,bjhw->bihw", matrix, linear) / torch.tensor(_WHITE_POINT).to(rgb)[:, None, None]
    f = torch.where(xyz > (6 / 29) ** 3, xyz.clamp_min(1e-12) ** (1 / 3), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = f.unbind(1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


@dataclass(frozen=True)
class Background:
    """A background of the grammar; second is "" for a plain one."""

    pattern: str
    first: str
    second: str = ""

    @property
    def colours(self) -> frozenset[str]:
        return frozenset({self.first, self.second} - {""})


def background_of(scene: Scene) -> Background:
    return Background(scene.pattern, scene.first, scene.second)


@lru_cache(maxsize=1)
def all_backgrounds() -> tuple[Background, ...]:
    """Plain ones first; the first colour of a pattern stands at the upper left."""
    plain = [Background("plain", colour) for colour in COLOUR_NAMES]
    patterned = [
        Background(pattern, first, second)
        for pattern in PATTERNS[1:]
        for first in COLOUR_NAMES
        for second in COLOUR_NAMES
        if first != second
    ]
    return (*plain, *patterned)


@lru_cache(maxsize=1)
def _masks() -> Tensor:
    return pattern_masks(torch.device("cpu"))


def render(background: Background) -> Tensor:
    """The background alone. Returns: [3, 256, 256] in [0, 1]."""
    first = torch.tensor(COLOURS[background.first])[:, None, None] / 255.0
    second = torch.tensor(COLOURS[background.second or background.first])[:, None, None] / 255.0
    return first + (second - first) * _masks()[PATTERNS.index(background.pattern)]


def _cells(rgb: Tensor) -> Tensor:
    """Means over cells, as CIELAB. [B, 3, 256, 256] -> [B, 3, 32, 32]."""
    return lab_from_rgb(F.avg_pool2d(rgb, CELL))


@lru_cache(maxsize=1)
def _templates() -> Tensor:
    """[backgrounds, 3, 32, 32] CIELAB."""
    return _cells(torch.stack([render(background) for background in all_backgrounds()]))


def _border(cells: int) -> Tensor:
    """[32, 32] bool: the outermost `cells` rings of cells."""
    side = IMAGE_SIZE // CELL
    inside = torch.zeros(side, side, dtype=torch.bool)
    inside[cells : side - cells, cells : side - cells] = True
    return ~inside


def find_background(rgb: Tensor, single: bool) -> list[Background]:
    """The nearest background of every picture.

    rgb:    [B, 3, 256, 256] in [0, 1]
    single: pictures with one object, whose border is twice as wide
    """
    border = _border(2 if single else 1)
    seen = _cells(rgb.float().cpu())[:, :, border]  # [B, 3, cells]
    templates = _templates()[:, :, border]  # [backgrounds, 3, cells]
    found = []
    for picture in seen:
        distance = (templates - picture).square().sum(1).sqrt().clamp_max(CUT).mean(1)  # [backgrounds]
        found.append(all_backgrounds()[int(distance.argmin())])
    return found
