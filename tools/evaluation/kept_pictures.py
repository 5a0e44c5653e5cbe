"""Pictures of a run that are kept as files: where, and whether a file holds the one that is meant."""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image


def file_name_of(variant: str) -> str:
    """A variant's name as a file's: what not every file system takes becomes a dash."""
    return re.sub(r"[^\w.@=,+-]", "-", variant)


def picture_path(out: Path, prompt: int, variant: str) -> Path:
    return out / "pictures" / f"{prompt:03d}_{file_name_of(variant)}.png"


def is_picture_of(path: Path, identity: str) -> bool:
    """Whether a file holds the picture of a record, and not that of a run with other options."""
    try:
        with Image.open(path) as picture:
            return picture.info.get("identity") == identity
    except (OSError, SyntaxError):  # missing or damaged
        return False
