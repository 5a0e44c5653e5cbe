"""Pictures of a run that are kept as files: where, and whether a file holds the one that is meant."""

from __future__ import annotations

from pathlib import Path

from PIL import Image


def picture_path(out: Path, prompt: int, variant: str) -> Path:
    """variant: its name; what file names cannot hold everywhere becomes a dash."""
    return out / "pictures" / f"{prompt:03d}_{variant.replace(':', '-')}.png"


def is_picture_of(path: Path, identity: str) -> bool:
    """Whether a file holds the picture of a record, and not that of a run with other options."""
    try:
        with Image.open(path) as picture:
            return picture.info.get("identity") == identity
    except (OSError, SyntaxError):  # missing or damaged
        return False
