"""Sample sheets: pictures in rows, with a caption under each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

CAPTION_HEIGHT = 22


def save_sheet(images: Tensor, texts: Sequence[str], path: Path, columns: int = 8, cell: int = 128) -> None:
    """Writes a PNG of at most 256 colours. images: [B, 3, H, W] in [-1, 1]; texts: one each, or empty."""
    scaled = torch.nn.functional.interpolate(
        images.float().cpu(), size=(cell, cell), mode="bilinear", antialias=True, align_corners=False
    )
    pixels = ((scaled.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    rows = -(-len(pixels) // columns)
    below = CAPTION_HEIGHT if texts else 0
    canvas = Image.new("RGB", (columns * cell, rows * (cell + below)), "white")
    pen = ImageDraw.Draw(canvas)
    for i, pixel in enumerate(pixels):
        x, y = i % columns * cell, i // columns * (cell + below)
        canvas.paste(Image.fromarray(np.ascontiguousarray(pixel)), (x, y))
        if texts:
            half = cell // 6
            pen.text((x + 2, y + cell), texts[i][:half] + "\n" + texts[i][half : 2 * half], fill="black", font_size=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    canvas.quantize(256).save(partial, "PNG", optimize=True)
    partial.replace(path)
