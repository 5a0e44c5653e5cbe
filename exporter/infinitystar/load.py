"""InfinityStar's transformer from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toprovar.exporter.infinitystar.config import config_from_shapes
from toprovar.exporter.loading import loaded
from toprovar.runtime.errors import ToprovarError

if TYPE_CHECKING:
    from toprovar.exporter.infinitystar.transformer import InfinityStar

BLOCKS = ("blocks.", "block_chunks.")


def load_infinitystar(tensors: Mapping[str, Any], what: str) -> InfinityStar:
    """Builds the transformer whose sizes the tensors have, and loads them (fp32). `sos_token` is left out: unused.

    Raises: ToprovarError for the first tensor that is missing, has another shape, is not finite or is not understood.
    """
    from toprovar.exporter.infinitystar.transformer import InfinityStar

    def refuse(unexpected: list[str]) -> None:
        for name in unexpected:
            if name.startswith(BLOCKS):
                raise ToprovarError(
                    f"{what}: tensor {name} belongs to no part of infinitystar-8b's blocks: found shape "
                    f"{list(tensors[name].shape)}; expected no such tensor",
                    "this variant of InfinityStar is not supported; see docs/families/infinitystar.md",
                )

    return loaded(tensors, what, lambda shapes: InfinityStar(config_from_shapes(shapes)), refuse)
