"""HART's modules from a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toprovar.exporter.hart.config import config_from_shapes
from toprovar.exporter.loading import loaded
from toprovar.runtime.errors import ToprovarError

if TYPE_CHECKING:
    from toprovar.exporter.hart.transformer import Hart

# Parts of `blocks.` that a checkpoint may carry and this project computes.
_COMPUTED = re.compile(r".*(rotary_emb|inv_freq).*")


def load_hart(tensors: Mapping[str, Any], what: str, heads: int | None = None) -> Hart:
    """Builds the transformer whose sizes the tensors have, and loads them (fp32).

    heads:  where attention is not cosine attention
    Raises: ToprovarError for the first tensor that is missing, has another shape, is not finite or is not understood.
    """
    from toprovar.exporter.hart.transformer import Hart

    def refuse(unexpected: list[str]) -> None:
        for name in unexpected:
            if name.startswith("blocks.") and not _COMPUTED.match(name):
                raise ToprovarError(
                    f"{what}: tensor {name} belongs to no part of hart-0.7b's blocks: found shape "
                    f"{list(tensors[name].shape)}; expected no such tensor",
                    "this variant of HART is not supported; see docs/families/hart.md",
                )

    return loaded(tensors, what, lambda shapes: Hart(config_from_shapes(shapes, heads)), refuse)
