"""VAR's transformer from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from toprovar.exporter.checkpoints import check_finite
from toprovar.exporter.families import DROPPED_KEYS, expect_shapes
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

    shapes = {name: tuple(tensors[name].shape) for name in tensors if name not in DROPPED_KEYS}
    with torch.device("meta"):
        model = Var(config_from_shapes(shapes, heads))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in expected:
        if name.endswith("zero_k_bias"):
            shapes.setdefault(name, expected[name])
    unexpected = [name for name in expect_shapes(shapes, expected, what) if not name.startswith("vae.")]
    if unexpected:
        raise ToprovarError(
            f"{what}: tensor {unexpected[0]} belongs to no part of VAR: found shape {list(shapes[unexpected[0]])}; "
            "expected no such tensor",
            "this variant of VAR is not supported; see docs/families/var.md",
        )
    state = {n: tensors[n].float() if n in tensors else torch.zeros(shape) for n, shape in expected.items()}
    check_finite(state, what)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)
