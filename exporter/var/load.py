"""VAR's transformer from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toprovar.exporter.loading import loaded
from toprovar.exporter.var.config import config_from_shapes
from toprovar.runtime.errors import ToprovarError

if TYPE_CHECKING:
    from toprovar.exporter.var.transformer import Var


def load_var(tensors: Mapping[str, Any], what: str, heads: int | None = None) -> Var:
    """Builds the transformer whose sizes the tensors have, and loads them (fp32).

    heads:  where attention is not cosine attention
    Raises: ToprovarError for the first tensor that is missing, has another shape, is not finite or is not understood.
    """
    from toprovar.exporter.var.transformer import Var

    def refuse(unexpected: list[str]) -> None:
        for name in unexpected:
            if not name.startswith("vae."):
                raise ToprovarError(
                    f"{what}: tensor {name} belongs to no part of VAR: found shape {list(tensors[name].shape)}; "
                    "expected no such tensor",
                    "this variant of VAR is not supported; see docs/families/var.md",
                )

    return loaded(tensors, what, lambda shapes: Var(config_from_shapes(shapes, heads)), refuse)
