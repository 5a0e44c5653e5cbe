"""PNG files that say how they were made."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from toprovar.runtime.json_files import write_bytes


def printable(text: str) -> str:
    """Text without lone surrogates and NUL, which no file format takes."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{SYMBOL FOR NULL}")


def write_png(path: Path, picture: np.ndarray, facts: dict[str, str]) -> None:
    """Writes [H, W, 3] uint8 with text entries (prompt, seed, bundle digest …), complete or not at all.

    Raises: ToprovarError if the place cannot be written.
    """
    info = PngImagePlugin.PngInfo()
    for key, value in facts.items():
        info.add_itxt(key, printable(value))
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="png", pnginfo=info)
    write_bytes(path, buffer.getvalue())
