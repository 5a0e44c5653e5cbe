"""HART's modules from a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from toprovar.exporter.checkpoints import check_finite
from toprovar.exporter.families import DROPPED_KEYS, expect_shapes
from toprovar.exporter.hart.config import config_from_shapes
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

    # the published file's attention mask has 380 MB: it is not even read
    shapes = {name: tuple(tensors[name].shape) for name in tensors if name not in DROPPED_KEYS}
    with torch.device("meta"):
        model = Hart(config_from_shapes(shapes, heads))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in expected:
        if name.endswith("zero_k_bias"):
            shapes.setdefault(name, expected[name])
    for name in expect_shapes(shapes, expected, what):
        if name.startswith("blocks.") and not _COMPUTED.match(name):
            raise ToprovarError(
                f"{what}: tensor {name} belongs to no part of hart-0.7b's blocks: found shape {list(shapes[name])}; "
                "expected no such tensor",
                "this variant of HART is not supported; see docs/families/hart.md",
            )
    state = {n: tensors[n].float() if n in tensors else torch.zeros(shape) for n, shape in expected.items()}
    check_finite(state, what)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)
