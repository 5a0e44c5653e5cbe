"""What a text encoder makes of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class TextRows:
    """rows: [T, width] float32; valid: [T] bool, False on padding; kept, total: tokens used, tokens the prompt has."""

    rows: np.ndarray
    valid: np.ndarray
    kept: int
    total: int


class PromptEncoder(Protocol):
    """kind: as --kind names it; facts: what of its settings the rows depend on; files: the weights' source."""

    kind: str
    facts: dict[str, Any]
    files: Any

    def encode(self, prompt: str) -> TextRows: ...
